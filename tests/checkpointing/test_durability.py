"""The order of writes that makes a loss of power harmless, checked against what the kernel was asked for.

A test that stops the process cannot see a missing fsync: the bytes are in the page cache all the same. So every call
that changes the disk is recorded, and a model of a disk without mercy replays them: of a file only what was fsynced
survives, of a directory only the entries that were there when it was fsynced. A crash may come after any call. At each
of these points the last checkpoint that save() returned must be whole, whatever became of the changes of directories
that were not forced: all lost ("kept": only what was kept), all on the disk already ("now": a name may get there before
the bytes), or, because a disk may choose its order, the last one of each directory alone ("last").
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.test_checkpoints import check_values, pieces

from zoo.checkpointing import TensorFile, load, save
from zoo.checkpointing.disk import write_text


@dataclass(frozen=True)
class Event:
    """One call. ``content``: of a file, or the sorted names in a directory, at the moment of an fsync."""

    call: str
    path: Path
    to: Path | None = None
    content: bytes | tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.call} {self.path.name}" + (f" -> {self.to.name}" if self.to else "")


@contextmanager
def recorded(patch: pytest.MonkeyPatch, root: Path) -> Iterator[list[Event]]:
    """What happens under ``root``, call by call."""
    events: list[Event] = []
    real_fsync, real_open = os.fsync, builtins.open

    def note(call: str, path: Any, to: Any = None, content: bytes | tuple[str, ...] | None = None) -> None:
        place = Path(path)
        if place == root or root in place.parents:
            events.append(Event(call, place, Path(to) if to is not None else None, content))

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        real_fsync(handle)
        note("fsync", path, content=tuple(sorted(os.listdir(path))) if path.is_dir() else path.read_bytes())

    def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = real_open(path, mode, *args, **options)
        if "w" in mode:
            note("create", path)
        return file

    def moving(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def move(source: Any, target: Any) -> None:
            real(source, target)
            note("rename", source, target)

        return move

    def rmtree(path: Any, **options: Any) -> None:
        there = Path(path).exists()
        real_rmtree(path, **options)
        if there:
            note("rmtree", path)

    def mkdir(self: Path, *args: Any, **options: Any) -> None:
        there = self.exists()
        real_mkdir(self, *args, **options)
        if not there:
            note("mkdir", self)

    real_rmtree, real_mkdir = shutil.rmtree, Path.mkdir
    with patch.context() as inside:
        inside.setattr(os, "fsync", fsync)
        inside.setattr(builtins, "open", opened)
        inside.setattr(io, "open", opened)
        inside.setattr(os, "rename", moving("rename"))
        inside.setattr(os, "replace", moving("replace"))
        inside.setattr(shutil, "rmtree", rmtree)
        inside.setattr(Path, "mkdir", mkdir)
        yield events


class Node:
    """A file or a directory of the model. ``kept``: what of it survives; ``now``: what a running system sees."""

    def __init__(self, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.now: dict[str, Node] = {}
        self.kept: dict[str, Node] = {}
        self.last: dict[str, Node] = {}
        self.content: bytes | None = None  # forced to the disk; None: nothing was


class Disk:
    """What is left after a loss of power when only what was forced is."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Node(True)

    def at(self, path: Path) -> Node:
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node.now[part]
        return node

    def apply(self, event: Event) -> None:
        if event.path == self.root and event.call != "fsync":
            return
        if event.call == "fsync":
            node = self.at(event.path)
            if node.is_directory:
                node.kept, node.last = dict(node.now), dict(node.now)
            elif isinstance(event.content, bytes):
                node.content = event.content
            return
        parent, name = self.at(event.path.parent), event.path.name
        parent.last = dict(parent.kept)
        if event.call == "create":
            parent.now[name] = parent.last[name] = Node(False)
        elif event.call == "mkdir":
            parent.now[name] = parent.last[name] = Node(True)
        elif event.call == "rmtree":
            parent.now.pop(name)
            parent.last.pop(name, None)
        elif event.to is not None:  # all of them within a directory
            parent.now[event.to.name] = parent.last[event.to.name] = parent.now.pop(name)
            parent.last.pop(name, None)

    def write(self, target: Path, entries: str) -> None:
        """The disk as files. ``entries`` of directories: "kept", "now" or "last"."""

        def put(node: Node, path: Path) -> None:
            if not node.is_directory:
                path.write_bytes(node.content or b"")  # a file whose bytes were not forced is there, and empty
                return
            path.mkdir()
            for name, child in getattr(node, entries).items():
                put(child, path / name)

        put(self.top, target)


def replay(events: list[Event], root: Path, scratch: Path, entries: str) -> Iterator[tuple[int, Path]]:
    """After each call: its number, and a directory with what a loss of power would leave."""
    disk = Disk(root)
    for count, event in enumerate(events):
        disk.apply(event)
        place = scratch / f"{entries}{count}"
        disk.write(place, entries)
        yield count, place


@pytest.mark.parametrize("second", ["two", "one"])
@pytest.mark.parametrize("entries", ["kept", "now", "last"])
def test_a_loss_of_power_after_any_call_leaves_the_last_checkpoint_that_was_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, entries: str
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    with recorded(monkeypatch, root) as events:
        save(root, "one", pieces(0, 1))
        first_returned = len(events)
        save(root, second, pieces(0, 1, scale=2.0))
    assert len(events) > 2 * 6, list(map(str, events))
    seen = []
    for count, place in replay(events, root, tmp_path, entries):
        if count < first_returned - 1:
            continue
        try:
            scale = float(load(place).tensor("a")[0, 1])
            check_values(place, scale)
        except ValueError as error:
            raise AssertionError(f"after {events[count]} ({entries}): {error}") from error
        seen.append(scale)
    assert seen[0] == 1.0
    assert seen[-1] == 2.0
    assert seen == sorted(seen)


@pytest.mark.parametrize("entries", ["kept", "now", "last"])
def test_the_first_checkpoint_of_a_directory_is_there_when_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: str
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    with recorded(monkeypatch, root) as events:
        save(root / "a" / "b", "one", pieces(0, 1))
    for _, place in replay(events, root, tmp_path, entries):
        if (place / "a/b/latest").exists():
            check_values(place / "a" / "b")
    check_values(place / "a" / "b")


@pytest.mark.parametrize("entries", ["kept", "now", "last"])
def test_a_file_of_weights_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: str
) -> None:
    from safetensors.torch import load_file

    root = tmp_path / "runs"
    root.mkdir()
    returned: list[int] = []
    with recorded(monkeypatch, root) as events:
        for value in (1.0, 2.0):
            with TensorFile(root / "m.safetensors", {"a": (torch.float32, (3,))}, {}) as file:
                file.put("a", torch.full((3,), value))
                file.commit()
            returned.append(len(events))
    found = []
    for count, place in replay(events, root, tmp_path, entries):
        if count >= returned[0] - 1:
            found.append(float(load_file(place / "m.safetensors")["a"][0]))
    assert found[0] == 1.0
    assert found[-1] == 2.0


@pytest.mark.parametrize("entries", ["kept", "now", "last"])
def test_a_replaced_text_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: str
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    with recorded(monkeypatch, root) as events:
        write_text(root / "latest", "old")
        first = len(events)
        write_text(root / "latest", "new")
    texts = [(place / "latest").read_text() for c, place in replay(events, root, tmp_path, entries) if c >= first - 1]
    assert texts[0] == "old"
    assert texts[-1] == "new"
    assert set(texts) == {"old", "new"}
