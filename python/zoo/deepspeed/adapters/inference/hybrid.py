"""``DeepSpeedHybridEngine``: an engine whose model also generates, from the weights that it trains."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zoo.comm import raise_together, together
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
        if self.inference_tp_size > 1:
            return told_as(RuntimeError)(generate_together)(self.rollout, lengths, inputs, kwargs)
        parted = self.engine.sharded.everyone.size > 1 and self.zero_optimization_stage() == 3
        with raise_together(self.engine.sharded.everyone if parted else None, "generate"):
            told_as(RuntimeError)(check_lengths)(self.module, lengths, inputs, kwargs)
        if parted and _takes_synced(own):
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


def generate_together(
    rollout: Any, lengths: Lengths, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:  # fmt: skip
    """``generate`` of transformers for the rows of all ranks that share a model; this rank's. Collective over all ranks
    of the engine.

    Raises:
        ValueError: on all ranks: a row of one is too long, prompts of ranks that share a model have other widths, or
            they ask for other things, or for more than the tokens.
    """
    from zoo.deepspeed.adapters.inference.ranks import draw_alike

    def mine() -> tuple[torch.Tensor, torch.Tensor | None, dict[str, str]]:
        check_lengths(rollout.model, lengths, inputs, dict(kwargs))
        rest, rows, mask = _rows_of(inputs, dict(kwargs))
        return rows.cpu(), None if mask is None else mask.cpu(), {name: _told(value) for name, value in rest.items()}

    everyone = together(rollout.comm, "generate", mine, error=lambda said, _: ValueError(said), plain=ValueError)
    groups = [everyone[first : first + rollout.degree] for first in range(0, len(everyone), rollout.degree)]
    for group in groups:
        _check_alike(group)
    rest, rows, mask = _rows_of(inputs, dict(kwargs))
    group, told = rollout.group, groups[rollout.comm.rank // rollout.degree]
    if mask is not None:
        rest["attention_mask"] = torch.cat([there for _, there, _ in told if there is not None]).to(rows.device)
    rollout.refresh()
    with torch.random.fork_rng(), torch.no_grad():  # training draws what it would have drawn
        draw_alike(group)
        found = rollout.model.generate(torch.cat([one for one, _, _ in told]).to(rows.device), **rest)
    times = found.shape[0] // sum(len(one) for one, _, _ in told)  # sequences of a row
    before = times * sum(len(one) for one, _, _ in told[: group.rank])
    own: torch.Tensor = found[before : before + times * len(rows)]
    return own


def _check_alike(told: list[tuple[torch.Tensor, torch.Tensor | None, dict[str, str]]]) -> None:
    widths, masked = [rows.shape[1] for rows, _, _ in told], [mask is not None for _, mask, _ in told]
    if len(set(widths)) > 1 or len(set(masked)) > 1:
        raise ConfigError(
            f"hybrid_engine.inference_tp_size: ranks generate together, and their prompts have {widths} columns, "
            f"with a mask: {masked}. Pad all to one width, and give all a mask, or none."
        )
    first = told[0][2]
    for _, _, other in told:
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"hybrid_engine.inference_tp_size: ranks generate together, and ask for other things: {name} is "
                    f"{first.get(name)} and {other.get(name)}. Give all the same."
                )


def _told(value: Any) -> str:
    """What can be compared with another rank's: of an object the class, as its repr may have an address."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    plain = isinstance(value, (bool, int, float, str, type(None)))
    if plain or hasattr(value, "to_json_string"):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {', '.join(map(_told, value))}"
    return type(value).__name__


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
