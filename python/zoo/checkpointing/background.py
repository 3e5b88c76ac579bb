"""Saving while training goes on: a copy of the state first, and the rest on a thread of its own.

:meth:`BackgroundSaver.save` copies this rank's slices into host memory that is kept for the next time, and returns.
Slices on NVMe are not copied but borrowed: an update waits before it overwrites one that is not written yet.
One thread writes them and commits, save by save, over a control group that nothing else uses. The next save waits for
the one before it, which the log says; so do whoever reads the directory in this process (``under_way.py``), and
``torch.distributed.destroy_process_group``. What failed is logged at once, and raised on all ranks at the next
:meth:`~BackgroundSaver.save`, :meth:`~BackgroundSaver.wait` or :meth:`~BackgroundSaver.close`.

Where ranks are simulated, and have no threads of their own, a save is over when it returns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zoo.checkpointing import under_way
from zoo.checkpointing.constants import Constants
from zoo.checkpointing.errors import alike
from zoo.checkpointing.format.disk import Disk, place_of
from zoo.checkpointing.format.tensors import check_dtype
from zoo.checkpointing.writing import Told, check_slice, check_tensor, save
from zoo.comm import Communicator, before_teardown
from zoo.comm.groups import make_groups
from zoo.layout import Lent, StateSlice, Stored

_log = logging.getLogger("zoo.checkpointing")
_SIMULATED = "zoo_sim"
_TOLD_AFTER_S = 0.1


def _read_lent(lent: Lent, dtype: torch.dtype, start: int, length: int) -> torch.Tensor:
    found = torch.empty(length, dtype=dtype)
    lent.read(found.view(torch.uint8), start * dtype.itemsize)
    return found


class Snapshot:
    """Slices as they are now: host copies, in memory that is used again for slices of the same places; and what lends
    itself (a slice on NVMe) where it lies."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, str, int], torch.Tensor] = {}
        self._lent: list[Lent] = []

    @property
    def num_bytes(self) -> int:
        """Of the memory that is kept."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def take(self, slices: Iterable[StateSlice]) -> list[StateSlice]:
        """The same slices, of copies that stay as they are until the next call."""
        found: list[StateSlice] = []
        kept: dict[tuple[str, str, int], torch.Tensor] = {}
        devices: set[torch.device] = set()
        self.release()
        for item in slices:
            check_slice(item)
            check_dtype(f"{item.role} {item.name!r}", item.dtype)
            lent = item.borrow() if item.length else None
            if lent is not None:
                self._lent.append(lent)
                source = Stored(partial(_read_lent, lent, item.dtype), item.dtype, 0, item.length, lent=lent)
                found.append(replace(item, source=source))
                continue
            key, tensor = (item.role, item.name, item.start), item.tensor.detach()
            memory = self._memory.pop(key, None)
            if memory is None or memory.dtype is not tensor.dtype or memory.numel() != tensor.numel():
                memory = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            memory.copy_(tensor.reshape(-1), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
            kept[key] = memory
            found.append(replace(item, source=memory))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._memory = kept
        return found

    def release(self) -> None:
        """What was lent may change again. For any thread; what is written releases itself."""
        lent, self._lent = self._lent, []
        for item in lent:
            item.release()

    def drop(self) -> None:
        """Give the memory back."""
        self.release()
        self._memory = {}


class BackgroundSaver:
    """Saves of one job, one after the other, while training goes on.

    Args:
        comm: the ranks that save together. A control group of its own is made of them at the first save.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._control: Communicator | None = None
        self._snapshot = Snapshot()
        self._constants = Constants()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: tuple[str, Future[Path]] | None = None

    @property
    def pending(self) -> bool:
        """A save is under way."""
        return self._pending is not None and not self._pending[1].done()

    def save(
        self, directory: str | os.PathLike[str], tag: str, slices: Iterable[StateSlice],
        scalars: Mapping[str, float | int] | None = None, meta: Mapping[str, Any] | None = None, *,
        rank_state: Mapping[str, torch.Tensor] | None = None, latest: bool = True, disk: Disk | None = None,
    ) -> Path:  # fmt: skip
        """As :func:`zoo.checkpointing.save`, which is over when :meth:`wait` returns. Collective.

        Raises:
            CheckpointError: on all ranks: the save before this one failed. Nothing of this one is done then.
        """
        self.wait(for_what=tag)
        comm, (where, root) = self._comm, place_of(directory, disk)
        what = f"saving the checkpoint {tag!r} in {str(directory)!r}"
        # Rank 0's is kept. It is made here, as the values may change; and what a rank raises here alone, all hear of.
        told = alike(comm, what, lambda: Told.of((meta or {}) if comm.rank == 0 else {}))
        if self._comm.backend == _SIMULATED:
            return save(
                directory,
                tag,
                slices,
                scalars,
                told,
                self._comm,
                rank_state=rank_state,
                latest=latest,
                disk=disk,
                constants=self._constants,
            )
        if self._control is None:
            self._control = _control_of(self._comm)
            before_teardown(under_way.finish_all)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zoo-checkpoint")
        if self._thread is None:
            raise AssertionError("a control group without a thread.")
        try:
            copies, own = alike(comm, what, lambda: (self._snapshot.take(slices), _copied(rank_state or {})))
        except BaseException:
            self._snapshot.release()
            raise
        numbers = dict(scalars or {})
        control = self._control

        def work() -> Path:
            try:
                return save(
                    root, tag, copies, numbers, told, control, rank_state=own, latest=latest, disk=where,
                    constants=self._constants,
                )  # fmt: skip
            except BaseException as error:
                _log.error("%s", error)
                raise
            finally:
                self._snapshot.release()  # of a save that failed: the update would wait for ever

        future = _submitted(self._thread, work)
        self._pending = tag, future
        under_way.begin(root, future)
        return root / tag

    def wait(self, *, for_what: str = "") -> None:
        """Return when nothing is under way any more.

        Raises:
            CheckpointError: on all ranks: what was under way failed.
        """
        if self._pending is None:
            return
        tag, future = self._pending
        began = time.perf_counter()
        try:
            future.result()
        finally:
            if future.done():  # whoever was interrupted waits again: the memory of the copy is still read
                self._pending = None
            waited = time.perf_counter() - began
            if for_what and waited > _TOLD_AFTER_S and self._comm.rank == 0:
                _log.warning("saving %r has waited %.1f s for %r, which was being written", for_what, waited, tag)

    def settle(self) -> None:
        """Return when nothing is under way any more. What failed is raised by the next call of the others."""
        if self._pending is not None:
            with contextlib.suppress(Exception):
                self._pending[1].result()

    def close(self) -> None:
        """Wait, and give memory, thread and control group back. Collective."""
        try:
            self.wait()
        finally:
            self._snapshot.drop()
            thread, self._thread = self._thread, None
            control, self._control = self._control, None
            if thread is not None:
                thread.shutdown()
            if control is not None and control.size > 1 and control.group is not None and dist.is_initialized():
                dist.destroy_process_group(control.group)


def _submitted(thread: ThreadPoolExecutor, work: Callable[[], Path]) -> Future[Path]:
    """Work for the thread; where the interpreter is about to end, and threads take none any more, it is done here."""
    try:
        return thread.submit(work)
    except RuntimeError:
        future: Future[Path] = Future()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        return future


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        check_tensor(f"rank_state[{name!r}]", tensor)
        check_dtype(repr(name), tensor.dtype)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _control_of(comm: Communicator) -> Communicator:
    """The same ranks, over a gloo group that only the thread uses. Collective over them."""
    if comm.size == 1:
        return comm
    return Communicator(make_groups([list(comm.ranks)], "checkpoint", comm.group, backend="gloo"))
