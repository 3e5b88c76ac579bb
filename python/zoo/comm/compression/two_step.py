"""An all-to-all and an all-gather of compressed chunks: the mean over ranks, whatever the codec.

Each rank is the server of one chunk: it sums what all ranks sent of it, and sends the sum back, compressed again. Tang
et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", section 5 and
algorithm 1; legend and errors: :mod:`zoo.comm.compression.errors`. A rank sends (D-1)·2 messages of the codec's bytes
for n/D elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zoo.comm.communicator import Communicator
from zoo.comm.compression.codec import Codec
from zoo.comm.compression.errors import Error, Piece
from zoo.comm.compression.reducer import Reducer
from zoo.comm.handles import Handle, Then

Tensor = torch.Tensor
UNIT = 64
"""Chunks begin at multiples of so many elements: what kernels read at a time."""


class ReduceLeg(Reducer):
    """The first step: rank r gets the mean of everybody's chunk r, the elements of :meth:`where`.

    Args:
        chunk: elements of a chunk; by default an even share in whole units, the last ranks having less or nothing.
    """

    worker: Error

    def __init__(self, comm: Communicator, codec: Codec, numel: int, *, chunk: int | None = None) -> None:
        super().__init__(comm, numel, Error(codec))
        self.codec = codec
        if chunk is not None and chunk * comm.size < numel:
            raise ValueError(
                f"ReduceLeg got chunk={chunk}, {chunk * comm.size:,} elements on {comm.size} ranks; it must cover all "
                f"{numel:,}."
            )
        even = -(-numel // comm.size)
        self.chunk = -(-even // UNIT) * UNIT if chunk is None else chunk
        self.slot_bytes = codec.wire_bytes(min(self.chunk, numel))

    def where(self, rank: int) -> slice:
        """Elements of a rank's chunk."""
        begin = min(rank * self.chunk, self.numel)
        return slice(begin, min(begin + self.chunk, self.numel))

    @property
    def _num_out(self) -> int:
        mine = self.where(self.comm.rank)
        num: int = mine.stop - mine.start
        return num

    def pieces(self, wires: Tensor) -> list[Piece]:
        """The part of ``wires`` (D·slot,) for each rank's chunk."""
        return list(self._pieces(wires))

    def _pieces(self, wires: Tensor) -> Iterator[Piece]:
        for rank in range(self.comm.size):
            where = self.where(rank)
            begin = rank * self.slot_bytes
            yield where, wires[begin : begin + self.codec.wire_bytes(where.stop - where.start)]

    def _begin(self, x: Tensor, out: Tensor, label: str) -> Handle:
        handle, arrived = self.send(x, label)
        return Then([handle], lambda: self.codec.mean_(out, arrived))

    def send(self, x: Tensor, label: str = "") -> tuple[Handle, Tensor]:
        """Send every rank its chunk of c; and where what all ranks send of this rank's chunk arrives, (D, slot)."""
        wires = torch.empty(self.comm.size * self.slot_bytes, dtype=torch.uint8, device=x.device)
        self.worker.encode(x, self.pieces(wires))
        arrived = torch.empty_like(wires)
        handle = self.comm.all_to_all(arrived, wires, label=f"{label} by {self.codec.name}")
        return handle, arrived.view(self.comm.size, self.slot_bytes)

    def sent_bytes(self) -> int:
        """See :class:`Reducer`."""
        return (self.comm.size - 1) * self.slot_bytes


class TwoStep(Reducer):
    """z = 1/D Σ_r C(c_r) + s of each chunk at its server, then C(z) of all chunks, the same bits on all ranks.

    Attributes:
        reduce: the first step, whose :meth:`~ReduceLeg.where` says which elements ``server`` is for.
    """

    server: Error

    def __init__(self, comm: Communicator, codec: Codec, numel: int) -> None:
        self.codec, self.reduce = codec, ReduceLeg(comm, codec, numel)
        super().__init__(comm, numel, self.reduce.worker, Error(codec))

    def _begin(self, x: Tensor, out: Tensor, label: str) -> Handle:
        reduce, mine = self.reduce, self.reduce.where(self.comm.rank)
        numel = mine.stop - mine.start
        first, arrived = reduce.send(x, label)

        def give_back() -> Handle:
            own = torch.empty(reduce.slot_bytes, dtype=torch.uint8, device=x.device)
            self.server.encode_mean(arrived, numel, own[: self.codec.wire_bytes(numel)])
            wires = torch.empty(self.comm.size * reduce.slot_bytes, dtype=torch.uint8, device=x.device)
            handle = self.comm.all_gather(wires, own, label=f"{label} by {self.codec.name}, back")

            def unpack() -> None:
                for where, wire in reduce.pieces(wires):
                    self.codec.decode_(out[where], wire)

            return Then([handle], unpack)

        return Then([first], give_back, staged=True)

    def sent_bytes(self) -> int:
        """See :class:`Reducer`."""
        return 2 * self.reduce.sent_bytes()
