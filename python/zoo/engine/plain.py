"""The plain runner: every rank has the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from zoo.engine.engine import Engine


class PlainRunner:
    """Forward and backward of one micro-batch after the other."""

    def __init__(self, *, engine: Engine) -> None:
        self._engine = engine

    def accumulate(self, batches: Iterator[Any], n: int, scale: float) -> list[torch.Tensor]:
        """See :class:`zoo.parts.Runner`."""
        losses = []
        for i in range(n):
            losses.append(self._one(next(batches), scale, last=i == n - 1))
            self._engine.count_micro_batch()
        return losses

    def _one(self, batch: Any, scale: float, *, last: bool) -> torch.Tensor:
        loss = self.evaluate(batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(
                f"train_batch got {kind_of(loss)} from the model; it must return its mean loss, a tensor of one "
                "element. Otherwise compute the loss outside and use engine(...), engine.backward(loss), engine.step()."
            )
        return self._engine.go_backward(loss, scale, last=last)

    def evaluate(self, batch: Any) -> Any:
        """The module's output; a tuple or list becomes its positional arguments, a mapping its keyword arguments."""
        if isinstance(batch, (tuple, list)):
            return self._engine(*batch)
        return self._engine(**batch) if isinstance(batch, Mapping) else self._engine(batch)


def kind_of(value: Any) -> str:
    """What it is, for a sentence."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
