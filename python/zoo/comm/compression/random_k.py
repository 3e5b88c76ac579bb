"""Elements that chance chooses, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo.comm.communicator import Communicator
from zoo.comm.compression.errors import Error, Owed
from zoo.comm.handles import DONE, Handle, Then

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
            seed: the same on all ranks.
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


class RandomKReducer:
    """The mean of (n,) over the ranks at places of chance.

    Attributes:
        draws: how many reductions there were: with the seed it decides the places of the next one. The same on all
        ranks.
    """

    def __init__(self, comm: Communicator, config: RandomK.Config, numel: int) -> None:
        self.comm, self.config, self.numel = comm, config, numel
        self.worker, self.draws = Owed(), 0
        self.server: Error | None = None

    def places(self, device: torch.device) -> Tensor:
        """Of the next reduction: int64, ascending within each block."""
        n, block = self.numel, self.config.block
        blocks = -(-n // block)
        count = min(blocks, max(1, -int(-self.config.ratio * blocks // 1)))
        generator = torch.Generator().manual_seed(hash((self.config.seed, self.draws, n)) & (2**63 - 1))
        chosen = torch.randperm(blocks, generator=generator)[:count].to(device)
        places = (chosen[:, None] * block + torch.arange(block, device=device)).view(-1)
        return places[places < n]

    def start(self, c: Tensor, out: Tensor, label: str = "") -> Handle:
        """``out`` (n,) ← 1/D Σ_r C(c_r).

        Args:
            c: (n,) fp32; it becomes x + e and belongs to this object until commit or roll-back.
            out: fp32, no part of ``c``.
        """
        if not self.numel:
            return DONE
        places = self.places(c.device)
        self.draws += 1
        self.worker.add_to(c)
        values = c[places]
        c[places] = 0.0
        self.worker.prepare(c)
        handle = self.comm.all_reduce(values)

        def unpack() -> None:
            out.zero_()
            out[places] = (values / self.comm.size).to(out.dtype)

        return Then([handle], unpack)

    def sent_bytes(self) -> int:
        """That a rank sends to others for one mean, by a ring: 2·k·4·(D-1)/D."""
        k = self.places(torch.device("cpu")).numel() if self.numel else 0
        return 2 * 4 * k * (self.comm.size - 1) // self.comm.size

    def commit(self) -> None:
        """What was sent counts."""
        self.worker.commit()

    def roll_back(self) -> None:
        """What was sent does not count: the error is what it was; the next places are others."""
        self.worker.roll_back()
