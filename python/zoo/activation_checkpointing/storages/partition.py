"""Of every tensor each tensor-parallel rank keeps its part."""

from __future__ import annotations

import torch

from zoo.activation_checkpointing.storages.protocol import Held, Keep, Storage
from zoo.comm import Communicator

__all__ = ["Partition"]


class Partition:
    """Rank r of n keeps elements [r·m, (r+1)·m) of a tensor of N elements, m = ceil(N / n); gathered before use.

    Bytes that wait: m · itemsize, 1/n of the tensor where n divides N. Wire: one all-gather of m elements a tensor.
    Floating-point tensors of at least n elements; others are left to the storage below as they are. The tensors must be
    equal on all ranks of the group, as activations between tensor-parallel layers are. Collective over the group in
    backward: its ranks come to the same checkpoints in the same order.

    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 6.1 (P_a).
    """

    def __init__(self, comm: Communicator, below: Storage | None = None) -> None:
        self.comm = comm
        self.below: Storage = Keep() if below is None else below
        self.fetches = self.below.fetches

    def put(self, flat: torch.Tensor, position: int, private: bool) -> Held:
        size, count = self.comm.size, flat.numel()
        if size == 1 or count < size or not flat.is_floating_point():
            return self.below.put(flat, position, private)
        each = -(-count // size)
        start = min(self.comm.rank * each, count)
        stop = min(start + each, count)
        shard = flat.new_empty(each)
        shard[: stop - start].copy_(flat[start:stop])
        shard[stop - start :].view(torch.uint8).zero_()
        return _Part(self.below.put(shard, position, True), self.comm, count)

    def reset(self) -> None:
        self.below.reset()


class _Part:
    __slots__ = ("_comm", "_count", "_held", "num_bytes")

    def __init__(self, held: Held, comm: Communicator, count: int) -> None:
        self._held, self._comm, self._count = held, comm, count
        self.num_bytes = held.num_bytes

    def fetch(self) -> None:
        # Not the gather: which checkpoint is fetched ahead depends on what lives on this rank, and the order of
        # collectives must not.
        self._held.fetch()

    def get(self) -> torch.Tensor:
        shard = self._held.get()
        full = shard.new_empty(shard.numel() * self._comm.size)
        # As bytes: some groups do not carry 8-bit floating-point types.
        self._comm.all_gather(full.view(torch.uint8), shard.view(torch.uint8), label="activation checkpoint").wait()
        return full[: self._count]
