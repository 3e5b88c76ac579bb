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
from zoo.comm.handles import DONE, Handle, Then

Tensor = torch.Tensor
UNIT = 64
"""Chunks begin at multiples of so many elements: what kernels read at a time."""


class ReduceLeg:
    """The first step: rank r gets the mean of everybody's chunk r. Only workers have errors.

    Args:
        chunk: elements of a chunk; by default an even share in whole units, the last ranks having less or nothing.
    """

    def __init__(self, comm: Communicator, codec: Codec, numel: int, *, chunk: int | None = None) -> None:
        self.comm, self.codec, self.numel = comm, codec, numel
        even = -(-numel // comm.size)
        self.chunk = -(-even // UNIT) * UNIT if chunk is None else chunk
        self.slot_bytes = codec.wire_bytes(min(self.chunk, numel))
        self.worker = Error(codec)

    def where(self, rank: int) -> slice:
        """Elements of a rank's chunk."""
        begin = min(rank * self.chunk, self.numel)
        return slice(begin, min(begin + self.chunk, self.numel))

    def pieces(self, wires: Tensor) -> list[Piece]:
        """The part of ``wires`` (D·slot,) for each rank's chunk."""
        return list(self._pieces(wires))

    def _pieces(self, wires: Tensor) -> Iterator[Piece]:
        for rank in range(self.comm.size):
            where = self.where(rank)
            begin = rank * self.slot_bytes
            yield where, wires[begin : begin + self.codec.wire_bytes(where.stop - where.start)]

    def start(self, c: Tensor, out: Tensor, label: str = "") -> Handle:
        """``out`` ← 1/D Σ_r C(c_r) of this rank's chunk.

        Args:
            c: (n,) fp32; it becomes x + e and belongs to this object until commit or roll-back.
            out: fp32, the elements of :meth:`where`, no part of ``c``.
        """
        wires = torch.zeros(self.comm.size * self.slot_bytes, dtype=torch.uint8, device=c.device)
        self.worker.encode(c, self.pieces(wires))
        arrived = torch.empty_like(wires)
        handle = self.comm.all_to_all(arrived, wires, label=f"{label} by {self.codec.name}")
        size = self.codec.wire_bytes(out.numel())

        def add_up() -> None:
            for rank, wire in enumerate(arrived.view(self.comm.size, self.slot_bytes)):
                self.codec.decode_(out, wire[:size], add=rank > 0)
            out.mul_(1.0 / self.comm.size)

        return Then([handle], add_up)

    def sent_bytes(self) -> int:
        """That a rank sends to others."""
        return (self.comm.size - 1) * self.slot_bytes

    def commit(self) -> None:
        """What was sent counts."""
        self.worker.commit()

    def roll_back(self) -> None:
        """What was sent does not count."""
        self.worker.roll_back()


class TwoStep:
    """The mean of (n,) over the ranks, the same bits on all of them.

    Attributes:
        worker: the error of this rank, (n,).
        server: that of its chunk of the mean, ``reduce.where(rank)``.
    """

    def __init__(self, comm: Communicator, codec: Codec, numel: int) -> None:
        self.comm, self.codec, self.numel = comm, codec, numel
        self.reduce = ReduceLeg(comm, codec, numel)
        self.worker, self.server = self.reduce.worker, Error(codec)

    def start(self, c: Tensor, out: Tensor, label: str = "") -> Handle:
        """``out`` (n,) ← C(z) of all chunks, z = 1/D Σ_r C(c_r) + s.

        Args:
            c: (n,) fp32; it becomes x + e and belongs to this object until commit or roll-back.
            out: fp32, no part of ``c``.
        """
        if not self.numel:
            return DONE
        reduce, mine = self.reduce, self.reduce.where(self.comm.rank)
        mean = torch.empty(mine.stop - mine.start, dtype=torch.float32, device=c.device)
        first = reduce.start(c, mean, label)

        def give_back() -> Handle:
            wires = torch.zeros(self.comm.size * reduce.slot_bytes, dtype=torch.uint8, device=c.device)
            own = wires.view(self.comm.size, -1)[self.comm.rank]
            sent = own[: self.codec.wire_bytes(mean.numel())].clone()
            self.server.encode(mean, [(slice(0, mean.numel()), sent)])
            own[: sent.numel()].copy_(sent)
            handle = self.comm.all_gather(wires, own, label=f"{label} by {self.codec.name}, back")

            def unpack() -> None:
                for where, wire in reduce.pieces(wires):
                    self.codec.decode_(out[where], wire)

            return Then([handle], unpack)

        return Then([first], give_back, staged=True)

    def sent_bytes(self) -> int:
        """That a rank sends to others for one mean."""
        return 2 * self.reduce.sent_bytes()

    def commit(self) -> None:
        """What was sent counts: see :mod:`zoo.comm.compression.errors`."""
        self.reduce.commit()
        self.server.commit()

    def roll_back(self) -> None:
        """What was sent does not count: errors are what they were."""
        self.reduce.roll_back()
        self.server.roll_back()
