"""A disk in memory that loses what was not forced, and a process that may die between any two calls.

Of a file survive the bytes that were forced, of a directory the entries that were there when it was forced. What became
of the rest is the disk's choice; three choices are looked at: all of it is lost ("kept"), all entries are there already
("now": a name may get there before the bytes), or the latest change of each directory alone is ("last"). Of bytes that
were not forced all are lost, or some sectors have arrived.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

ENTRIES = ("kept", "now", "last")
SECTOR = 512


class PowerLossError(BaseException):
    """Not an Exception: nothing may catch it, clean up and go on."""


@dataclass
class Node:
    """A file (``data``, and what of it was forced) or a directory (``now`` and what was forced of it)."""

    directory: bool
    data: bytearray = field(default_factory=bytearray)
    forced: bytes = b""
    now: dict[str, Node] = field(default_factory=dict)
    kept: dict[str, Node] = field(default_factory=dict)
    last: dict[str, Node] = field(default_factory=dict)


class ModelDisk:
    """A :class:`zoo.checkpointing.format.disk.Disk`.

    Args:
        crash_at: the number of the call at which power is lost, before it takes effect. fail_at: (number, errno) of a
            call that fails. mute: kinds of calls that do nothing, to see that tests notice: "sync", "sync_directory".
        capacity: bytes; more is ENOSPC.
    """

    def __init__(
        self, *, crash_at: int | None = None, fail_at: tuple[int, int] | None = None,
        mute: frozenset[str] = frozenset(), capacity: int = 1 << 40,
    ) -> None:  # fmt: skip
        self.top = Node(True)
        self.crash_at, self.fail_at, self.mute, self.capacity = crash_at, fail_at, mute, capacity
        self.calls: list[str] = []

    # What a checkpoint asks ------------------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> bool:
        parent = self._directory(path.parent)
        if path.name in parent.now:
            return False
        self._call(f"mkdir {path.name}")
        if path.name in parent.now:  # another was here first
            return False
        self._change(parent, {path.name: Node(True)})
        return True

    def is_directory(self, path: Path) -> bool:
        try:
            return self._at(path).directory
        except OSError:
            return False

    def is_link(self, path: Path) -> bool:
        return False

    def names(self, path: Path) -> list[str]:
        return sorted(self._directory(path).now)

    def create(self, path: Path, num_bytes: int) -> ModelSink:
        self._call(f"create {path.name}")
        node = Node(False)
        self._change(self._directory(path.parent), {path.name: node})
        return ModelSink(self, node, path.name)

    def open(self, path: Path) -> ModelSource:
        node = self._at(path)
        if node.directory:
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        return ModelSource(node)

    def rename(self, path: Path, target: Path) -> None:
        self._call(f"rename {path.name} {target.name}")
        parent = self._directory(path.parent)
        node = self._at(path)
        self._change(parent, {target.name: node}, without=path.name)

    def link(self, path: Path, target: Path) -> bool:
        self._call(f"link {target.name}")
        self._change(self._directory(target.parent), {target.name: self._at(path)})
        return True

    def remove(self, path: Path) -> None:
        node, parent = self._at(path), self._directory(path.parent)
        if node.now:
            raise OSError(errno.ENOTEMPTY, "directory not empty", str(path))
        self._call(f"remove {path.name}")
        self._change(parent, {}, without=path.name)

    def modified_s(self, path: Path) -> float | None:
        return None

    def sync_directory(self, path: Path) -> None:
        self._call(f"sync_directory {path.name}")
        node = self._directory(path)
        if "sync_directory" not in self.mute:
            node.kept, node.last = dict(node.now), dict(node.now)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _call(self, what: str) -> None:
        number = len(self.calls)
        self.calls.append(what)
        if self.crash_at is not None and number >= self.crash_at:
            raise PowerLossError(what)
        if self.fail_at is not None and number == self.fail_at[0]:
            raise OSError(self.fail_at[1], os.strerror(self.fail_at[1]))

    def _change(self, parent: Node, made: dict[str, Node], without: str = "") -> None:
        parent.last = dict(parent.kept)
        for entries in (parent.now, parent.last):
            entries.pop(without, None)
            entries.update(made)

    def _at(self, path: Path) -> Node:
        node = self.top
        for part in path.parts[1:]:
            if part not in node.now:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            node = node.now[part]
        return node

    def _directory(self, path: Path) -> Node:
        node = self._at(path)
        if not node.directory:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
        return node

    def used(self) -> int:
        """Bytes of all files."""

        def of(node: Node) -> int:
            return len(node.data) + sum(map(of, node.now.values()))

        return of(self.top)

    def after_a_crash(self, entries: str, arrived: Callable[[], bool] = lambda: False) -> ModelDisk:
        """What a machine finds that is switched on again; ``arrived`` is asked for each sector that was not forced."""
        found = ModelDisk()

        def content(node: Node) -> bytes:
            out = bytearray(node.forced)
            for begin in range(0, len(node.data), SECTOR):
                end = min(begin + SECTOR, len(node.data))
                if node.forced[begin:end] != node.data[begin:end] and arrived():
                    out.extend(b"\0" * (end - len(out)))
                    out[begin:end] = node.data[begin:end]
            return bytes(out)

        def copy(node: Node) -> Node:
            raw = content(node)
            made = Node(node.directory, bytearray(raw), raw)
            made.now = {name: copy(child) for name, child in getattr(node, entries).items()}
            made.kept, made.last = dict(made.now), dict(made.now)
            return made

        found.top = copy(self.top)
        return found

    def files(self) -> Iterator[tuple[Path, Node]]:
        """All files."""

        def walk(path: Path, node: Node) -> Iterator[tuple[Path, Node]]:
            for name, child in sorted(node.now.items()):
                if child.directory:
                    yield from walk(path / name, child)
                else:
                    yield path / name, child

        return walk(Path("/"), self.top)


class ModelSink:
    def __init__(self, disk: ModelDisk, node: Node, name: str) -> None:
        self._disk, self._node, self._name = disk, node, name

    def write(self, memory: torch.Tensor, offset: int) -> Callable[[], None]:
        self._disk._call(f"write {self._name}")
        raw = memory.numpy().tobytes()
        grows = max(0, offset + len(raw) - len(self._node.data))
        if self._disk.used() + grows > self._disk.capacity:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._node.data.extend(b"\0" * grows)
        self._node.data[offset : offset + len(raw)] = raw
        return lambda: None

    def sync(self) -> None:
        self._disk._call(f"sync {self._name}")
        if "sync" not in self._disk.mute:
            self._node.forced = bytes(self._node.data)

    def close(self) -> None:
        """Nothing to close."""


class ModelSource:
    def __init__(self, node: Node) -> None:
        self._node = node

    def size(self) -> int:
        return len(self._node.data)

    def read(self, memory: torch.Tensor, offset: int) -> int:
        raw = self._node.data[offset : offset + memory.numel()]
        if raw:
            memory[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return len(raw)

    def begin(self, memory: torch.Tensor, offset: int) -> Callable[[], int]:
        return lambda: self.read(memory, offset)

    def close(self) -> None:
        """Nothing to close."""
