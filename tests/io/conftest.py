"""A folder on a real file system, where direct transfers can be had; pytest's own may be memory."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    root = Path(__file__).parents[2] / "build"
    root.mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="io-", dir=root))
    yield path
    shutil.rmtree(path)
