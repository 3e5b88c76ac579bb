"""A few ranks of the axis ``tensor`` as threads of this process, for models so small that they are computed at once.

They touch no process group: the job may have one, be simulated itself (:mod:`zoo.sim` does not nest), or have none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zoo.comm import CommsLog, Communicator
from zoo.comm.handles import DONE, Handle

T = TypeVar("T")
_WAIT_S = 600.0
"""What a rank waits for others before it says that they do not come."""


def run(degree: int, fn: Callable[[Communicator], T]) -> list[T]:
    """``fn`` of every rank's communicator, at the same time; what each returned.

    Raises:
        Exception: what the first rank raised that did so for itself.
        ValueError: ranks sent different things, or not equally many.
    """
    meeting = _Meeting(degree)
    found: list[Any] = [None] * degree
    errors: dict[int, BaseException] = {}

    def main(rank: int) -> None:
        try:
            found[rank] = fn(_Lockstep(rank, meeting))
            meeting.exchange(rank, "nothing more", None)
        except threading.BrokenBarrierError:
            errors.setdefault(degree + rank, ValueError(f"rank {rank} waited for others that did not come."))
        except BaseException as error:
            errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return found


class _Meeting:
    """Where ranks lay down what they send."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree, timeout=_WAIT_S)
        self._laid: list[tuple[str, torch.Tensor | None]] = [("", None)] * degree

    def exchange(self, rank: int, what: str, tensor: torch.Tensor | None) -> list[Any]:
        """What every rank laid down, in the order of ranks."""
        self._laid[rank] = (what, tensor)
        self.barrier.wait()
        everyone = list(self._laid)
        self.barrier.wait()  # nobody lays down the next thing before all have read this one
        if len({said for said, _ in everyone}) > 1:
            raise ValueError(f"ranks send different things: {', '.join(said for said, _ in everyone)}.")
        return [laid for _, laid in everyone]


class _Lockstep(Communicator):
    """The collectives that split models use, on tensors of this process."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self.backend = rank, meeting.barrier.parties, "lockstep"
        self.log, self.check, self.group = CommsLog(), False, None
        self._meeting = meeting

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Handle:
        """Added up in the order of ranks."""
        if op != "sum":
            raise NotImplementedError(f"all_reduce with op={op!r} in lockstep; it sums.")
        parts = self._meeting.exchange(self.rank, f"a sum of {tuple(tensor.shape)}", tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(sum(parts[1:], parts[0]))
        return DONE

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Handle:
        """Parts side by side."""
        parts = self._meeting.exchange(self.rank, f"parts of {tuple(shard.shape)}", shard.detach().clone())
        with torch.no_grad():
            full.copy_(torch.cat(parts))
        return DONE

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, label: str = "") -> Handle:
        """This rank's share of what is added up in the order of ranks."""
        parts = self._meeting.exchange(self.rank, f"shares of {tuple(full.shape)}", full.detach().clone())
        with torch.no_grad():
            mine = [part.view(self.size, -1)[self.rank] for part in parts]
            out.copy_(sum(mine[1:], mine[0]).mul(scale))
        return DONE
