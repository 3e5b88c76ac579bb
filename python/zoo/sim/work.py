"""The handle of an operation in flight."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from zoo.sim._guards import graph_task_running
from zoo.sim.calls import Call
from zoo.sim.errors import Stop
from zoo.sim.scheduler import Rank, Scheduler

__all__ = ["SimFuture", "SimWork"]


class SimFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future whose waiting passes the baton on. Its callbacks run in the thread of the rank that owns it."""

    work: SimWork

    def done(self) -> bool:
        self.work.is_completed()
        return super().done()

    def wait(self) -> Any:
        self.work.block()
        return super().wait()

    def value(self) -> Any:
        self.work.block()
        return super().value()


class SimWork(dist.Work):
    """``wait`` returns when the operation is complete and raises what made it fail; it is a scheduling point.

    ``is_completed`` is a scheduling point as well. ``get_future`` inside ``backward`` waits for completion first:
    there the caller may be C++ (DDP's reducer), whose waiting the scheduler cannot see.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rank: Rank,
        calls: list[Call],
        outputs: list[torch.Tensor],
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._scheduler = scheduler
        self._rank = rank
        self._calls = calls
        self._outputs = outputs
        self._future: SimFuture | None = None
        self.open_batch = False  # inside an open coalescing: nothing to wait for before it ends

    def _done(self) -> bool:
        return all(call.done for call in self._calls)

    def _error(self) -> BaseException | None:
        return next((call.error for call in self._calls if call.error is not None), None)

    def block(self, timeout_s: float | None = None) -> None:
        """Pass the baton on until the operation is complete, in error or not."""
        programs = self._scheduler.programs
        if programs is not None:
            programs.pause(self._rank.index)
            for call in self._calls:
                programs.waited(self._rank.index, call)
        for call in self._calls:
            if not call.done and not self._scheduler.block(self._rank, call, timeout_s):
                call.group.time_out(call, timeout_s or 0.0)
        self._rank.deliver()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self.open_batch:
            return True
        self.block(timeout.total_seconds() if timeout else self._timeout_s)
        error = self._error()
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        if not self._done():
            self._scheduler.yield_(self._rank, next(call for call in self._calls if not call.done))
        return self._done()

    def is_success(self) -> bool:
        return self._done() and self._error() is None

    def exception(self) -> Any:
        return self._error()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        source = self._calls[0].source
        return -1 if source is None else source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        if self._future is None:
            self._future = SimFuture()
            self._future.work = self
            if graph_task_running():
                self.block()
            if not self._hand_over():
                self._rank.undelivered.append(self._hand_over)
        return self._future

    def get_future_result(self) -> Any:
        return self.get_future()

    def _hand_over(self) -> bool:
        if not self._done():
            return False
        if self._scheduler.stopping:
            raise Stop
        if self._future is not None:
            error = self._error()
            if error is None:
                self._future.set_result(self._outputs)
            elif isinstance(error, Exception):
                self._future.set_exception(error)
        return True
