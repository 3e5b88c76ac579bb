"""What is done once, before the first test of a pipeline."""

from __future__ import annotations

import pytest
import torch

from zoo.kernels import loading


@pytest.fixture(scope="session", autouse=True)
def _loaded() -> None:
    """Kernels are compiled and loaded out here, and what torch imports with its first optimizer (seconds): in a
    simulated rank that would count as computing, which has a limit of 120 s of real time, and on a busy machine they
    may take longer."""
    loading.native()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
