"""The update's states on NVMe: brought to memory piece by piece, updated, and written back.

A piece is a list of segments. While piece k is updated, the next ones are read and those before it are written, one
each unless more are asked for, so that at most three pieces are in memory. What was written last may still be on its
way when the update is over; it is waited for before the next backward. Each state of a segment is a
:class:`~zoo.shard.roles.RoleBuffer`, as are its parameters and gradient, and lends its elements for as long; the states
of a segment lie one after another, and come and go as one. The tensors that the optimizer knows stay the same objects:
in memory they are given what is lent, otherwise a single element that repeats, so that shapes stay and nothing holds
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zoo.shard.offload.scratch import round_up
from zoo.shard.offload.tiers import Tier
from zoo.shard.roles import GRADIENT, PARAMETER, Loan, RoleBuffer
from zoo.zero.update.segments import Segment, absent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zoo.shard.buckets import Bucket
    from zoo.shard.offload.scratch import Scratch


ALIGN = 64  # of a state among those of a segment, as vector loads like it
STATES = "states"


class StateStream:
    """Args:
    pieces: the segments in the order of the update.
    dtypes: what the optimizer keeps of a segment: dtype by name, "" for a master that it got as its parameter.
    ahead: pieces that are read while one is updated.
    behind: pieces that are written meanwhile.
    """

    def __init__(
        self, scratch: Scratch, folder: Path | None, pieces: Sequence[Sequence[Segment]],
        dtypes: Callable[[Segment], Mapping[str, torch.dtype]], *, ahead: int, behind: int,
    ) -> None:  # fmt: skip
        self._ahead, self._behind, self._pieces = ahead, behind, pieces
        kept: dict[Segment, Mapping[str, torch.dtype]] = {}
        for segment in (s for piece in pieces for s in piece):
            found = dtypes(segment) if segment.bucket.placements.states.tier is Tier.NVME else {}
            if found:
                kept[segment] = found
        sizes = [sum(_aligned(s.tensor.numel() * d.itemsize) for d in found.values()) for s, found in kept.items()]
        self._nvme_file = scratch.nvme_file(folder, "optimizer states", sizes) if kept else None
        self._all_states: dict[Segment, RoleBuffer] = {}
        for region, (segment, found) in enumerate(kept.items()):
            make = partial(
                RoleBuffer, device=torch.device("cpu"), tier=Tier.NVME, scratch=scratch, store=self._nvme_file,
                region=region,
            )  # fmt: skip
            self._all_states[segment] = make(sizes[region], torch.uint8)
            offset, n = 0, segment.tensor.numel()
            for name, dtype in found.items():
                segment.stored[name] = make(n, dtype, first=segment.first, offset=offset)
                offset += _aligned(n * dtype.itemsize)
        self._loaded: dict[int, dict[Segment, dict[str, Loan]]] = {}
        self._writing: dict[int, list[Loan]] = {}

    def buffer_bytes(self) -> int:
        """Host memory of the pieces that are in memory together, in the worst moment of an update."""
        sizes = [sum(map(self._buffer_bytes, piece)) for piece in self._pieces]
        together = min(self._behind + 1 + self._ahead, len(sizes))
        around = sizes + sizes  # what is read ahead for the next update may meet the last writes of this one
        return max((sum(around[k : k + together]) for k in range(len(sizes))), default=0)

    def traffic(self) -> tuple[int, int]:
        """Bytes that an update reads and writes, once states exist."""
        read = written = 0
        for segment in (s for piece in self._pieces for s in piece):
            bucket, n = segment.bucket, segment.tensor.numel()
            states = self._state_bytes(segment)
            parameters = n * bucket.spec.dtype.itemsize if bucket.parameters_on_nvme else 0
            read += states + (0 if _master_of(segment) is not None else parameters)
            written += states + parameters
            if bucket.gradients_on_nvme:
                read += n * bucket.spec.gradient_dtype.itemsize
        return read, written

    def _state_bytes(self, segment: Segment) -> int:
        return self._all_states[segment].numel if segment in self._all_states else 0

    def _buffer_bytes(self, segment: Segment) -> int:
        bucket, n = segment.bucket, segment.tensor.numel()
        total = round_up(self._state_bytes(segment))
        if bucket.gradients_on_nvme:
            total += round_up(n * bucket.spec.gradient_dtype.itemsize)
        return total + (round_up(n * bucket.spec.dtype.itemsize) if bucket.parameters_on_nvme else 0)

    # A piece in memory -----------------------------------------------------------------------------------------------

    def load(self, index: int, *, gradients: bool = True) -> None:
        """Bring piece ``index`` to memory, and begin with the next ones."""
        self.begin(index, gradients=gradients)
        for segment, loans in self._loaded[index].items():
            for loan in loans.values():
                loan.finish()
            _attach(segment, loans)

    def begin(self, index: int, *, gradients: bool = True) -> None:
        """Begin reading piece ``index`` and the next ones, as far as that is not done yet."""
        for k in range(index, min(index + 1 + self._ahead, len(self._pieces))):
            if k not in self._loaded:
                self._settle(k)
                while self._writing and len(self._loaded) + len(self._writing) > self._ahead + self._behind:
                    self._settle(next(iter(self._writing)))  # the oldest
                self._loaded[k] = {segment: self._read(segment, gradients) for segment in self._pieces[k]}

    def _read(self, segment: Segment, gradients: bool) -> dict[str, Loan]:
        """What is lent of a segment while it is in memory: its states, as bytes, its gradient and its parameters."""
        bucket, loans = segment.bucket, dict[str, Loan]()
        if any(role.kept for role in segment.stored.values()):
            loans[STATES] = self._all_states[segment].lend()
        if gradients and segment.gradients.role.is_away:
            loans[GRADIENT] = segment.gradients.role.lend(segment.start, segment.stop)
        if bucket.parameters_on_nvme:
            master = _master_of(segment)
            begins = master is None or not master.kept
            loans[PARAMETER] = bucket.parameters.shard.lend(segment.start, segment.stop, read=begins)
        return loans

    def arrived(self, index: int) -> bool:
        """Whether :meth:`load` would not have to wait for piece ``index``."""
        found = self._loaded.get(index)
        return found is not None and all(loan.done() for loans in found.values() for loan in loans.values())

    def store(self, index: int) -> None:
        """Piece ``index`` was updated: write it, and give its memory back once that is done."""
        self._writing[index] = []
        for segment, loans in self._loaded.pop(index).items():
            self._write(segment, loans, self._writing[index])
            _detach(segment, loans)
        if not self._behind:
            self._settle(index)

    def _write(self, segment: Segment, loans: dict[str, Loan], writing: list[Loan]) -> None:
        loan = loans.get(STATES)
        for name, role in segment.stored.items():
            if name and name not in segment.entries:
                role.drop()
                continue
            loan, tensor = loan or self._all_states[segment].lend(read=False), _tensor_of(segment, name)
            place = role.part_of(loan.values)
            if tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor.detach())
            role.kept = True
        for stored, urgent in ((loan, False), (loans.get(PARAMETER), True)):
            if stored is not None:
                stored.store(urgent=urgent)
                writing.append(stored)

    def _settle(self, index: int) -> None:
        for loan in self._writing.pop(index, ()):
            loan.finish()

    def finish(self) -> None:
        """Wait until everything is written."""
        for index in list(self._writing):
            self._settle(index)

    def drop_read(self) -> None:
        """Forget what is in memory: the update that it was read for does not go on."""
        for index in list(self._loaded):
            self._drop(index)

    def _drop(self, index: int) -> None:
        for segment, loans in self._loaded.pop(index).items():
            _detach(segment, loans)

    def give_up(self) -> None:
        """After a failure: forget all that is under way; the states are of no step any more."""
        self.drop_read()
        self._writing.clear()

    def forget(self) -> None:
        """There are no states: the next step makes them. All parameters will be written."""
        if self._nvme_file is not None:
            self._nvme_file.forget()
        for segment in (s for piece in self._pieces for s in piece):
            for role in segment.stored.values():
                role.drop()
            if segment.bucket.parameters_on_nvme:
                segment.bucket.parameters.shard.forget()

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
                self._drop(index)
        finally:
            self._ahead = before


def needs_stream(buckets: Sequence[Bucket]) -> bool:
    """Whether anything that the update touches is on NVMe."""
    return any(b.placements.states.tier is Tier.NVME or b.parameters_on_nvme for b in buckets)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def _master_of(segment: Segment) -> RoleBuffer | None:
    """The role with the exact values, where that is among the states."""
    return segment.stored.get("", segment.stored.get("master"))


def _attach(segment: Segment, loans: Mapping[str, Loan]) -> None:
    segment.loaded_gradient = loans[GRADIENT].values if GRADIENT in loans else None
    if PARAMETER in loans:
        segment.moved_to(loans[PARAMETER].values)
    for name, role in segment.stored.items():
        if role.kept and STATES in loans:
            _tensor_of(segment, name).data = role.part_of(loans[STATES].values)
        elif not name and segment.target is not None:  # there is no master yet
            segment.tensor.data = segment.target.to("cpu", segment.tensor.dtype, copy=True)


def _detach(segment: Segment, loans: Mapping[str, Loan]) -> None:
    segment.loaded_gradient = None
    if PARAMETER in loans:
        segment.moved_to(absent(segment.tensor if segment.target is None else segment.target))
    for name, role in segment.stored.items():
        if role.kept:
            tensor = _tensor_of(segment, name)
            tensor.data = absent(tensor)


def _tensor_of(segment: Segment, name: str) -> torch.Tensor:
    """What the optimizer knows a state as."""
    found: torch.Tensor = segment.entries[name] if name else segment.tensor
    return found
