"""What tests of the kernels have at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from zoo.kernels import loading

UseMode = Callable[[str], None]


@pytest.fixture
def use_mode() -> Iterator[UseMode]:
    """``use_mode("reference")``: operations run in this mode until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda mode: stack.enter_context(loading.use_mode(mode))
