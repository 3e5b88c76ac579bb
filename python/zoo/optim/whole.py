"""Optimizers whose update looks at whole tensors, and how they run where each process has only parts of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.plan import Batch

Tensor = torch.Tensor


class Parts(Protocol):
    """Whoever gave an optimizer flat parts of tensors as its parameters, and can bring together what belongs together.

    ``sum``, ``largest`` and ``whole`` are collective: every process calls the one that its optimizer uses once in every
    step, also when it has no parameters to update.
    """

    def shape(self, param: Tensor) -> torch.Size:
        """The shape of the tensor that ``param`` is a part of."""

    def start(self, param: Tensor) -> int:
        """The place of the part's first element in that tensor, in row-major order."""

    def sum(self, params: Sequence[Tensor], rows: Tensor) -> Tensor:
        """For each part the sum of the rows of all parts of the same tensor, everywhere. ``rows``: (T, k), fp64."""

    def largest(self, params: Sequence[Tensor], rows: Tensor) -> Tensor:
        """As :meth:`sum`, the largest of each column. ``rows``: (T, k), fp64, not negative."""

    def whole(self, groups: Sequence[int], params: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """For each part the tensor, in its shape, of which ``values`` has the parts.

        ``groups`` are the indices of the parameter groups that this is about, the same on every process.
        """


@dataclass
class Measured:
    """A batch between the halves of a step: states advanced, parameters not yet changed."""

    group: dict[str, Any]
    batch: Batch
    values: Any


class WholeTensorOptimizer(ElementwiseOptimizer):
    """Base of the optimizers with a step in two halves: measure, bring together what parts measured, apply.

    Args:
        parts: the parameters are flat parts of tensors, and ``parts`` knows of which; None: they are whole.
    """

    needs_whole_tensors = True
    adds_up_parts = False
    """It asks ``parts`` for :meth:`~Parts.sum` and :meth:`~Parts.largest` only: tensors may be cut along mesh axes."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, parts: Parts | None = None, **more: Any) -> None:
        self.parts = parts
        self._measured: list[Measured] = []
        super().__init__(params, defaults, **more)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float | Tensor = 1.0) -> Any:
        """See :meth:`ElementwiseOptimizer.step`. With ``parts`` it is collective."""
        self._measured = []
        loss = super().step(closure, grad_scale=grad_scale)
        measured, self._measured = self._measured, []
        self._apply(measured)
        for one in measured if self.takes_writes else ():
            one.batch.note_writes()
        return loss

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> bool:
        if any(p.grad is None for p in batch.params):
            return False
        self._measured.append(Measured(group, batch, self._measure(group, batch, grad_scale)))
        return True

    def _measure(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> Any:
        """Advance the states; what has to be known of the whole tensors."""
        raise NotImplementedError

    def _apply(self, measured: list[Measured]) -> None:
        """Bring together and change the parameters."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.parts, self._measured = None, []
