"""``DeepSpeedHybridEngine``: an engine whose model also generates, from the weights that it trains."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zoo.config import ConfigError
from zoo.deepspeed.adapters import told_as
from zoo.deepspeed.adapters.configuration.plain_values import said_in
from zoo.deepspeed.adapters.inference.lengths import Lengths, check_lengths
from zoo.deepspeed.adapters.root.engine import DeepSpeedEngine
from zoo.deepspeed.adapters.utilities.logs import logger, warning_once

MAX_OUT_TOKENS = 512


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """What ``initialize`` returns where ``hybrid_engine.enabled`` is true: a :class:`DeepSpeedEngine` with
    :meth:`generate`.

    The model that is trained generates: no copy is made, nothing is gathered ahead, and training goes on with the bits
    that it has without. Its decoder layers have the fast forwards of ``zoo.inject`` where that is proved, also for
    programs that call ``engine.module.generate``.

    Attributes:
        max_out_tokens: of a row, prompt included.
        injection: which layers have fast forwards, and why others have not; None where none has.

    Raises:
        ValueError: ``max_out_tokens`` is no whole number of at least 1.
    """

    def __init__(self, engine: Any, config: Mapping[str, Any], mpu: Any = None) -> None:
        super().__init__(engine, config, mpu)
        most = said_in(config["hybrid_engine"]).get("max_out_tokens", MAX_OUT_TOKENS)
        if type(most) is not int or most < 1:
            raise ConfigError(f"hybrid_engine.max_out_tokens={most!r}; it must be a whole number, at least 1.")
        self.max_out_tokens: int = most
        self.injection = self._injected()

    def _injected(self) -> Any:
        try:
            from zoo.inject import inject  # without zoo-kernels the model generates as it is

            found = inject(self.module)
        except (ImportError, ValueError) as error:
            warning_once(f"hybrid_engine: {error} The model generates as it is.")
            return None
        logger.info("hybrid_engine: %s", found)
        return found

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """That of the model, in ``eval()`` and without gradients; the mode is afterwards what it was. Where ranks have
        parts of the parameters, all of them call this, and those that are done first go on until all are.

        Raises:
            ValueError: (a RuntimeError too) a prompt and what is to be added are more than ``max_out_tokens``.
            AttributeError: the model does not generate.
        """
        own: Any = self.module.generate
        lengths = Lengths(self.max_out_tokens, 1, "the section hybrid_engine")
        told_as(RuntimeError)(check_lengths)(self.module, lengths, inputs, kwargs)
        if self.engine.sharded.everyone.size > 1 and self.zero_optimization_stage() == 3 and _takes_synced(own):
            kwargs.setdefault("synced_gpus", True)
        training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            with torch.no_grad():
                return own(*inputs, **kwargs)
        finally:
            for module in training:
                module.training = True

    def destroy(self) -> None:
        """As of :class:`DeepSpeedEngine`; the model has its own forwards again."""
        if self.injection is not None:
            from zoo.inject import detach

            detach(self.module)
            self.injection = None
        super().destroy()


def _takes_synced(generate: Any) -> bool:
    try:
        known = inspect.signature(generate).parameters
    except (TypeError, ValueError):
        return False
    return "synced_gpus" in known
