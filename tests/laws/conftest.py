"""Under which semantics and over which transport the laws hold: under all of them.

Ordinarily each test has one of them drawn by its name: every law is tried under one, and the folder under all.
``ZOO_LAWS=nccl`` (or one of the other names) runs the whole folder under one: `make laws` does it for each.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

from zoo import sim

WORLDS = {
    "gloo": {"semantics": "gloo", "transport": "native"},
    "pairwise": {"semantics": "gloo", "transport": "pairwise"},
    "shared": {"semantics": "gloo", "transport": "shared"},
    "nccl": {"semantics": "nccl", "transport": "native"},
}


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of what simulated ranks imitate in this test; runs that choose for themselves are not touched."""
    drawn = sorted(WORLDS)[zlib.crc32(request.node.nodeid.encode()) % len(WORLDS)]
    name = os.environ.get("ZOO_LAWS") or drawn
    if name not in WORLDS:
        raise ValueError(f"ZOO_LAWS={name}; allowed are {', '.join(WORLDS)}, or nothing for one drawn for each test.")
    with sim.defaults(**WORLDS[name]):
        yield name


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of laws are small: segments are cut all the same, in the middle of parameters."""
    monkeypatch.setattr("zoo.zero.update.segments.CACHED_BYTES", 96)
