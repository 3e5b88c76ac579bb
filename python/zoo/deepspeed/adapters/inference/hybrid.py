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

    With ``inference_tp_size`` > 1 so many ranks generate the rows of all of them together, with tensor-parallel parts
    that are made of the weights of now at each call (:class:`zoo.inference.Rollout`).

    Attributes:
        max_out_tokens: of a row, prompt included. inference_tp_size: ranks that share a model to generate.
        injection: which layers have fast forwards, and why others have not; None where none has.

    Raises:
        ValueError: ``max_out_tokens`` or ``inference_tp_size`` is no whole number of at least 1.
    """

    def __init__(self, engine: Any, config: Mapping[str, Any], mpu: Any = None) -> None:
        super().__init__(engine, config, mpu)
        section = said_in(config["hybrid_engine"])
        self.max_out_tokens = _whole(section, "max_out_tokens", MAX_OUT_TOKENS)
        self.inference_tp_size = _whole(section, "inference_tp_size", 1)
        self._rollout: Any = None
        self.injection = self._injected()

    @property
    def rollout(self) -> Any:
        """The ranks' shared model, made when it is first asked for by all of them; None: the model itself generates.

        Raises:
            ValueError: the ranks cannot be divided so, or the model has no plan to be cut by.
        """
        if self.inference_tp_size > 1 and self._rollout is None:
            from zoo.inference import Rollout

            self._rollout = Rollout(self.engine, placement="tensor", degree=self.inference_tp_size)
        return self._rollout

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
        if self.inference_tp_size > 1:
            return generate_together(self.rollout, inputs, kwargs)
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
        if self._rollout is not None:
            self._rollout.close()
            self._rollout = None
        if self.injection is not None:
            from zoo.inject import detach

            detach(self.module)
            self.injection = None
        super().destroy()


def _whole(section: Mapping[str, Any], key: str, default: int) -> int:
    value = section.get(key, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"hybrid_engine.{key}={value!r}; it must be a whole number, at least 1.")
    return value


def generate_together(rollout: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """``generate`` of transformers for the rows of all ranks that share a model; this rank's. Collective over them.

    Raises:
        ValueError: prompts of ranks have other widths, or what is asked for are not the tokens alone.
    """
    from zoo.deepspeed.adapters.inference.ranks import draw_alike

    rest, rows, mask = _rows_of(inputs, dict(kwargs))
    group = rollout.group
    told = group.all_gather_object((rows.cpu(), None if mask is None else mask.cpu()))
    widths = [one.shape[1] for one, _ in told]
    masked = [there is not None for _, there in told]
    if len(set(widths)) > 1 or len(set(masked)) > 1:
        raise ConfigError(
            f"hybrid_engine.inference_tp_size: ranks generate together, and their prompts have {widths} columns, "
            f"with a mask: {masked}. Pad all to one width, and give all a mask, or none."
        )
    if mask is not None:
        rest["attention_mask"] = torch.cat([there for _, there in told]).to(rows.device)
    rollout.refresh()
    with torch.random.fork_rng(), torch.no_grad():  # training draws what it would have drawn
        draw_alike(group)
        found = rollout.model.generate(torch.cat([one for one, _ in told]).to(rows.device), **rest)
    times = found.shape[0] // sum(len(one) for one, _ in told)  # sequences of a row
    before = times * sum(len(one) for one, _ in told[: group.rank])
    own: torch.Tensor = found[before : before + times * len(rows)]
    return own


def _rows_of(inputs: tuple[Any, ...], rest: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor, Any]:
    """(other arguments, prompts, their mask)."""
    given = [*inputs, *(rest.pop(name) for name in ("inputs", "input_ids") if name in rest)]
    rest.pop("synced_gpus", None)
    if len(given) != 1 or not isinstance(given[0], torch.Tensor) or rest.get("return_dict_in_generate"):
        raise ConfigError(
            "hybrid_engine.inference_tp_size: ranks generate together, from one tensor of prompts (input_ids), and get "
            "tokens alone (no return_dict_in_generate)."
        )
    return rest, given[0], rest.pop("attention_mask", None)


def _takes_synced(generate: Any) -> bool:
    try:
        known = inspect.signature(generate).parameters
    except (TypeError, ValueError):
        return False
    return "synced_gpus" in known
