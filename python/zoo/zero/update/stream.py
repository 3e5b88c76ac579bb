"""The update's states on NVMe: brought to memory piece by piece, updated, and written back.

A piece is a list of segments. While piece k is updated, the next ones are read and those before it are written, one
each unless more are asked for, so that at most three pieces are in memory. What was written last may still be on its
way when the update is over; it is waited for before the next backward. The tensors that the optimizer knows stay the
same objects: in memory they are given a buffer of the moment, otherwise a single element that repeats, so that shapes
stay and nothing holds memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zoo import io
from zoo.layout import Stored
from zoo.shard.buckets import Bucket
from zoo.shard.offload.scratch import Scratch, round_up
from zoo.shard.offload.tiers import Tier
from zoo.zero.update.segments import Segment, absent

ALIGN = 64  # of a section within a record, as vector loads like it


@dataclass
class Record:
    """What one segment has on NVMe: its region, and where in it each state begins."""

    segment: Segment
    region: int
    sections: dict[str, tuple[int, torch.dtype]]
    num_bytes: int
    written: tuple[str, ...] = ()  # the states that it has: before the first step no others than masters


@dataclass
class Loaded:
    """A segment while it is in memory."""

    record: Record
    states: torch.Tensor | None = None  # bytes
    parameters: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    reading: list[tuple[Any, io.Future]] = field(default_factory=list)


class StateStream:
    """Args:
    pieces: the segments in the order of the update.
    states_of: what the optimizer keeps of a segment: dtype by name, "" for a master that it got as its parameter.
    entries: ``optimizer.state``.
    ahead: pieces that are read while one is updated.
    behind: pieces that are written meanwhile.
    """

    def __init__(
        self, scratch: Scratch, folder: Path | None, pieces: Sequence[Sequence[Segment]],
        states_of: Callable[[Segment], Mapping[str, torch.dtype]], entries: Mapping[Any, dict[str, Any]], *,
        ahead: int, behind: int,
    ) -> None:  # fmt: skip
        self._scratch, self._entries = scratch, entries
        self._ahead, self._behind = ahead, behind
        self._pieces = [[self._record(s, states_of(s)) for s in piece] for piece in pieces]
        self._record_of = {r.segment: r for piece in self._pieces for r in piece}
        kept = [r for piece in self._pieces for r in piece if r.sections]
        for index, record in enumerate(kept):
            record.region = index
        self._nvme_file = scratch.nvme_file(folder, "optimizer states", [r.num_bytes for r in kept]) if kept else None
        self._loaded: dict[int, list[Loaded]] = {}
        self._writing: dict[int, list[tuple[Any, io.Future]]] = {}

    def buffer_bytes(self) -> int:
        """Host memory of the pieces that are in memory together, in the worst moment of an update."""
        sizes = [sum(self._bytes_of(record) for record in piece) for piece in self._pieces]
        together = min(self._behind + 1 + self._ahead, len(sizes))
        around = sizes + sizes  # what is read ahead for the next update may meet the last writes of this one
        return max((sum(around[k : k + together]) for k in range(len(sizes))), default=0)

    def traffic(self) -> tuple[int, int]:
        """Bytes that an update reads and writes, once states exist."""
        read = written = 0
        for record in (r for piece in self._pieces for r in piece):
            bucket, parameters = record.segment.bucket, 0
            if bucket.parameters_on_nvme:
                parameters = record.segment.tensor.numel() * bucket.spec.dtype.itemsize
            read += record.num_bytes + (0 if self._has_master(record.sections) else parameters)
            written += record.num_bytes + parameters
            if bucket.gradients_on_nvme:
                read += record.segment.tensor.numel() * bucket.spec.gradient_dtype.itemsize
        return read, written

    @staticmethod
    def _bytes_of(record: Record) -> int:
        bucket, n = record.segment.bucket, record.segment.tensor.numel()
        total = round_up(record.num_bytes)
        if bucket.gradients_on_nvme:
            total += round_up(n * bucket.spec.gradient_dtype.itemsize)
        return total + (round_up(n * bucket.spec.dtype.itemsize) if bucket.parameters_on_nvme else 0)

    @staticmethod
    def _record(segment: Segment, states: Mapping[str, torch.dtype]) -> Record:
        sections: dict[str, tuple[int, torch.dtype]] = {}
        end = 0
        if segment.bucket.placements.states.tier is Tier.NVME:
            for name, dtype in states.items():
                sections[name] = (end, dtype)
                end += -(-segment.tensor.numel() * dtype.itemsize // ALIGN) * ALIGN
        return Record(segment, -1, sections, end)

    # A piece in memory -----------------------------------------------------------------------------------------------

    def load(self, index: int, *, gradients: bool = True) -> None:
        """Bring piece ``index`` to memory, and begin with the next ones."""
        self.begin(index, gradients=gradients)
        for loaded in self._loaded[index]:
            for nvme_file, future in loaded.reading:
                nvme_file.finish(future)
            self._attach(loaded)

    def begin(self, index: int, *, gradients: bool = True) -> None:
        """Begin reading piece ``index`` and the next ones, as far as that is not done yet."""
        for k in range(index, min(index + 1 + self._ahead, len(self._pieces))):
            if k not in self._loaded:
                self._settle(k)
                while self._writing and len(self._loaded) + len(self._writing) > self._ahead + self._behind:
                    self._settle(next(iter(self._writing)))  # the oldest
                self._loaded[k] = [self._read(record, gradients) for record in self._pieces[k]]

    def arrived(self, index: int) -> bool:
        """Whether :meth:`load` would not have to wait for piece ``index``."""
        return index in self._loaded and all(f.done() for loaded in self._loaded[index] for _, f in loaded.reading)

    def _read(self, record: Record, gradients: bool) -> Loaded:
        loaded, segment, pool = Loaded(record), record.segment, self._scratch.pool
        bucket, n = segment.bucket, segment.tensor.numel()
        if record.written and self._nvme_file is not None:
            loaded.states = pool.empty(record.num_bytes, dtype=torch.uint8)
            loaded.reading.append((self._nvme_file, self._nvme_file.read(record.region, loaded.states)))
        role = segment.gradients.role
        if gradients and role.is_away:
            loaded.gradient = pool.empty(n, dtype=bucket.spec.gradient_dtype)
            loaded.reading.append((role, role.begin_read(loaded.gradient, segment.start)))
        if bucket.parameters_on_nvme:
            loaded.parameters = pool.empty(n, dtype=bucket.spec.dtype)
            if not self._has_master(record.written):
                shard = bucket.parameters.shard
                loaded.reading.append((shard, shard.begin_read(loaded.parameters, segment.start)))
        return loaded

    @staticmethod
    def _has_master(names: Iterable[str]) -> bool:
        return not {"", "master"}.isdisjoint(names)

    def _attach(self, loaded: Loaded) -> None:
        segment, written = loaded.record.segment, loaded.record.written
        segment.loaded_gradient = loaded.gradient
        if loaded.parameters is not None:
            if segment.target is None:
                segment.tensor.data = loaded.parameters
            else:
                segment.target = loaded.parameters
        if "" in loaded.record.sections and "" not in written and segment.target is not None:
            segment.tensor.data = segment.target.to("cpu", segment.tensor.dtype, copy=True)
        entries = self._entries.get(segment.tensor, {})
        for name in written:
            tensor = segment.tensor if name == "" else entries[name]
            tensor.data = self._section(loaded, name)

    @staticmethod
    def _section(loaded: Loaded, name: str) -> torch.Tensor:
        begin, dtype = loaded.record.sections[name]
        n = loaded.record.segment.tensor.numel()
        if loaded.states is None:
            raise AssertionError("a section of a record that is not in memory")
        return loaded.states[begin : begin + n * dtype.itemsize].view(dtype)

    def store(self, index: int) -> None:
        """Piece ``index`` was updated: write it, and give its memory back once that is done."""
        self._writing[index] = []
        for loaded in self._loaded.pop(index):
            self._write(loaded, self._writing[index])
            self._detach(loaded)
        if not self._behind:
            self._settle(index)

    def _write(self, loaded: Loaded, writing: list[tuple[Any, io.Future]]) -> None:
        record, segment = loaded.record, loaded.record.segment
        entries = self._entries.get(segment.tensor, {})
        present = tuple(name for name in record.sections if not name or name in entries)
        if present and self._nvme_file is not None:
            if loaded.states is None:
                loaded.states = self._scratch.pool.empty(record.num_bytes, dtype=torch.uint8)
            for name in present:
                tensor = segment.tensor if name == "" else entries[name]
                section = self._section(loaded, name)
                if tensor.data_ptr() != section.data_ptr():
                    section.copy_(tensor.detach())
            writing.append((self._nvme_file, self._nvme_file.write(record.region, loaded.states)))
            record.written = present
        if loaded.parameters is not None:
            shard = segment.bucket.parameters.shard
            writing.append((shard, shard.begin_write(loaded.parameters, segment.start)))

    def _detach(self, loaded: Loaded) -> None:
        segment = loaded.record.segment
        segment.loaded_gradient = None
        if loaded.parameters is not None:
            if segment.target is None:
                segment.tensor.data = absent(segment.tensor)
            else:
                segment.target = absent(segment.target)
        entries = self._entries.get(segment.tensor, {})
        for name in loaded.record.written:
            tensor = segment.tensor if name == "" else entries[name]
            tensor.data = absent(tensor)

    def _settle(self, index: int) -> None:
        for nvme_file, future in self._writing.pop(index, ()):
            nvme_file.finish(future)

    def finish(self) -> None:
        """Wait until everything is written."""
        for index in list(self._writing):
            self._settle(index)

    def drop_read(self) -> None:
        """Forget what is in memory: the update that it was read for does not go on."""
        for pieces in self._loaded.values():
            for loaded in pieces:
                self._detach(loaded)
        self._loaded.clear()

    def give_up(self) -> None:
        """After a failure: forget all that is under way; the states are of no step any more."""
        self.drop_read()
        self._writing.clear()

    def forget(self) -> None:
        """There are no states: the next step makes them. All parameters will be written."""
        if self._nvme_file is not None:
            self._nvme_file.forget()
        for piece in self._pieces:
            for record in piece:
                record.written = ()
                if record.segment.bucket.parameters_on_nvme:
                    record.segment.bucket.parameters.shard.forget()

    def stored(self, segment: Segment) -> dict[str, Stored]:
        """By role, what of a segment is not in memory."""
        record, bucket, found = self._record_of[segment], segment.bucket, {}
        here = segment.target

        def load(start: int, length: int) -> torch.Tensor:
            if bucket.parameters_on_nvme or here is None:
                return bucket.parameters.shard.read(segment.start + start, length)
            return here[start : start + length]

        # A master that is in memory is more than the parameters; where none exists yet, they are all there is.
        if not self._value_is_here(record):
            lend = bucket.parameters.shard.lender(segment.start) if bucket.parameters_on_nvme else None
            found["parameter"] = Stored(load, bucket.spec.dtype, lend=lend, in_memory=not bucket.parameters_on_nvme)
        for name in record.written:
            role = "parameter" if name in ("", "master") else name
            begin, dtype = record.sections[name]
            lend = self._nvme_file.lender(record.region, begin) if self._nvme_file is not None else None
            found[role] = Stored(partial(self._load, record, name), dtype, lend=lend)
        return found

    def away(self, segment: Segment) -> Collection[str]:
        """The states of a segment that are not in memory between updates; "" for a master that is its parameter."""
        return self._record_of[segment].sections.keys()

    def _value_is_here(self, record: Record) -> bool:
        segment, away = record.segment, record.sections
        if "master" in self._entries.get(segment.tensor, {}):
            return "master" not in away
        return "" not in away if segment.target is not None else not segment.bucket.parameters_on_nvme

    def _load(self, record: Record, name: str, start: int, length: int) -> torch.Tensor:
        begin, dtype = record.sections[name]
        tensor = self._scratch.pool.empty(length, dtype=dtype)
        if self._nvme_file is None:
            raise AssertionError("a record without a file")
        self._nvme_file.finish(self._nvme_file.read(record.region, tensor, begin + start * dtype.itemsize))
        return tensor

    @contextmanager
    def in_memory(self, index: int, *, write: bool) -> Iterator[None]:
        """Piece ``index`` without gradients, for reading, or to be written back."""
        before, self._ahead = self._ahead, 0
        try:
            self.load(index, gradients=False)
            yield
            if write:
                self.store(index)
                self.finish()
            else:
                for loaded in self._loaded.pop(index):
                    self._detach(loaded)
        finally:
            self._ahead = before


def needs_stream(buckets: Sequence[Bucket]) -> bool:
    """Whether anything that the update touches is on NVMe."""
    return any(b.placements.states.tier is Tier.NVME or b.parameters_on_nvme for b in buckets)
