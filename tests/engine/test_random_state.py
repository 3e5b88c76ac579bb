"""Random numbers and buffers after a checkpoint are those that would have come."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.test_engine import stage, start

from zoo import sim
from zoo.engine.checkpoint.random_state import random_state, set_random_state


def drawn() -> list[float]:
    found = [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    ]
    return [*found, random.gauss(0, 1), float(np.random.randn())]  # each second normal number is kept from the first


def test_all_generators_go_on() -> None:
    kept = random_state()
    try:
        for _ in range(3):
            drawn()
            state = random_state()
            expected = drawn()
            random.seed(1)
            np.random.seed(2)
            torch.manual_seed(3)
            set_random_state(state)
            assert drawn() == expected
            random.gauss(0, 1)  # and with a normal number that waits
            np.random.randn()
            state = random_state()
            expected = drawn()
            drawn()
            set_random_state(state)
            assert drawn() == expected
    finally:
        set_random_state(kept)


@pytest.mark.parametrize("number", [0, 3])
def test_each_rank_has_its_own_buffers_again(number: int, tmp_path: Path) -> None:
    def started() -> Any:
        engine = start(stage(number), noise=0.1)
        engine.module.register_buffer("table", torch.zeros(2, 3))
        engine.module.register_buffer("number", torch.tensor(0))
        return engine

    def job(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        engine = started()
        for _ in range(2):
            engine.train_batch()
        engine.module.table += rank
        engine.module.number += rank
        engine.save_checkpoint(tmp_path)
        again = started()
        again.load_checkpoint(tmp_path)
        assert again.module.table.tolist() == [[rank] * 3] * 2
        assert int(again.module.number) == rank
        return engine.module.norm.running_mean.clone(), again.module.norm.running_mean.clone(), torch.tensor(rank)

    (first, one, _), (second, other, _) = sim.run(2, job)
    assert torch.equal(first, one)
    assert torch.equal(second, other)
    assert not torch.equal(first, second)  # otherwise nothing is shown

    def alone() -> torch.Tensor:
        engine = started()
        engine.load_checkpoint(tmp_path)
        return engine.module.norm.running_mean

    assert torch.equal(alone(), first)
