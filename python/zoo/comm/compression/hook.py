"""Compressed means as a communication hook of torch's DistributedDataParallel.

    state = HookState(OneBit(), start_step=100)
    model.register_comm_hook(state, hook)

DDP has no step that could be skipped: a bucket's error is committed when its mean is finite, and rolled back where it
is not, which all ranks see alike. The first ``start_step`` steps go uncompressed.
"""

# DDP compares annotations themselves: no "from __future__ import annotations" here.
from typing import Any

import torch
import torch.distributed as dist

from zoo.comm.communicator import Communicator
from zoo.comm.compression.hierarchy import Hierarchical
from zoo.comm.compression.reducer import Compressor, Reducer
from zoo.comm.handles import Handle, advance

Tensor = torch.Tensor
UnderWay = tuple[Handle, Reducer | None, Tensor, Tensor, "torch.futures.Future[Tensor]"]
"""The handle, the reducer (None where nothing is compressed), the bucket's buffer, the mean, what DDP waits for."""


class HookState:
    """What the hook keeps between steps, for one model.

    Args:
        compressor: of the kind "compressor".
        start_step: steps before compression begins.
        comm: the ranks of the model's process group; by default those of the default group.
        between_nodes: full precision within a node, compressed between nodes; ``comm`` knows them.
    """

    def __init__(
        self,
        compressor: Compressor,
        *,
        start_step: int = 0,
        comm: Communicator | None = None,
        between_nodes: bool = False,
    ) -> None:
        if start_step < 0:
            raise ValueError(f"HookState got start_step={start_step}; it must be 0 or more.")
        self.compressor, self.start_step, self.between_nodes = compressor, start_step, between_nodes
        self.comm = comm if comm is not None else Communicator()
        self.step = 0
        self.reducers: dict[tuple[int, int], Reducer] = {}
        self._under_way: list[UnderWay] = []

    def reducer_of(self, index: int, numel: int) -> Reducer:
        """That of a bucket. DDP makes its buckets anew after the first step: new ones owe nothing."""
        key = index, numel
        if key not in self.reducers:
            if self.between_nodes:
                self.reducers[key] = Hierarchical(self.comm, self.compressor, numel)
            else:
                self.reducers[key] = self.compressor.reducer(self.comm, numel)
        return self.reducers[key]

    def begin(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin the mean of a bucket. Later stages of the one before follow first: on all ranks in the same order."""
        found: torch.futures.Future[Tensor] = torch.futures.Future()
        buffer = bucket.buffer()
        for handle, *_ in self._under_way:
            advance(handle)
        if self.step < self.start_step:
            buffer.div_(self.comm.size)
            self._under_way.append((self.comm.all_reduce(buffer), None, buffer, buffer, found))
        else:
            reducer = self.reducer_of(bucket.index(), buffer.numel())
            out = buffer if buffer.dtype is torch.float32 else torch.empty_like(buffer, dtype=torch.float32)
            handle = reducer.start(buffer, out, f"bucket {bucket.index()}")
            self._under_way.append((handle, reducer, buffer, out, found))
        if bucket.is_last():
            self._finish()
        return found

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        self.step += 1
        for handle, reducer, buffer, out, found in under_way:
            handle.wait()
            if reducer is not None:
                reducer.commit() if _finite(out) else reducer.roll_back()
                buffer.copy_(out)  # nothing where they are one
            found.set_result(buffer)


def _finite(x: Tensor) -> bool:
    # Both are NaN where any element is. One pass, where isfinite has several with temporaries.
    return bool(torch.isfinite(torch.stack(x.aminmax())).all())


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """For ``DistributedDataParallel.register_comm_hook``; its gradients become the compressed mean."""
    return state.begin(bucket)
