"""Full precision within a node, compressed between nodes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from zoo.comm.communicator import Communicator
from zoo.comm.compression.reducer import Compressor, Reducer
from zoo.comm.handles import Handle, Then

Tensor = torch.Tensor


class Hierarchical(Reducer):
    """The mean of (n,) over M nodes with L ranks each: reduce-scatter within nodes, a compressed mean between them of
    n/L elements, all-gather within nodes. Only n/L elements a rank have errors.

    Args:
        comm: knows its nodes, all of one size.
        compressor: of the kind "compressor".

    Raises:
        ValueError: nodes are unknown or of several sizes.
    """

    def __init__(self, comm: Communicator, compressor: Compressor, numel: int) -> None:
        nodes = comm.nodes
        counts = {} if nodes is None else {node: nodes.count(node) for node in nodes}
        if nodes is None or len(set(counts.values())) > 1:
            found = "are unknown" if nodes is None else f"have {sorted(counts.values())} ranks"
            raise ValueError(
                f"compression between nodes needs nodes of one size, and those of {comm!r} {found}; give nodes= to "
                "Communicator, or let torchrun set LOCAL_WORLD_SIZE."
            )
        members = [[r for r, node in enumerate(nodes) if node == which] for which in counts]
        self.local = comm.partition(members, name="within a node")
        across = comm.partition([list(ranks) for ranks in zip(*members, strict=True)], name="between nodes")
        self.chunk = -(-numel // self.local.size)
        self.inner = compressor.reducer(across, self.chunk)
        super().__init__(comm, numel, self.inner.worker, self.inner.server)

    def _begin(self, x: Tensor, out: Tensor, label: str) -> Handle:
        size = self.local.size
        full = F.pad(x.to(torch.float32), (0, size * self.chunk - self.numel))  # a copy, also where nothing is missing
        mine = torch.empty_like(full[: self.chunk])
        first = self.local.reduce_scatter(full, mine, scale=1.0 / size, label=f"{label}, within a node")

        def between() -> Handle:
            second = self.inner.start(mine, mine, label)

            def within() -> Handle:
                third = self.local.all_gather(full, mine, label=f"{label}, within a node")
                return Then([third], lambda: _copy(out, full))

            return Then([second], within, staged=True)

        return Then([first], between, staged=True)

    def sent_bytes(self) -> int:
        """See :class:`Reducer`; to other nodes."""
        return self.inner.sent_bytes()

    def commit(self) -> None:
        """See :class:`Reducer`."""
        self.inner.commit()

    def roll_back(self) -> None:
        """See :class:`Reducer`."""
        self.inner.roll_back()


def _copy(out: Tensor, full: Tensor) -> None:
    out.copy_(full[: out.numel()])
