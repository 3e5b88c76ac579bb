"""The loss scale: what a loss is multiplied by before backward, and how that moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any


@dataclass
class LossScaler:
    """The factor the loss is multiplied by, and how it moves: keeps small gradients above fp16's smallest number.

    Static (``dynamic=False``): the scale never changes; a step whose gradients overflow is still skipped.
    Dynamic (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2): after ``window`` steps in a row without
    overflow the scale doubles; an overflow uses up one of ``hysteresis`` lives, and once none is left the scale halves,
    down to ``min_scale``. Lives come back when the scale doubles, or after every good step with
    ``consecutive_hysteresis``.
    """

    scale: float = 2.0**16
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    good_steps: int = 0
    lives: int = -1

    def __post_init__(self) -> None:
        numbers: tuple[Any, ...] = (self.scale, self.min_scale, self.window, self.hysteresis, self.lives)
        if wrong := [number for number in numbers if not isinstance(number, Real)]:
            raise ValueError(f"a loss scaler got {wrong[0]!r}, a {type(wrong[0]).__name__}; it takes numbers.")
        if not 0 < self.scale < math.inf or not self.min_scale > 0 or self.window < 1 or self.hysteresis < 1:
            raise ValueError(
                f"a loss scaler needs a finite scale > 0, min_scale > 0, window >= 1 and hysteresis >= 1; got "
                f"scale={self.scale}, min_scale={self.min_scale}, window={self.window}, hysteresis={self.hysteresis}."
            )
        if self.lives < 0:
            self.lives = self.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Move the scale after a step."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            if self.lives > 1:
                self.lives -= 1
            else:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.lives = self.hysteresis
        if self.good_steps % self.window == 0:
            self.scale *= 2
            self.lives = self.hysteresis

    def state(self) -> dict[str, float]:
        """What a checkpoint has to keep."""
        return {"scale": self.scale, "good_steps": self.good_steps, "lives": self.lives}

    def load(self, state: dict[str, float]) -> None:
        """Take over what :meth:`state` returned."""
        self.scale = float(state["scale"])
        self.good_steps, self.lives = int(state["good_steps"]), int(state["lives"])


def make_scaler(loss_scale: float | str | LossScaler | None) -> LossScaler | None:
    """None, "dynamic", a number (a static scale), or a scaler made by the caller."""
    if loss_scale is None or isinstance(loss_scale, LossScaler):
        return loss_scale
    if loss_scale == "dynamic":
        return LossScaler()
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return LossScaler(scale=float(loss_scale) if abs(loss_scale) < 2**1000 else math.inf, dynamic=False)
    raise ValueError(f"loss_scale={loss_scale!r}; allowed are None, 'dynamic', a positive number, or a LossScaler.")
