"""A region of an NVMe file is not read or lent before what is written to it has arrived; the handle is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zoo import io
from zoo.shard.offload.scratch import NvmeFile
from zoo.shard.offload.tiers import OffloadError


class Pending:
    """A write that arrives when somebody waits for it, as late as a device may take."""

    def __init__(self, done: list[str], what: str, error: Exception | None = None) -> None:
        self._done, self._what, self._error, self.waited = done, what, error, False

    def wait(self) -> None:
        self.waited = True
        if self._error is not None:
            raise self._error
        self._done.append(self._what)

    def done(self) -> bool:
        return self.waited


class Handle:
    """Notes operations in the order in which they begin and arrive."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails: Exception | None = None
        self._real = io.Handle()

    def open(self, path: Path, mode: Any) -> Any:
        return self._real.open(path, mode)

    def async_pwrite(self, tensor: torch.Tensor, file: Any, offset: int, urgent: bool = False) -> Pending:
        return Pending(self.done, f"written at {offset}", self.fails)

    def async_pread(self, tensor: torch.Tensor, file: Any, offset: int, urgent: bool = False) -> Pending:
        self.done.append(f"read from {offset}")
        return Pending(self.done, f"arrived from {offset}")


def opened(tmp_path: Path) -> tuple[Handle, NvmeFile]:
    handle: Any = Handle()
    return handle, NvmeFile(handle, tmp_path, "states", [4096, 4096])


def test_a_read_waits_for_all_writes_to_its_region_and_for_no_other(tmp_path: Path) -> None:
    handle, file = opened(tmp_path)
    for offset in (0, 8):
        file.write(0, torch.zeros(2), offset)
    file.write(1, torch.zeros(2))
    file.read(0, torch.empty(2))
    assert handle.done == ["written at 0", "written at 8", "read from 0"]
    file.read(0, torch.empty(2))  # nothing is left to wait for
    assert handle.done[3:] == ["read from 0"]
    file.close()


def test_what_is_lent_has_arrived(tmp_path: Path) -> None:
    handle, file = opened(tmp_path)
    file.write(1, torch.zeros(2))
    lease = file.lend(1)
    assert handle.done == ["written at 4096"]
    lease.read(torch.empty(8, dtype=torch.uint8), 0)
    assert handle.done[1:] == ["read from 4096", "arrived from 4096"]
    lease.release()
    file.close()


def test_a_write_that_failed_is_told_to_whoever_reads(tmp_path: Path) -> None:
    handle, file = opened(tmp_path)
    handle.fails = OSError(5, "Input/output error")
    file.write(0, torch.zeros(2))
    for use in (lambda: file.read(0, torch.empty(2)), lambda: file.lend(0)):
        with pytest.raises(OffloadError, match="offloaded state was lost: states in"):
            use()
    assert handle.done == []
    file.close()
