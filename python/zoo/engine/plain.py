"""The plain runner: every rank has the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import failures
from zoo.shard.runtime.without_graph import NoGraphError

if TYPE_CHECKING:
    from zoo.engine.engine import Engine


class DataEndedError(StopIteration, ValueError):
    """A step needs a batch, and the iterator has none."""


class PlainRunner:
    """Forward and backward of one micro-batch after the other."""

    def __init__(self, *, engine: Engine) -> None:
        self._engine, self._told = engine, False

    def accumulate(self, batches: Iterator[Any], n: int, scale: float) -> list[torch.Tensor]:
        """See :class:`zoo.parts.Runner`."""
        if not hasattr(batches, "__next__"):
            from zoo.engine.numbers import kind_of

            raise ValueError(
                f"train_batch got {kind_of(batches)}; it takes an iterator of batches: give iter(loader), made once, "
                "so that the next step goes on where this one ends."
            )
        if self._told:
            failures.withdraw()
            self._told = False
        losses: list[torch.Tensor] = []
        refused: NoGraphError | None = None
        for i in range(n):
            try:
                losses.append(self._one(self._next(batches, i, n), scale, last=i == n - 1))
            except NoGraphError as error:
                if not error.told:
                    raise
                refused = refused or error  # the other ranks go on to the step
            self._engine.records.count_micro_batch()
        if refused is not None:
            raise refused
        return losses

    def _next(self, batches: Iterator[Any], i: int, n: int) -> Any:
        """The next batch; where there is none other ranks, which may have one and wait for this rank, can hear why."""
        try:
            return next(batches)
        except StopIteration:
            step = self._engine.global_steps
            error: Exception = DataEndedError(
                f"the data ended after {i} of the {n} micro-batches of a step, the one after {step} steps. Nothing of "
                "it was used. Take as many steps as there are whole ones on every rank, or give train_batch an "
                "iterator that begins anew (zoo.engine.RepeatingLoader)."
            )
            self._tell(error)
            raise error from None
        except Exception as raised:
            self._tell(raised)
            raise

    def _tell(self, error: Exception) -> None:
        if self._engine.comm.size > 1:
            self._engine.comm.report_failure(error)
            self._told = True

    def _one(self, batch: Any, scale: float, *, last: bool) -> torch.Tensor:
        loss = self.evaluate(batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            from zoo.engine.numbers import kind_of

            raise ValueError(
                f"train_batch got {kind_of(loss)} from the model; it must return its mean loss, a tensor of one "
                "element. Otherwise compute the loss outside and use engine(...), engine.backward(loss), engine.step()."
            )
        return self._engine.passes.backward(loss, scale, last=last)

    def evaluate(self, batch: Any) -> Any:
        """The module's output; a tuple or list becomes its positional arguments, a mapping its keyword arguments."""
        if isinstance(batch, (tuple, list)):
            return self._engine(*batch)
        return self._engine(**batch) if isinstance(batch, Mapping) else self._engine(batch)
