"""An all-gather of what everybody compressed: for codecs whose sums are not of their own kind."""

from __future__ import annotations

import torch

from zoo.comm.communicator import Communicator
from zoo.comm.compression.codec import Codec
from zoo.comm.compression.errors import Error
from zoo.comm.handles import DONE, Handle, Then

Tensor = torch.Tensor


class Gathered:
    """The mean of (n,) over the ranks: every rank decodes what all of them sent, in the order of ranks.

    A rank sends D-1 messages of the codec's bytes for n elements. Nobody compresses twice, so that there is no server.

    Attributes:
        worker: the error of this rank, (n,).
    """

    def __init__(self, comm: Communicator, codec: Codec, numel: int) -> None:
        self.comm, self.codec, self.numel = comm, codec, numel
        self.worker = Error(codec)
        self.server: Error | None = None

    def start(self, c: Tensor, out: Tensor, label: str = "") -> Handle:
        """``out`` (n,) ← 1/D Σ_r C(c_r).

        Args:
            c: (n,) fp32; it becomes x + e and belongs to this object until commit or roll-back.
            out: fp32, no part of ``c``.
        """
        if not self.numel:
            return DONE
        wire = torch.empty(self.codec.wire_bytes(self.numel), dtype=torch.uint8, device=c.device)
        self.worker.encode(c, [(slice(0, self.numel), wire)])
        wires = torch.empty(self.comm.size * wire.numel(), dtype=torch.uint8, device=c.device)
        handle = self.comm.all_gather(wires, wire, label=f"{label} by {self.codec.name}")

        def add_up() -> None:
            for rank, one in enumerate(wires.view(self.comm.size, -1)):
                self.codec.decode_(out, one, add=rank > 0)
            out.mul_(1.0 / self.comm.size)

        return Then([handle], add_up)

    def sent_bytes(self) -> int:
        """That a rank sends to others for one mean."""
        return (self.comm.size - 1) * self.codec.wire_bytes(self.numel)

    def commit(self) -> None:
        """What was sent counts."""
        self.worker.commit()

    def roll_back(self) -> None:
        """What was sent does not count: the error is what it was."""
        self.worker.roll_back()
