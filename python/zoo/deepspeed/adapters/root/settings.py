"""Attributes that a program sets on an engine or its optimizer: each is obeyed, or refused with what does it.

A name is refused where a program of DeepSpeed would expect something to follow from it, and nothing would: a key of the
configuration, a question that the engine answers, what an optimizer of DeepSpeed has. Other names are the program's
own, and functions may be put around methods.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from numbers import Real
from types import FunctionType
from typing import Any

from zoo.config import root_keys
from zoo.config.section import fields_by_key
from zoo.engine import Engine
from zoo.shard.config import ZeroConfig
from zoo.zero import ZeroOptimizer

_CLIP = "set {optimizer}.clip_grad, a number, on all ranks"
_SCALE = "set {optimizer}.cur_scale between two steps, or say how it moves in the configuration's section fp16"
_MICRO = "where a step ends is said by engine.set_gradient_accumulation_boundary(), and engine.micro_steps may be set"
_BATCH = "call engine.set_train_batch_size(), with the samples of one step on all ranks"
_ANSWER = "that is an answer, and nothing would follow from another one"

# Name → what to do instead, of engines and optimizers alike.
_OF_BOTH: dict[str, str] = {
    **dict.fromkeys(("gradient_clipping", "max_grad_norm", "clip_norm", "grad_clip"), _CLIP),
    **dict.fromkeys(("external_loss_scale", "custom_loss_scaler", "loss_scaler", "loss_scale_config"), _SCALE),
    "dynamic_loss_scale": "fp16.loss_scale of the configuration says it: 0 for a scale that follows overflows",
    **dict.fromkeys(("micro_step_id", "is_gradient_accumulation_boundary"), _MICRO),
    "_is_gradient_accumulation_boundary": _MICRO,
    **dict.fromkeys(("gradient_accumulation_steps", "train_batch_size"), _BATCH),
    "train_micro_batch_size_per_gpu": "call engine.set_train_micro_batch_size()",
    "gradient_average": "gradients are the mean over ranks; multiply the loss to have another multiple of it",
    "gradient_accumulation_dtype": "the configuration's data_types.grad_accum_dtype says it",
    "postscale_gradients": "the configuration's prescale_gradients says it",
    "partition_gradients": "the configuration's zero_optimization.stage says it",
}  # fmt: skip
_OF_OPTIMIZER: dict[str, str] = {
    "param_groups": 'write to the groups: optimizer.param_groups[0]["lr"] = 0.1',
    "state": "give values to load_state_dict(), or to deepspeed.utils.safe_set_full_optimizer_state()",
    "averaged_gradients": "give values to deepspeed.utils.safe_set_full_grad()",
    "optimizer": "initialize(optimizer=...) makes it",
}
_OF_ENGINE: dict[str, str] = {
    "clip_grad": _CLIP,
    **dict.fromkeys(("loss_scale", "cur_scale"), _SCALE),
    "module": (
        "the engine trains the model that initialize was given. To compile it call engine.compile(); for other values "
        "engine.load_module_state_dict(); for another model initialize()"
    ),
    "optimizer": "initialize(optimizer=...) makes it, and engine.destroy() ends it",
    "config": "give it to initialize(), which reads it once",
    "fp16_enabled": "the configuration's fp16.enabled says it",
    "zero_optimization_stage": "the configuration's zero_optimization.stage says it",
    "bfloat16_enabled": "the configuration's bf16.enabled says it",
}


class Settable:
    """Base of what programs set attributes on."""

    _called = ""

    def _refusal(self, name: str, value: Any) -> str | None:
        """Why the attribute cannot be set; None if it can."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        why = self._refusal(name, value)
        if why is not None:
            raise AttributeError(f"{self._called}.{name} = {_shown(value)}: {why}.")
        super().__setattr__(name, value)


class SettableEngine(Settable):
    """The part of ``DeepSpeedEngine`` that is set."""

    _called = "engine"
    engine: Engine

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training_dataloader" and self._is_made():
            self.engine.dataloader = value

    def _is_made(self) -> bool:
        return "tput_timer" in self.__dict__

    def _refusal(self, name: str, value: Any) -> str | None:
        if not self._is_made():
            return None
        if name in ("module", "optimizer"):
            return _told(_OF_ENGINE[name], "engine")
        if name in self.__dict__:
            return None
        return _why_not(self, name, value, _OF_ENGINE)


class SettableOptimizer(Settable):
    """The part of the view of an optimizer that is set."""

    _called = "optimizer"
    zero: ZeroOptimizer

    def _refusal(self, name: str, value: Any) -> str | None:
        zero = self.__dict__.get("zero")
        if zero is None:
            return None
        if (why := _why_not(self, name, value, _OF_OPTIMIZER)) is not None:
            return why
        if hasattr(type(self), name) or name.startswith("_"):
            return None
        theirs = inspect.getattr_static(zero, name, None)  # what is read through the view
        return None if theirs is None or (callable(theirs) and callable(value)) else _ANSWER


def _why_not(of: Settable, name: str, value: Any, table: Mapping[str, str]) -> str | None:
    kind, who = type(of), of._called
    questions = who == "engine"
    there = inspect.getattr_static(kind, name, None)
    if isinstance(there, property) and there.fset is not None:
        return None
    said = table.get(name) or _OF_BOTH.get(name)
    if said is not None:
        return _told(said, who)
    if name.startswith("_") and not isinstance(there, property):
        return None
    path = _paths().get(name) or (_paths().get(name.removeprefix("zero_")) if questions else None)
    if path is not None and (there is None or not callable(value) or questions):
        return f"initialize reads the configuration's {path} once; say it there"
    if isinstance(there, property):
        return _ANSWER
    if isinstance(there, FunctionType):
        if questions and there.__module__.startswith("zoo.deepspeed.") and _is_question(kind, name):
            return _ANSWER
        if not callable(value):
            return "it is a method; a function that calls it may stand in its place"
    return None


def _is_question(kind: type, name: str) -> bool:
    """Whether a method only answers."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return owner.__name__.startswith("Questions") and not name.startswith("set_")


@functools.cache
def _paths() -> dict[str, str]:
    """Key of a configuration's root and of zero_optimization → its path."""
    zero = {*fields_by_key(ZeroConfig), *ZeroConfig.fates, *ZeroConfig.model_fields}
    return {**{key: f"zero_optimization.{key}" for key in zero}, **{key: key for key in root_keys()}}


def _told(said: str, who: str) -> str:
    return said.format(optimizer="optimizer" if who == "optimizer" else "engine.optimizer")


def refuse_in_configuration(name: str, value: Any) -> None:
    """``engine._config`` has been read.

    Raises:
        AttributeError: always.
    """
    said = _OF_ENGINE.get(name) or _OF_BOTH.get(name) or "initialize has read the configuration; say it there"
    raise AttributeError(f"engine._config.{name} = {_shown(value)}: {_told(said, 'engine')}.")


def set_clipping(engine: Engine, value: Any) -> None:
    """From the next step on gradients are clipped to this norm; 0: they are not. On all ranks.

    Raises:
        ValueError: it is no finite number >= 0, or steps do not measure the norm (``update_in_backward``).
    """
    number: Any = value
    if isinstance(value, bool) or not isinstance(number, Real) or not 0 <= value < math.inf:
        raise ValueError(f"optimizer.clip_grad = {_shown(value)}; give a finite number >= 0, 0 for no clipping.")
    engine.optimizer.clip_norm = float(value)
    engine.config = engine.config.model_copy(update={"gradient_clipping": float(value)})


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"
