"""Elements that chance chooses, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo.comm.communicator import Communicator
from zoo.comm.compression.errors import Owed
from zoo.comm.compression.reducer import Reducer
from zoo.comm.handles import Handle, Then

Tensor = torch.Tensor


class RandomK:
    """C(c) = c at k places, else 0; the places are drawn anew for every reduction, by a seed that all ranks share.

    Places need not travel, and the sum of what ranks send is of the same kind: it is an ordinary all-reduce of k fp32
    numbers. Stich et al. 2018, "Sparsified SGD with Memory". Departure: places are drawn in blocks of consecutive
    elements, which costs n/block draws instead of n. Nothing is scaled up: what is left out is sent later.
    """

    name = "random_k"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options.

        Attributes:
            ratio: k/n, above 0, at most 1; in whole blocks, at least one.
            block: consecutive elements that are drawn together.
            seed: the same on all ranks; its low 32 bits count.
        """

        ratio: float = 0.01
        block: int = 64
        seed: int = 0

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        if not 0 < self.config.ratio <= 1:
            raise ValueError(f"RandomK got ratio={self.config.ratio}; it must be above 0 and at most 1.")
        if self.config.block < 1:
            raise ValueError(f"RandomK got block={self.config.block}; it must be at least 1.")

    def reducer(self, comm: Communicator, numel: int) -> RandomKReducer:
        """How tensors of n elements are averaged."""
        return RandomKReducer(comm, self.config, numel)


class RandomKReducer(Reducer):
    """The mean of (n,) over the ranks at places of chance. A reduction that is rolled back has used up its places.

    Attributes:
        draws: how many reductions there were, the same on all ranks: with the seed it decides the places of the next.
    """

    worker: Owed

    def __init__(self, comm: Communicator, config: RandomK.Config, numel: int) -> None:
        super().__init__(comm, numel, Owed())
        self.config, self.draws = config, 0

    def places(self, device: torch.device) -> Tensor:
        """Of the next reduction: int64, ascending within each block."""
        n, block = self.numel, self.config.block
        blocks = -(-n // block)
        count = min(blocks, max(1, -int(-self.config.ratio * blocks // 1)))
        # Odd factors keep what differs apart in the low 32 bits too, which are all that the generator looks at.
        seed = self.config.seed * 0x9E3779B1 + self.draws * 0x85EBCA77 + n * 0xC2B2AE3D
        generator = torch.Generator().manual_seed(seed % 2**63)
        chosen = torch.randperm(blocks, generator=generator)[:count].to(device)
        places = (chosen[:, None] * block + torch.arange(block, device=device)).view(-1)
        return places[places < n]

    def _begin(self, x: Tensor, out: Tensor, label: str) -> Handle:
        places = self.places(x.device)
        self.draws += 1
        c = self.worker.added(x)
        values = c[places]
        c[places] = 0.0
        self.worker.prepare(c)
        handle = self.comm.all_reduce(values)

        def unpack() -> None:
            out.zero_()
            out[places] = (values / self.comm.size).to(out.dtype)

        return Then([handle], unpack)

    def sent_bytes(self) -> int:
        """See :class:`Reducer`; by a ring 2·k·4·(D-1)/D."""
        k = self.places(torch.device("cpu")).numel() if self.numel else 0
        return 2 * 4 * k * (self.comm.size - 1) // self.comm.size
