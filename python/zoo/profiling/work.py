"""What is computed between two places of a program: for recordings of what a runtime does."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from zoo.cost.operators import NOTHING, Work
from zoo.profiling.counter import OperatorCounter

__all__ = ["WorkCounter"]


class WorkCounter:
    """FLOPs and bytes of what runs within the context, in pieces::

        with WorkCounter() as work, optimizer.sharded.record(work) as actions:
            model(x).mean().backward()
            optimizer.step()

    Counted are operators with a formula (:mod:`zoo.cost.operators`), forward and backward, this rank's. What only moves
    bytes (copies, messages) is nothing here: the runtime does that for itself.

    Attributes:
        not_counted: how often an operator ran that has no formula, by name.
    """

    def __init__(self) -> None:
        self._sum = NOTHING
        counter: Any = OperatorCounter(self._add, lambda: None)  # torch has no types here
        self._counter = counter

    @property
    def not_counted(self) -> dict[str, int]:
        """See the class."""
        return dict(self._counter.not_counted)

    def _add(self, name: str, work: Work, again: Work, moved: tuple[int, int], computed: bool) -> None:
        self._sum += work + again

    def __call__(self, moment: str, unit: str) -> tuple[int, int]:
        """FLOPs, and bytes read and written, since the call before; the arguments say whose they are."""
        found, self._sum = self._sum, NOTHING
        return found.flops, found.moved_bytes

    def __enter__(self) -> WorkCounter:
        self._counter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._counter.__exit__(kind, error, traceback)
