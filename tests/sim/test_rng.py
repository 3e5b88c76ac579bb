"""Each rank has its own random numbers, and a pass reads only what has been drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo import sim
from zoo.sim.rng import RngStates

kept: dict[str, Any] = {}


def _restore_numpy() -> None:
    np.random.set_state(kept["numpy"])


def _restore_python() -> None:
    random.setstate(kept["python"])


CHANGES: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "python, bits": lambda: random.getrandbits(7),
    "python, normal": lambda: random.gauss(0.0, 1.0),
    "python, seed": lambda: random.seed(3),
    "python, as it was": _restore_python,
    "numpy": lambda: np.random.rand(),
    "numpy, normal": lambda: np.random.randn(),
    "numpy, binomial": lambda: np.random.binomial(50, 0.4),
    "numpy, permutation": lambda: np.random.permutation(5),
    "numpy, seed": lambda: np.random.seed(3),
    "numpy, as it was": _restore_numpy,
}


def states() -> tuple[Any, ...]:
    name, key, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), name, key.tolist(), rest


@examples(times=10)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=6))
def test_what_is_captured_is_what_is_there(changes: list[str]) -> None:
    """After any changes, states that were put back in the middle of two normal numbers among them."""
    caller = RngStates.capture()
    try:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        np.random.randn()
        random.gauss(0.0, 1.0)
        kept["numpy"], kept["python"] = np.random.get_state(), random.getstate()
        np.random.randn()
        random.gauss(0.0, 1.0)
        found = RngStates.capture()
        for name in changes:
            CHANGES[name]()
            before, found = found, RngStates.capture(found)
            wanted = states()
            before.install(found)
            found.install(before)
            assert states() == wanted
    finally:
        caller.install()


@pytest.mark.parametrize("name", ["numpy", "python"])
def test_a_state_that_is_put_back_between_two_normal_numbers_belongs_to_its_rank(name: str) -> None:
    """A state with a normal number left, and the one after that was taken, have the same bits of the generator."""
    draw: Callable[[], float] = np.random.randn if name == "numpy" else lambda: random.gauss(0.0, 1.0)
    read, put = (np.random.get_state, np.random.set_state) if name == "numpy" else (random.getstate, random.setstate)

    def fn(rank: int) -> tuple[float, float]:
        draw()
        state = read()
        first = draw()
        dist.barrier()
        if rank == 0:
            put(state)
        dist.barrier()
        return first, draw()

    (first, again), *others = sim.run(3, fn)
    assert again == first
    assert all(second != first for _, second in others)
    assert len(set(others)) == 1


def test_a_pass_reads_no_state_that_nobody_has_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def fn(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            read.clear()
        for _ in range(20):
            dist.barrier()
        if rank == 0:
            read.append("end")

    for module, name in ((random, "getstate"), (np.random, "get_state")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda f=original, n=name: (read.append(n), f())[1])
    sim.run(3, fn)
    assert read[: read.index("end")] == []
