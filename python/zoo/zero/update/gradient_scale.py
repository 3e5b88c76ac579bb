"""What an update multiplies reduced gradients by, known to the host or to the device only."""

from __future__ import annotations

import torch


class Factors:
    """The gradient of an update is ``unscale * clip`` times the reduced one.

    Args:
        unscale: takes the loss scale off; kept gradients stay without it, because more may be added to them.
        clip: clips; kept gradients are clipped with it, as by torch's ``clip_grad_norm_`` before a step. A number, or
            () fp64 on the device, whose products have the bits of those with the same number.
        found_inf: () fp32 on the device: 1 where the step is to change nothing, else 0. For optimizers that take it.

    Attributes:
        neutral: gradients stay as they are.
    """

    __slots__ = ("_cast", "clip", "found_inf", "neutral", "unscale")

    def __init__(
        self, *, unscale: float = 1.0, clip: float | torch.Tensor = 1.0, found_inf: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        self.unscale, self.clip, self.found_inf = unscale, clip, found_inf
        self.neutral = unscale == 1.0 and not isinstance(clip, torch.Tensor) and clip == 1.0
        self._cast: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    def product(self) -> float | torch.Tensor:
        """``unscale * clip``, for optimizers that multiply by themselves; () fp64 where only the device knows it."""
        return self.clip * self.unscale

    def apply(self, gradient: torch.Tensor, *, kept: bool) -> torch.Tensor:
        """The gradient that the optimizer gets. ``kept``: its memory is that of the reduced one, which lives on."""
        if self.neutral:
            return gradient
        if not kept:
            return gradient.mul_(self._clip(gradient.dtype, unscaled=True))
        if isinstance(self.clip, torch.Tensor) or self.clip != 1.0:
            gradient = gradient.mul_(self._clip(gradient.dtype, unscaled=False))
        return gradient * self.unscale if self.unscale != 1.0 else gradient

    def _clip(self, dtype: torch.dtype, *, unscaled: bool) -> float | torch.Tensor:
        if not isinstance(self.clip, torch.Tensor):
            return self.unscale * self.clip if unscaled else self.clip
        key = (dtype, unscaled)
        if key not in self._cast:  # the product is rounded once, as that of two numbers of Python is
            self._cast[key] = (self.clip * self.unscale if unscaled else self.clip).to(dtype)
        return self._cast[key]


UNCHANGED = Factors()
"""Gradients as they are."""
