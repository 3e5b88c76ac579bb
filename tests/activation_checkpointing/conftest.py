"""Each test begins unconfigured, with a tracker of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zoo.activation_checkpointing import get_cuda_rng_tracker
from zoo.activation_checkpointing.state import State, entered


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    with entered(State()):
        get_cuda_rng_tracker().device = "cpu"
        yield
