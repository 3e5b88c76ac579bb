"""An all-gather of what everybody compressed: for codecs whose sums are not of their own kind."""

from __future__ import annotations

import torch

from zoo.comm.communicator import Communicator
from zoo.comm.compression.codec import Codec
from zoo.comm.compression.errors import Error
from zoo.comm.compression.reducer import Reducer
from zoo.comm.handles import Handle, Then

Tensor = torch.Tensor


class Gathered(Reducer):
    """The mean of (n,) over the ranks: every rank decodes what all of them sent, in the order of ranks.

    A rank sends D-1 messages of the codec's bytes for n elements. Nobody compresses twice, so that there is no server.
    """

    worker: Error

    def __init__(self, comm: Communicator, codec: Codec, numel: int) -> None:
        super().__init__(comm, numel, Error(codec))
        self.codec = codec

    def _begin(self, x: Tensor, out: Tensor, label: str) -> Handle:
        wire = torch.empty(self.codec.wire_bytes(self.numel), dtype=torch.uint8, device=x.device)
        self.worker.encode(x, [(slice(0, self.numel), wire)])
        wires = torch.empty(self.comm.size * wire.numel(), dtype=torch.uint8, device=x.device)
        handle = self.comm.all_gather(wires, wire, label=f"{label} by {self.codec.name}")

        def add_up() -> None:
            self.codec.mean_(out, wires.view(self.comm.size, -1))

        return Then([handle], add_up)

    def sent_bytes(self) -> int:
        """See :class:`Reducer`."""
        return (self.comm.size - 1) * self.codec.wire_bytes(self.numel)
