"""Files that many operations use, and files that share one sequence of bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from zoo.io import _native
from zoo.io.checks import whole_number
from zoo.io.notices import once

DirectMode = Literal["auto", "always", "never"]
FilePath = str | os.PathLike[str]
DEFAULT_STRIPE_BYTES = 1 << 20
ONE_FILE = (1 << 64) - 1
"""Stripe size of a single file."""


class File:
    """An open file, for many operations on the same one: opened once, and registered with the kernel.

    Make one with `Handle.open`. ``mode`` is ``"r"`` or ``"w"``; writing creates the file and truncates nothing.
    """

    def __init__(
        self,
        path: FilePath,
        mode: Literal["r", "w"],
        *,
        direct: DirectMode = "auto",
        kept: bool = True,
        engine: _native.Engine | None = None,
    ) -> None:
        if mode not in ("r", "w"):
            raise ValueError(f'mode = {mode!r}; allowed are "r" and "w"')
        self.path = os.fspath(path)
        self.mode = mode
        if not isinstance(self.path, str):
            raise TypeError(f"the path is {type(self.path).__name__}; allowed is str or a path of str")
        self._engine = engine
        self.native = _native.File(Path(self.path), mode == "w", direct, kept)
        if self.native.why_buffered is not None:
            once(
                f"transfers of files in {Path(self.path).parent} go through the page cache: {self.native.why_buffered}"
            )

    @property
    def alignment(self) -> tuple[int, int] | None:
        """Bytes that memory and offsets must be multiples of to go past the page cache; None when nothing does."""
        return self.native.alignment

    def size(self) -> int:
        """Size in bytes, now."""
        return self.native.size()

    def close(self) -> None:
        """Close it as soon as no operation uses it."""
        self.native.close()
        if self._engine is not None:
            # An idle ring would keep the file, and a deleted file's space, until it is used again.
            self._engine.rouse()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and hasattr(self, "native"):
            self.close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.native.closed else f"mode={self.mode!r}"
        return f"File({self.path!r}, {state})"


class Striped:
    """Several files, best one a device, that hold one sequence of bytes in turns (RAID 0).

    Stripe ``k`` of ``stripe_bytes`` bytes is stripe ``k // n`` of file ``k % n``.

    Args:
        paths: one path or `File` a device, always in the same order.
        stripe_bytes: a multiple of 4096.
    """

    def __init__(self, paths: Sequence[FilePath | File], *, stripe_bytes: int = DEFAULT_STRIPE_BYTES) -> None:
        if isinstance(paths, str | bytes) or not paths:
            raise ValueError(f"paths = {paths!r}; give a list of one path or more")
        whole_number("stripe_bytes", stripe_bytes, 4096, 1 << 62, multiple=4096)
        self.paths = tuple(paths)
        self.stripe_bytes = stripe_bytes

    def share(self, num_bytes: int, index: int) -> int:
        """Bytes of the first ``num_bytes`` ones that lie in file ``index``."""
        row, within = divmod(num_bytes, self.stripe_bytes)
        whole, over = divmod(row, len(self.paths))
        return (whole + (index < over)) * self.stripe_bytes + (within if over == index else 0)

    def __repr__(self) -> str:
        return f"Striped({list(self.paths)!r}, stripe_bytes={self.stripe_bytes})"


Target = FilePath | File | Striped
"""Where bytes go: a path, an open file, or several that are striped."""


def open_target(target: Target, mode: Literal["r", "w"], direct: DirectMode) -> tuple[list[_native.File], int]:
    """The files of a target, opened where they are not yet, and the stripe size."""
    if isinstance(target, Striped):
        return [_one(path, mode, direct) for path in target.paths], target.stripe_bytes
    return [_one(target, mode, direct)], ONE_FILE


def _one(path: FilePath | File, mode: Literal["r", "w"], direct: DirectMode) -> _native.File:
    return path.native if isinstance(path, File) else File(path, mode, direct=direct, kept=False).native
