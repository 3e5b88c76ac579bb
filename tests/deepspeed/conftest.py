"""For all tests of zoo.deepspeed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zoo.deepspeed.adapters.communication import groups


@pytest.fixture(autouse=True)
def _no_mpu_of_another_test() -> Iterator[None]:
    """``initialize(mpu=...)`` sets it for the process, as in DeepSpeed."""
    yield
    vars(groups).pop("mpu", None)
