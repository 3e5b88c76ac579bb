"""A sum over ranks has the same bits on all of them: what is computed from it alike stays alike, as a router is."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.processes import run_ranks

from zoo import sim
from zoo.comm import Communicator


def summed(
    rank: int, numel: int, dtype: torch.dtype, op: str = "sum", comm: Communicator | None = None
) -> torch.Tensor:  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    mine = (torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** (3 * (rank % 3))).to(dtype)
    (comm or Communicator()).all_reduce(mine, op).wait()
    return mine


@given(
    world=st.integers(2, 5), numel=st.integers(1, 100), op=st.sampled_from(["sum", "max"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)  # fmt: skip
@example(world=3, numel=1000, op="sum", dtype=torch.bfloat16)
def test_on_simulated_ranks(world: int, numel: int, op: str, dtype: torch.dtype) -> None:
    found = sim.run(world, lambda rank: summed(rank, numel, dtype, op), seed=0)
    assert all(torch.equal(found[0], other) for other in found)


def of_rank(rank: int) -> list[bytes]:
    comm, shared = Communicator(), Communicator()
    assert shared.share_memory()
    found = []
    for numel in (1, 7, 5000, 300_001):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            found += [summed(rank, numel, dtype, comm=comm), summed(rank, numel, dtype, comm=shared)]
    return [hashlib.blake2b(tensor.view(torch.uint8).numpy()).digest() for tensor in found]


@pytest.mark.slow
def test_over_gloo() -> None:
    first, *others = run_ranks(3, of_rank).values()
    assert others == [first] * 2
