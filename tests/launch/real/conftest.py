"""The losses that every launcher's job has to give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.launch.real import jobs


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Kind → losses, of plain ``python`` on one rank."""
    here = jobs.place(tmp_path_factory.mktemp("alone"))
    told = {kind: jobs.found(here.run(sys.executable, str(jobs.PROGRAM), kind).stdout) for kind in jobs.KINDS}
    assert {world for world, *_ in told.values()} == {1}
    assert told["engine"] == pytest.approx(told["facade"], rel=1e-9)
    return {kind: losses for kind, (_, *losses) in told.items()}


@pytest.fixture
def here(tmp_path: Path) -> jobs.Place:
    """A folder to start from."""
    return jobs.place(tmp_path)
