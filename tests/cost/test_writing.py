"""A file that takes the place of another one is there whole, whenever the process ends."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from zoo.cost import read_hardware, simulate_events
from zoo.cost.drawing import draw
from zoo.cost.events import Compute
from zoo.cost.writing import write_whole
from zoo.profiling.profile import written

WRITERS: dict[str, Callable[[Path], None]] = {
    "text": lambda path: write_whole(path, "new"),
    "hardware": lambda path: read_hardware("h100").write(path),
    "timeline": lambda path: draw(simulate_events([[Compute(1.0, "a")]], lambda start: 0.0), path),
    "profile": lambda path: written(path, "new"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_was_there_stays_until_all_is_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path = tmp_path / "found.svg"
    path.write_text("old")
    path.chmod(0o640)

    def full(*of: object) -> None:
        assert path.read_text() == "old"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            WRITERS[kind](path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["found.svg"]
    WRITERS[kind](path)
    assert path.read_text() != "old"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    link, target, pipe = (tmp_path / name for name in ("link", "target", "pipe"))
    link.symlink_to(target)
    write_whole(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "text")
    reader.join(10)
    assert got == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
