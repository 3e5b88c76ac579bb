"""Windows: a schedule drives the model from outside, with one context for each micro-batch.

Under the hooks alone the order of forwards and backwards is found as they come, and ranks vote where their graphs could
differ. A pipeline schedule knows its order; it says which micro-batch runs, and what is to happen with its gradients::

    with sharded.window(max_bytes=2**30) as window:
        with window.forward(0):
            first = module(x0)
        with window.forward(1):
            second = module(x1)
        with window.backward(1):
            torch.autograd.backward(second, gradient1)
        with window.backward(0, reduce=True):
            torch.autograd.backward(first, gradient0)
    optimizer.step()

What it promises:

* Forwards may be in flight in any number, and come back in any order, the same on all ranks. A micro-batch begins with
  ``forward`` and ends with its backward or with :meth:`Window.end`, and with nothing else: no other backward, step or
  ``zero_grad()`` expires it, it takes part in no vote, and how long its outputs live makes no difference.
* Gradients accumulate on each rank, as under ``no_sync()``, until a backward with ``reduce=True``, ``reduce()`` or
  ``step()`` brings the sum to its mean. ``reduce=True`` for every micro-batch reduces each during its own backward.
* A backward may come in two parts: ``backward_inputs``, for ``torch.autograd.grad(outputs, inputs, ...)``, after which
  the micro-batch needs no parameters any more; and, at any later time, ``backward_weights``, where the caller computes
  gradients of weights from what the first part left, and hands them to ``sharded.accumulate(parameter, gradient)``.
  The hooks do nothing there, and nothing is gathered.
* With ``max_bytes`` what is gathered stays until the window ends: all that is whole at any time has at most
  max(``max_bytes``, the parameters that one forward or backward needs at once) bytes (``residency.py``).
* However a forward, a backward or the window is left, what is in flight is waited for, and the leases are gone. After
  an exception that micro-batch has ended. In ``backward`` and ``backward_weights`` it leaves gradients undefined, and
  all else is refused until ``zero_grad()``; other micro-batches stay open.

With a loss scale the schedule scales the loss itself (``optimizer.scale_loss``) where it begins its backward. Pipeline
schedules of this kind: Narayanan et al. 2019 (1F1B), section 3.2; Qi et al. 2023 (Zero Bubble), section 2.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.shard.runtime.contexts import FAILED, BackwardPart, Context
from zoo.shard.runtime.residency import WindowBudget

if TYPE_CHECKING:
    from types import TracebackType

    from zoo.shard.runtime.hooks import Runtime


class State(enum.Enum):
    """Where a micro-batch is; the value completes "micro-batch 3 ..."."""

    RUNS = "is running"
    RAN = "has run its forward and waits for its backward"
    WEIGHTS_LEFT = "waits for backward_weights()"
    ENDED = "has ended"
    FAILED = "ended with an exception"


@dataclass
class _MicroBatch:
    state: State
    context: Context


class Window:
    """Micro-batches that are driven from outside; made by :meth:`zoo.zero.ShardedModel.window`.

    A key is anything hashable that names one forward: the number of a micro-batch, or (stage, micro-batch) where
    several stages of a pipeline are one model here.

    Attributes:
        in_parts: a schedule will bring forwards back by ``backward_inputs``. What makes one function of all of a
            forward has to know: its backward has no parts.
    """

    def __init__(self, runtime: Runtime, *, max_bytes: int | None, updates_in_backward: bool) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes={max_bytes}; it must be a number of bytes, or None.")
        self._runtime, self._max_bytes, self._updates = runtime, max_bytes, updates_in_backward
        self._all: dict[Hashable, _MicroBatch] = {}
        self._entered = self.in_parts = False

    @property
    def open(self) -> list[Hashable]:
        """The micro-batches that have run and not ended, in the order of their forwards."""
        return [key for key, found in self._all.items() if found.state not in (State.ENDED, State.FAILED)]

    def __enter__(self) -> Window:
        runtime = self._runtime
        runtime.check_between("a window")
        if runtime.window is not None:
            raise RuntimeError("a window inside of another window of the same model: one schedule drives it at a time.")
        runtime.window, self._entered = self, True
        runtime.window_calls = {}
        self._outside = runtime.residency.policy
        if self._max_bytes is not None:
            runtime.residency.use(WindowBudget(self._max_bytes, self._outside))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        runtime = self._runtime
        left = [key for key in self.open if self._all[key].context.calls]
        for key in self.open:
            self._close(key, State.ENDED)
        self._entered, runtime.window = False, None
        runtime.residency.use(self._outside)
        runtime.residency.clear()
        if left and error is None:
            raise RuntimeError(
                f"the window ended with {len(left)} micro-batch(es) that were run and not brought back: "
                f"{', '.join(map(repr, left[:5]))}. Run the backward of each, or end it: window.end(key). What the "
                "others have accumulated is there."
            )

    # Verbs -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self, key: Hashable) -> Iterator[None]:
        """What the model does inside is the forward of micro-batch ``key``.

        Raises:
            ValueError: this micro-batch has been run.
            RuntimeError: inside of another forward or backward, or outside of the window.
        """
        self._check_between("forward", key)
        if key in self._all:
            raise ValueError(
                f"micro-batch {key!r} {self._all[key].state.value}; every forward is a micro-batch of its own."
            )
        context = self._runtime.contexts.drive(f"micro-batch {key!r}")
        self._all[key] = _MicroBatch(State.RUNS, context)
        self._runtime.drive(context)
        try:
            yield
        except BaseException:
            self._close(key, State.FAILED)
            raise
        else:
            self._all[key].state = State.RAN
            self._runtime.note_calls(key)
        finally:
            self._runtime.drive(None)

    @contextlib.contextmanager
    def backward(self, key: Hashable, *, reduce: bool = False) -> Iterator[None]:
        """What autograd does inside is the backward of micro-batch ``key``, which ends with it. Collective.

        Args:
            reduce: reduce what has been accumulated until its end; otherwise it is added to what is there.

        Raises:
            ValueError: this micro-batch was never run, or has ended.
            RuntimeError: inside of another forward or backward, after a step, or after a backward that failed.
        """
        with self._backward(key, BackwardPart.WHOLE, State.RAN, State.ENDED, reduce):
            yield

    @contextlib.contextmanager
    def backward_inputs(self, key: Hashable) -> Iterator[None]:
        """The first part of a backward: gradients of the inputs and nothing else. Errors as for :meth:`backward`."""
        with self._backward(key, BackwardPart.INPUTS, State.RAN, State.WEIGHTS_LEFT, False):
            yield

    @contextlib.contextmanager
    def backward_weights(self, key: Hashable, *, reduce: bool = False) -> Iterator[None]:
        """The second part: hand gradients of weights to ``sharded.accumulate``. Errors as for :meth:`backward`."""
        with self._backward(key, BackwardPart.WEIGHTS, State.WEIGHTS_LEFT, State.ENDED, reduce):
            yield

    def end(self, key: Hashable) -> None:
        """End a micro-batch that will not be brought back. On all ranks.

        Raises:
            ValueError: this micro-batch was never run, or has ended.
        """
        self._check_between("end", key)
        if self._find(key, "end").state in (State.ENDED, State.FAILED):
            raise ValueError(f"micro-batch {key!r} {self._all[key].state.value} already.")
        self._close(key, State.ENDED)

    # Inside ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _backward(self, key: Hashable, part: BackwardPart, before: State, after: State, reduce: bool) -> Iterator[None]:
        self._check_between(part.value, key)
        found = self._find(key, part.value)
        self._check_backward(key, found, part, before, reduce)
        backward = self._runtime.backward
        try:
            backward.drive(found.context, part, syncs=reduce)
            yield
            backward.arrive()
        except BaseException:
            backward.abandon()
            self._close(key, State.FAILED)
            raise
        if after is State.ENDED:
            self._close(key, after)
        found.state = after

    def _check_backward(
        self, key: Hashable, found: _MicroBatch, part: BackwardPart, before: State, reduce: bool
    ) -> None:
        if found.state is not before:
            needs = " Run backward_inputs() first." if part is BackwardPart.WEIGHTS and found.state is State.RAN else ""
            raise ValueError(f"{part.value} of micro-batch {key!r}, which {found.state.value}.{needs}")
        runtime = self._runtime
        runtime.backward.check_running()
        if runtime.backward.failed:
            raise RuntimeError(FAILED)
        if runtime.backward.running:
            raise RuntimeError(f"{part.value} of micro-batch {key!r} inside of another backward.")
        if found.context.updates != runtime.contexts.updates:
            raise RuntimeError(
                f"{part.value} of micro-batch {key!r}, whose forward is older than the latest update of the "
                "parameters. End it, and run its forward again."
            )
        others = [k for k in self.open if k != key and self._all[k].context.calls]
        if reduce and self._updates and others:
            raise ValueError(
                f"reduce=True with update_in_backward=True is a step, and {len(others)} other micro-batch(es) are "
                f"open: {', '.join(map(repr, others[:5]))}. Reduce with the last one."
            )

    def _check_between(self, verb: str, key: Hashable) -> None:
        if not self._entered:
            raise RuntimeError(
                f"{verb} of micro-batch {key!r} outside of its window: `with sharded.window() as window:`."
            )
        self._runtime.check_between(f"{verb} of micro-batch {key!r}")

    def _find(self, key: Hashable, verb: str) -> _MicroBatch:
        found = self._all.get(key)
        if found is None:
            names = ", ".join(map(repr, self.open)) or "none"
            raise ValueError(f"{verb} of micro-batch {key!r}, which was never run; open are: {names}.")
        return found

    def _close(self, key: Hashable, state: State) -> None:
        found = self._all[key]
        found.state = state
        self._runtime.contexts.close(found.context)
        found.context.calls, found.context.uses = [], []  # outputs that are kept know the context
