"""The optimizer that ``initialize`` returns: that of ``zoo.zero`` with the attributes that programs read."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any, cast

import torch
from torch import nn

from zoo.deepspeed.adapters.root.settings import SettableOptimizer, set_clipping
from zoo.deepspeed.adapters.utilities.leaves import get_z3_leaf_modules
from zoo.engine import Engine
from zoo.zero import ZeroOptimizer

_log = logging.getLogger("zoo.deepspeed")


class DeepSpeedOptimizer:
    """What programs test with ``isinstance``."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """What programs test with ``isinstance``: an optimizer of stages 1 to 3."""


class LossScale:
    """``optimizer.loss_scaler``: the scale of the loss, and whether it moves."""

    def __init__(self, zero: ZeroOptimizer) -> None:
        self._zero = zero

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_zero", "cur_scale", "loss_scale"):  # it is made anew for each who asks
            raise AttributeError(
                f"loss_scaler.{name} = {value!r}: cur_scale may be set. How the scale moves is said in the "
                f"configuration: fp16.loss_scale, fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale."
            )
        super().__setattr__(name, value)

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by; may be set between two steps, on all ranks."""
        return float(self._zero.loss_scale)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        set_scale(self._zero, value)

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it follows overflows."""
        return bool(getattr(self._zero.scaler, "dynamic", False))

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Gradients of the scaled loss."""
        self._zero.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class OptimizerView(SettableOptimizer, torch.optim.Optimizer, DeepSpeedOptimizer):
    """A :class:`zoo.zero.ZeroOptimizer` under DeepSpeed's attributes; whatever it does not have itself is that one's.

    ``param_groups`` are the same dicts, with the model's parameters in them at every stage (DeepSpeed has flat fp32
    tensors there); a schedule may be made from it. What a program sets is obeyed or refused (``settings.py``).

    Attributes:
        zero: the optimizer behind it.
    """

    _drops_gradients = True

    def __init__(self, engine: Engine) -> None:
        self._engine, self.zero = engine, engine.optimizer

    def __getattr__(self, name: str) -> Any:
        if name in ("_engine", "zero"):
            raise AttributeError(name)
        return getattr(self.zero, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.zero!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ZeRO optimizer cannot be pickled or copied; save its state_dict(), or a checkpoint.")

    # -- torch.optim.Optimizer ----------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, as dicts that a schedule may write to."""
        return self.zero.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of each parameter, by name."""
        return self.zero.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Of the groups."""
        return self.zero.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the parameters and drop the gradients; the engine's ``step`` does, at a boundary. Stage 0 in fp32 leaves
        the gradients to ``zero_grad()``, as torch does."""
        if closure is not None:
            raise ValueError("step(closure): a ZeRO optimizer takes no closure. Call engine.backward and engine.step.")
        self.zero.step()
        if self._drops_gradients:
            self.zero.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the optimizer's memory was laid out for its parameters.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "add_param_group() of a ZeRO optimizer: its buffers hold the parameters that initialize was given. Give "
            "initialize all of them, and freeze those whose time comes later by lr=0 of their group."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.zero.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As of :class:`zoo.zero.ZeroOptimizer`."""
        found: dict[str, Any] = self.zero.state_dict()
        return found

    def load_state_dict(self, state_dict_list: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """As of :class:`zoo.zero.ZeroOptimizer`; options that DeepSpeed has beside are ignored."""
        self.zero.load_state_dict(state_dict_list)

    # -- states elsewhere ---------------------------------------------------------------------------------------------

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move states from the GPU to host memory until :meth:`reload_states`. Stages 1 to 3.

        Args:
            include: members of ``OffloadStateTypeEnum``, or their names; None: all. Gradients' buffers go with
                them, and parameters leave at stage 3 only.
            device: "cpu"; "none": nothing happens, with a warning.
            pin_memory, non_blocking: of the copies.

        Raises:
            ValueError: stage 0, another device, or "lp_params" by name below stage 3.
        """
        kind = str(getattr(device, "value", device))
        if kind == "none":
            _log.warning("offload_states(device='none'): nothing is moved.")
            return
        wanted = include
        if isinstance(include, Iterable) and not isinstance(include, str):
            wanted = sorted({str(getattr(state, "value", state)) for state in include} - {"contiguous_grad_buffer"})
        self.zero.offload_states(wanted, kind, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what :meth:`offload_states` took away."""
        self.zero.reload_states(non_blocking=non_blocking)

    # -- DeepSpeed's --------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, whose parameters are this rank's segments of flat buffers; where the configuration
        named it, ``isinstance`` takes it for DeepSpeed's class of that name."""
        inner = self.zero.inner
        named = self.__dict__.setdefault("_named", NamedOptimizer(self.zero))
        return inner if named.__class__ is type(inner) else cast("torch.optim.Optimizer", named)

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped, because its gradients were not finite."""
        return bool(self.zero.skipped)

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied by; may be set between two steps, on all ranks."""
        return float(self.zero.loss_scale)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        set_scale(self.zero, value)

    loss_scale = cur_scale

    @property
    def loss_scaler(self) -> LossScale:
        """The scale and what moves it."""
        return LossScale(self.zero)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale follows overflows."""
        return self.loss_scaler.dynamic

    def needs_scaler(self) -> bool:
        """Whether losses are scaled."""
        return self.zero.scaler is not None

    @property
    def loss_scale_config(self) -> Any:
        """The section ``fp16``."""
        return self._engine.config.fp16

    @property
    def dp_process_group(self) -> Any:
        """The data-parallel ranks."""
        return getattr(self._engine.comm, "group", None)

    @property
    def clip_grad(self) -> float:
        """What the norm is clipped to; 0 without. May be set, on all ranks, for the steps that come."""
        norm = float(self.zero.clip_norm)
        return norm if norm < math.inf else 0.0

    @clip_grad.setter
    def clip_grad(self, value: float) -> None:
        set_clipping(self._engine, value)

    @property
    def _global_grad_norm(self) -> float | None:
        return self.zero.grad_norm

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters that the model computes with, by group."""
        return [list(group["params"]) for group in self.param_groups]

    fp16_groups = bit16_groups

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor | None]]:
        """Group → this rank's elements of each parameter's gradient, after a backward."""
        from zoo.zero import safe_get_local_grad

        return {i: [safe_get_local_grad(p) for p in g["params"]] for i, g in enumerate(self.param_groups)}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor | None]]:
        """Group → number of the parameter → this rank's elements of its gradient, in fp32."""
        found = self.averaged_gradients
        return {i: {k: g.float() if g is not None else None for k, g in enumerate(grads)} for i, grads in found.items()}

    @property
    def gradient_accumulation_dtype(self) -> torch.dtype | None:
        """In which gradients are added up."""
        name = self._engine.config.data_types.grad_accum_dtype
        names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        first = next((p for group in self.param_groups for p in group["params"]), None)
        return names[name] if name else first.dtype if first is not None else None

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are added up over ranks."""
        return float(self._engine.config.gradient_predivide_factor)

    @property
    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after they were added up over ranks."""
        return not self._engine.config.prescale_gradients

    @property
    def overlap_comm(self) -> bool:
        """Whether reductions go on beside backward."""
        return bool(self._engine.config.zero_optimization.overlap_comm)

    @property
    def partition_gradients(self) -> bool:
        """Whether a rank keeps only its part of gradients."""
        return bool(self._engine.config.zero_optimization.stage >= 2)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Gradients of the scaled loss."""
        self.zero.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class NamedOptimizer:
    """The wrapped optimizer, as one of DeepSpeed's classes for ``isinstance``."""

    def __init__(self, zero: ZeroOptimizer) -> None:
        self.__dict__["_zero"] = zero

    @property  # type: ignore[misc]
    def __class__(self) -> type[torch.optim.Optimizer]:  # type: ignore[override]
        from zoo.deepspeed.adapters.optimizers.ops import known_as

        offloaded = self._zero.config.offload_optimizer.device != "none"
        return known_as(type(self._zero.inner), offloaded=offloaded)

    @property
    def adam_w_mode(self) -> bool:
        """Of Adam: whether weight decay is AdamW's, which does not go through the moments."""
        options = self._zero.inner.param_groups[0]
        if "decoupled_weight_decay" not in options:
            raise AttributeError("adam_w_mode")
        return bool(options["decoupled_weight_decay"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._zero.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._zero.inner, name, value)

    def __repr__(self) -> str:
        return repr(self._zero.inner)


class BasicOptimizer(OptimizerView):
    """Stage 0 in fp32, where DeepSpeed gives the optimizer itself: ``isinstance`` takes it for one of that class, and
    it is equal to the one that ``initialize`` was given."""

    _drops_gradients = False
    given: torch.optim.Optimizer | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type[torch.optim.Optimizer]:  # type: ignore[override]
        from zoo.deepspeed.adapters.optimizers.ops import known_as

        return known_as(type(self.zero.inner))

    def __eq__(self, other: object) -> bool:
        return self is other or (self.given is not None and self.given is other)

    __hash__ = OptimizerView.__hash__


class FP16_Optimizer(OptimizerView):
    """Stage 0 in fp16."""


class FP16_UnfusedOptimizer(OptimizerView):
    """Stage 0 in fp16, with another optimizer than Adam of zoo's kernels."""


class BF16_Optimizer(OptimizerView, ZeROOptimizer):
    """Stage 0 in bf16."""


class DeepSpeedZeroOptimizer(OptimizerView, ZeROOptimizer):
    """Stages 1 and 2."""


class _Hooked:
    """The model as ``parameter_offload.module`` shows it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """None beside its own."""
        return iter(())


class ParameterOffload:
    """``optimizer.parameter_offload``: programs take its hooks away while they generate from gathered parameters, and
    register them again. zoo's hooks let gathered parameters be, so there is nothing to take away."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = _Hooked(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Nothing to do."""


class DeepSpeedZeroOptimizer_Stage3(OptimizerView, ZeROOptimizer):
    """Stage 3."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.parameter_offload = ParameterOffload(engine.module)

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._engine.module

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Module whose parts are gathered together (``set_z3_leaf_modules``) → its parameters that are trained."""
        trained = {id(p) for group in self.param_groups for p in group["params"]}
        leaves = get_z3_leaf_modules(self._engine.module)
        return {leaf: [p for p in leaf.parameters() if id(p) in trained] for leaf in leaves}


class DeepSpeedZeRoOffload(ParameterOffload):
    """``engine.optimizer`` at stage 3 where nothing is trained: it keeps the parameters partitioned."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.module)
        self._engine = engine

    def empty_partition_cache(self) -> None:
        """Free what is kept whole between two passes. On all ranks."""
        self._engine.sharded.runtime.residency.clear()


def view_of(engine: Engine) -> OptimizerView | DeepSpeedZeRoOffload | None:
    """The optimizer of an engine, under the class that a program expects."""
    if engine.optimizer is None:
        return DeepSpeedZeRoOffload(engine) if engine.config.zero_optimization.stage == 3 else None
    stage, config = engine.config.zero_optimization.stage, engine.config
    if stage == 3:
        return DeepSpeedZeroOptimizer_Stage3(engine)
    if stage:
        return DeepSpeedZeroOptimizer(engine)
    if config.bf16.enabled:
        return BF16_Optimizer(engine)
    if not config.fp16.enabled:
        return BasicOptimizer(engine)
    inner = type(engine.optimizer.inner)  # DeepSpeed has flat fp16 groups for its own Adam only
    fused = inner.__module__.startswith("zoo.") and "adam" in inner.__name__.lower()
    return FP16_Optimizer(engine) if fused else FP16_UnfusedOptimizer(engine)


def set_scale(zero: ZeroOptimizer, value: float) -> None:
    """From the next loss on it is multiplied by ``value``.

    Raises:
        ValueError: losses are not scaled; it is no finite number > 0; or gradients are there that have the old scale.
    """
    told = f"loss_scale = {value!r}"
    if zero.scaler is None:
        raise ValueError(f"{told}: losses are scaled in fp16 alone. Leave it out, or enable fp16 in the configuration.")
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{told}; give a finite number > 0.")
    if zero.holds_gradients:
        raise ValueError(f"{told} with gradients that have the old scale: set it before the backward of a step.")
    zero.scaler.scale = float(value)


def smallest_scale(engine: Engine) -> float | None:
    """The loss scale, where it moves with overflows and the next one would make it smaller than it may be."""
    scaler = engine.optimizer.scaler
    if scaler is None or not scaler.dynamic or scaler.lives > 1:
        return None
    return float(scaler.scale) if scaler.scale <= scaler.min_scale else None


def refuse_endless_overflows(engine: Engine, scale: float | None) -> None:
    """A training that overflows at the smallest scale would go on without ever moving.

    Args:
        scale: :func:`smallest_scale` before the step.

    Raises:
        RuntimeError: it did so just now.
    """
    record = engine.record if scale is not None and engine.clock.micro_batch == 0 else None
    if record is not None and record.skipped:
        raise RuntimeError(
            f"the gradients overflow at the smallest loss scale, {scale:g}: no step moves the parameters any more. "
            "The model diverges in fp16: train in bf16, or lower the learning rate."
        )
