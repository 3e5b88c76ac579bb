"""``deepspeed.runtime.fp16.loss_scaler``: the scale of a loss as an object, for loops of their own and in checkpoints.

Engines have zoo's own, :class:`zoo.zero.update.loss_scale.LossScaler`; these count good steps as DeepSpeed's do.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zoo.deepspeed.adapters.utilities.logs import log_dist

_HOME = "deepspeed.runtime.fp16.loss_scaler"
"""Where the classes say they are: checkpoints name them so, and ``torch.serialization.add_safe_globals`` too."""


def to_python_float(t: Any) -> float:
    """The number in a tensor or an array of one element."""
    return float(t.item() if hasattr(t, "item") else t[0])


class LossScalerBase:
    """A scale that does not move.

    Attributes:
        cur_scale: the factor. dynamic: whether it moves.
    """

    __module__ = _HOME

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale, self.dynamic = cur_scale, False

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "deepspeed" in sys.modules:
            return super().__reduce_ex__(protocol)
        return _made, (type(self).__name__, self.__dict__)  # by a function that is found without that name

    @property
    def loss_scale(self) -> float:
        """The factor."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[torch.Tensor], grad_out: Any) -> tuple[torch.Tensor, ...]:
        """Each of ``grad_in`` times the factor, as a hook on backward."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """After a step; a warning where it overflowed."""
        if overflow:
            log_dist("a gradient is not finite: the step is skipped.", [0], logging.WARNING)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the factor."""
        return loss * self.loss_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of :meth:`scale_loss`."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def _made(kind: str, attributes: Mapping[str, Any]) -> LossScalerBase:
    """A scaler from its pickle."""
    cls: type[LossScalerBase] = {c.__name__: c for c in (LossScalerBase, LossScaler, DynamicLossScaler)}[kind]
    found = cls.__new__(cls)
    found.__dict__.update(attributes)
    return found


class LossScaler(LossScalerBase):
    """A scale that the caller has chosen."""

    __module__ = _HOME

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Any) -> bool:
        """False: nobody looks."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A scale that grows while gradients are finite, and shrinks where they are not.

    It doubles after ``scale_window + 1`` good steps from the start or the latest overflow, and after every
    ``scale_window`` more. An overflow uses up one of ``delayed_shift`` lives, and once one is left halves the scale,
    down to ``min_scale``. Lives come back when it doubles, or with ``consecutive_hysteresis`` after every good step.

    Args:
        raise_error_at_min_scale: an overflow at ``min_scale`` is an error.
        dtype: of the gradients; kept.

    Attributes:
        cur_iter: steps so far. last_overflow_iter: the latest that overflowed, -1 without. cur_hysteresis: lives left.
    """

    __module__ = _HOME

    def __init__(
        self, init_scale: float, scale_window: int, min_scale: float, delayed_shift: int, consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True, dtype: torch.dtype = torch.half,
    ) -> None:  # fmt: skip
        super().__init__(init_scale)
        self.dynamic, self.dtype = True, dtype
        self.cur_iter, self.last_overflow_iter, self.scale_factor = 0, -1, 2.0
        self.scale_window, self.min_scale = scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether a gradient of this rank is not finite."""
        return any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in params)

    def update_scale(self, overflow: bool) -> None:
        """After a step.

        Raises:
            RuntimeError: it overflowed at ``min_scale``.
        """
        if overflow:
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            good = self.cur_iter - self.last_overflow_iter - 1
            grows = good > 0 and good % self.scale_window == 0
            if grows or self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if grows:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _shrink(self) -> None:
        if self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            log_dist(f"overflow: the step is skipped, {self.cur_hysteresis} more before the loss scale shrinks.", [0])
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise RuntimeError(
                f"a gradient is not finite at the smallest loss scale, {self.min_scale}: the loss itself may be; look "
                "at it, or allow a smaller min_scale, or give raise_error_at_min_scale=False."
            )
        self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        log_dist(f"overflow: the step is skipped, the loss scale is {self.cur_scale} now.", [0])


def CreateLossScaler(
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: Mapping[str, Any] | None
) -> LossScalerBase:
    """For fp16 the one that is asked for, for any other dtype one with the factor 1.

    Raises:
        ValueError: a dynamic one without arguments.
    """
    if dtype != torch.half:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise ValueError(
            "CreateLossScaler(dynamic_scaling=True) got no dynamic_loss_args; give a dict with init_scale, "
            "scale_window, min_scale, delayed_shift and consecutive_hysteresis."
        )
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)
