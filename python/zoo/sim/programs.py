"""What the ranks of a run compute, begin and wait for, in the order of each: what :mod:`zoo.cost` gives its time.

The run itself has no time. Its programs are asked afterwards, again and again: on this machine, on that link, with one
rank that is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.cost import pass_s, product_s
from zoo.cost.events import Compute, Program, Start, Wait
from zoo.cost.hardware import Device
from zoo.sim.world import place

if TYPE_CHECKING:
    from zoo.sim.calls import Call

__all__ = ["Programs", "compute", "costing"]


class Programs:
    """Given to ``run(..., programs=...)``, which fills it.

    Args:
        measured: the time in which a rank runs between two communications is what it computes. Without, only what
            :func:`compute` and :func:`costing` say.
        scale: factor of measured seconds.
    """

    def __init__(self, *, measured: bool = False, scale: float = 1.0) -> None:
        self._measured, self._scale = measured, scale
        self._items: list[list[Any]] = []
        self._since: float | None = None
        self._matches = 0

    def programs(self) -> list[Program]:
        """Of each rank. A communication that did not happen in the run is left out."""
        found: list[Program] = []
        for items in self._items:
            found.append([i if isinstance(i, Compute) else i.item() for i in items if _happened(i)])
        return found

    # -- called by the run --------------------------------------------------------------------------------------------

    def begin(self, world_size: int) -> None:
        """A run begins."""
        self._items = [[] for _ in range(world_size)]

    def resume(self) -> None:
        """A rank has the baton."""
        self._since = time.perf_counter()

    def pause(self, rank: int) -> None:
        """It communicates, or gives the baton away."""
        if self._measured and self._since is not None:
            self.compute(rank, self._scale * (time.perf_counter() - self._since), "")
        self._since = time.perf_counter()

    def compute(self, rank: int, seconds: float, name: str) -> None:
        """A rank computes; what has one name in a row is one."""
        items = self._items[rank]
        if items and isinstance(items[-1], Compute) and items[-1].name == name:
            items[-1] = Compute(items[-1].seconds + seconds, name)
        else:
            items.append(Compute(seconds, name))

    def started(self, call: Call) -> None:
        """A rank has issued a call."""
        self._items[call.rank].append(_Started(call))

    def waited(self, rank: int, call: Call) -> None:
        """It goes on only after the call."""
        self._items[rank].append(_Waited(call))

    def matched(self, calls: list[Call]) -> None:
        """These are one communication."""
        number, self._matches = self._matches, self._matches + 1
        members = tuple(sorted({call.rank for call in calls}))
        first = calls[0]
        stream = first.group.name
        if first.op == "send":  # messages of a pair, a direction and a tag keep their order
            stream += f": {first.rank} to {calls[1].rank}" + (f", tag {first.tag}" if first.tag else "")
        num_bytes = max(call.num_bytes() for call in calls)
        for call in calls:
            call.told.start = Start(number, members, stream, first.op, num_bytes, first.op)


class Told:
    """What is known of a call when the run is over, without its tensors."""

    __slots__ = ("start",)

    def __init__(self) -> None:
        self.start: Start | None = None


class _Started:
    __slots__ = ("told",)

    def __init__(self, call: Call) -> None:
        self.told = call.told

    def item(self) -> Start | Wait:
        return self._start()

    def _start(self) -> Start:
        if self.told.start is None:
            raise ValueError("a communication of this run never happened.")
        return self.told.start


class _Waited(_Started):
    __slots__ = ()

    def item(self) -> Start | Wait:
        return Wait((self._start().key,))


def _happened(item: Any) -> bool:
    return isinstance(item, Compute) or item.told.start is not None


def compute(seconds: float, name: str = "") -> None:
    """This simulated rank computes for so long. Outside of a run with programs it does nothing."""
    where = place()
    programs = where.scheduler.programs if where is not None else None
    if where is not None and programs is not None:
        programs.compute(where.rank.index, seconds, name)


@contextmanager
def costing(device: Device, *, dtype: str = "bf16", name: Callable[[], str] | None = None) -> Iterator[None]:
    """Within the context, what this rank computes takes as long as it would on a device.

    Products of matrices and attention cost their FLOPs, everything else the bytes that it reads and writes; what only
    looks at a tensor's memory anew costs nothing. Backward within the context counts as well.

    Args:
        dtype: that products are computed in there. name: of what is computed now.
    """
    mode: Any = _Costing  # torch has no types here
    with mode(device, dtype, name):
        yield


class _Costing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: Device, dtype: str, name: Callable[[], str] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._dtype, self._name = device, dtype, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace != "c10d":
            compute(self._seconds(func, args, out), self._name() if self._name is not None else "")
        return out

    def _seconds(self, func: Any, args: Any, out: Any) -> float:
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            a, b = args[-2:] if len(args) >= 2 else args
            *batch, m, k = a.shape
            return product_s(
                self._device, m, b.shape[-1], k, batch=batch[0] if batch else 1, dtype=self._dtype,
                itemsize=a.element_size(),
            )  # fmt: skip
        tensors = [t for t in (*args, *(out if isinstance(out, (tuple, list)) else [out])) if _is_real(t)]
        if name.startswith("aten::_scaled_dot_product"):
            q, k = args[0], args[1]
            forward = 4 * q[..., 0].numel() * k.shape[-2] * q.shape[-1]
            factor = 2.5 if "backward" in name else 1.0
            return float(factor * forward / (self._device.peak(self._dtype) * self._device.reached))
        return pass_s(self._device, sum(t.nbytes for t in tensors))


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
