"""What ``configure`` and ``model_parallel_cuda_manual_seed`` have set: the only module state of this package.

What the main thread sets holds for every thread that has nothing of its own (autograd's among them); what another
thread sets holds for that thread, so that simulated ranks (``zoo.sim``) are as apart as processes are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zoo.activation_checkpointing.rng import CudaRNGStatesTracker

if TYPE_CHECKING:
    from zoo.activation_checkpointing.recomputing import ActivationCheckpointing

__all__ = ["State", "current", "entered", "own"]


class State:
    """Of a process, or of a thread that has its own.

    Attributes:
        tracker: what ``get_cuda_rng_tracker`` returns.
    """

    def __init__(self) -> None:
        self._set: list[tuple[ActivationCheckpointing, int]] = []  # the last one counts
        self.tracker = CudaRNGStatesTracker()

    @property
    def checkpointing(self) -> ActivationCheckpointing | None:
        """What ``configure``, or an engine after it, has set; None without."""
        return self._set[-1][0] if self._set else None

    @property
    def rank(self) -> int:
        """Of this process among the tensor-parallel ranks."""
        return self._set[-1][1] if self._set else 0

    def configure(self, checkpointing: ActivationCheckpointing, rank: int) -> None:
        """From now on this one, whatever was set before."""
        self._set = [(checkpointing, rank)]

    def enter(self, checkpointing: ActivationCheckpointing, rank: int) -> None:
        """This one until :meth:`leave`, then what was set before."""
        self._set.append((checkpointing, rank))

    def leave(self, checkpointing: ActivationCheckpointing) -> None:
        """It is over, in whatever order others are."""
        self._set = [one for one in self._set if one[0] is not checkpointing]


class _Local(threading.local):
    state: State | None = None


_process, _local = State(), _Local()
_apart = 0  # threads that have, or had, a state of their own: what is compiled cannot ask which thread it is on


def current() -> State:
    """That of this thread, else of the process.

    Raises:
        NotImplementedError: in what is compiled, where some thread has a state of its own.
    """
    if torch.compiler.is_compiling():
        if _apart:
            raise NotImplementedError(
                "activation checkpoints under torch.compile where threads have configured them for themselves: give "
                "ActivationCheckpointing its tracker, or configure on the main thread."
            )
        return _process
    state = _local.state
    return _process if state is None else state


def own() -> State:
    """The one to change from this thread."""
    global _apart
    if threading.current_thread() is threading.main_thread():
        return current()
    if _local.state is None:
        _local.state = State()
        _apart += 1
    return _local.state


@contextlib.contextmanager
def entered(state: State) -> Iterator[None]:
    """Within the context this thread has the state of another one, for which it computes."""
    global _apart
    before, _local.state = _local.state, state
    _apart += state is not _process
    try:
        yield
    finally:
        _local.state = before
        _apart -= state is not _process
