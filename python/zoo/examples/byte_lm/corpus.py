"""The text: where it comes from, and which parts of it are held out."""

from __future__ import annotations

import hashlib
import itertools
import platform
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

# Not source text of the library itself: tests, generated tables, vendored wheels, and what some builds leave out.
_SKIP_DIRS = frozenset(
    {
        "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3",
        "distutils",
        "encodings", "ensurepip", "pydoc_data", "tkinter", "turtledemo", "lib-dynload", "msilib",
    }
)  # fmt: skip
_SKIP_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Corpus:
    """A text in bytes and its division.

    The text is cut into ``num_segments`` equal segments; the last ``held_out`` part of each is validation text, the
    rest is training text. Windows never cross a boundary, so no validation byte is ever seen in training.

    Attributes:
        data: (N,) uint8.
        source: what the text is, in words.
        num_files: how many files it was read from.
    """

    data: torch.Tensor
    source: str
    num_files: int = 1
    num_segments: int = 32
    held_out: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 < self.held_out < 1.0 or self.num_segments < 1:
            raise ValueError(
                f"a corpus got held_out={self.held_out} and num_segments={self.num_segments}; the held-out part lies "
                "between 0 and 1 and there is at least one segment."
            )
        if self.data.numel() < 2 * self.num_segments:
            raise ValueError(
                f"{self.source} has {self.data.numel()} bytes, too few for {self.num_segments} segments; give a longer "
                "text or fewer segments."
            )

    @cached_property
    def sha256(self) -> str:
        """Of all bytes, in order; differs between Python versions where the text is the standard library's."""
        return hashlib.sha256(self.data.numpy().tobytes()).hexdigest()

    def _segments(self) -> list[tuple[int, int, int]]:
        size, count = self.data.numel(), self.num_segments
        edges = [size * i // count for i in range(count + 1)]
        return [(a, b - max(1, int((b - a) * self.held_out)), b) for a, b in itertools.pairwise(edges)]

    def training_ranges(self) -> list[tuple[int, int]]:
        """[start, stop) of every piece of training text."""
        return [(start, cut) for start, cut, _ in self._segments()]

    def validation_ranges(self) -> list[tuple[int, int]]:
        """[start, stop) of every piece of held-out text."""
        return [(cut, stop) for _, cut, stop in self._segments()]

    def describe(self) -> str:
        """One line: files, bytes, checksum."""
        held = sum(b - a for a, b in self.validation_ranges())
        return (
            f"{self.source}: {self.num_files} files, {self.data.numel():,} bytes ({held:,} held out), "
            f"sha256 {self.sha256}"
        )


def standard_library_text(*, held_out: float = 0.05, num_segments: int = 32) -> Corpus:
    """The help topics of ``pydoc``, then the standard library's Python sources in the order of their paths.

    Deterministic for one Python release; other releases have other text.
    """
    from pydoc_data.topics import topics  # in every CPython, and 700 kB: read only when asked for

    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py") if _wanted(path, root))
    texts = [topics[name].encode() for name in sorted(topics)]
    texts += [(root / name).read_bytes() for name in files]
    source = f"help topics and standard library sources of Python {platform.python_version()}"
    return _corpus(b"\n".join(texts), source, len(files), held_out, num_segments)


def file_text(path: str | Path, *, held_out: float = 0.05, num_segments: int = 32) -> Corpus:
    """One file of the user's own as a corpus."""
    found = Path(path)
    if not found.is_file():
        raise ValueError(f"the text file {str(path)!r} does not exist; give the path of a readable file.")
    return _corpus(found.read_bytes(), f"the file {found.name}", 1, held_out, num_segments)


def _wanted(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return not any(part in _SKIP_DIRS or part.startswith(_SKIP_PREFIXES) for part in parts)


def _corpus(text: bytes, source: str, num_files: int, held_out: float, num_segments: int) -> Corpus:
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    return Corpus(data, source, num_files, num_segments, held_out)
