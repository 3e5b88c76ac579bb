"""zoo.io's sessions: the only file here that knows its interface."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from benchmarks.io.contenders import DIRECT, ON_DEVICE, Contender, ordinary
from benchmarks.io.files import fsync
from benchmarks.io.points import Point


class ZooSession:
    """A `zoo.io.Handle`; "pool" memory is its own, anything else is torch's."""

    def __init__(self, point: Point, *, pool: bool, backend: str = "auto", checksum: bool = False) -> None:
        try:
            import zoo.io
        except ImportError as error:
            raise ImportError("zoo.io cannot be imported: `make setup` builds its Rust extension") from error
        if not hasattr(zoo.io, "Handle"):
            raise ImportError("zoo.io has no Handle in this checkout: there is no engine yet")
        self.handle = zoo.io.Handle(
            block_size=point.block_size,
            queue_depth=point.queue_depth,
            num_threads=point.num_threads,
            backend=backend,
            direct="auto",
        )
        self.pool = pool
        self.options: dict[str, Any] = {"checksum": True} if checksum else {}

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """From the handle's pool, or as torch allocates it."""
        if not self.pool:
            return ordinary(num_bytes)
        tensor: torch.Tensor = self.handle.empty((num_bytes,), dtype=torch.uint8)
        return tensor

    def write(self, tensor: torch.Tensor, path: Path, *, new: bool) -> None:
        """``pwrite``."""
        self.handle.pwrite(tensor, str(path), offset=0, **self.options)
        if new:
            fsync(path)

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        """``pread``."""
        self.handle.pread(tensor, str(path), offset=0, **self.options)
        return tensor

    def submit(self, op: str, tensor: torch.Tensor, path: Path, offset: int) -> Any:
        """``async_pread`` and ``async_pwrite``: a future."""
        start = self.handle.async_pread if op == "read" else self.handle.async_pwrite
        return start(tensor, str(path), offset=offset, **self.options)

    def finish(self, tokens: deque[Any]) -> None:
        """Wait for the oldest future."""
        tokens.popleft().wait()

    def close(self) -> None:
        """Leave the handle."""
        self.handle.__exit__(None, None, None)


def _zoo(
    label: str, *, pool: bool, follows: str | None = None, asynchronous: bool = False, **options: Any
) -> Contender:
    return Contender(
        label=label, open=lambda point: ZooSession(point, pool=pool, **options), page_cache=DIRECT, durable=ON_DEVICE,
        buffer="zoo.io.Handle.empty of the whole size" if pool else "torch.empty",
        varies=None if follows else ("num_threads",), follows=follows, asynchronous=asynchronous,
        needs="zoo.io",
    )  # fmt: skip


ZOO: dict[str, Contender] = {
    "zoo-pool": _zoo("zoo, pool buffer", pool=True, asynchronous=True),
    "zoo": _zoo("zoo, tensor", pool=False, asynchronous=True),
    "zoo-pool-crc": _zoo("zoo, pool buffer, checksum", pool=True, follows="zoo-pool", checksum=True),
    "zoo-crc": _zoo("zoo, tensor, checksum", pool=False, follows="zoo", checksum=True),
    "zoo-threads": _zoo("zoo, tensor, threads backend", pool=False, backend="threads"),
}
