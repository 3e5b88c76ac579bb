"""What tests of GPUDirect Storage need where there is none: a stand-in for cuFile (cufile.c), and tensors that say
where they are."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def build(folder: Path) -> Path:
    """The stand-in, compiled."""
    made = folder / "libcufile_stub.so"
    source = Path(__file__).with_name("cufile.c")
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(made), str(source), "-lpthread"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    assert done.returncode == 0, done.stderr
    return made


class Stub:
    """The stand-in of this process."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.stub_count.restype = ctypes.c_long

    def set(self, **settings: int) -> None:
        """What it does from now on; see cufile.c."""
        for name, value in settings.items():
            self._library.stub_set(name.encode(), ctypes.c_long(value))

    def count(self, name: str) -> int:
        """What it was asked for; see cufile.c."""
        return int(self._library.stub_count(name.encode()))

    def comes_to(self, name: str, count: int) -> bool:
        """Whether it was asked so often, soon: a worker may have an operation in its hand that is over for others."""
        end = time.monotonic() + 20
        while self.count(name) != count and time.monotonic() < end:
            time.sleep(0.001)
        return self.count(name) == count

    def use_device(self, number: int) -> None:
        """This thread's GPU from now on."""
        assert self._library.cudaSetDevice(number) == 0

    def device(self) -> int:
        """This thread's GPU."""
        found = ctypes.c_int(-1)
        assert self._library.cudaGetDevice(ctypes.byref(found)) == 0
        return found.value

    def reset(self) -> None:
        """As it was at first."""
        self._library.stub_reset()


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and so do its views; its memory is the host's, which the stand-in reaches."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 2)


def gpu(tensor: torch.Tensor) -> Any:
    """The same memory, on a GPU."""
    return tensor.as_subclass(OnGpu)


@contextlib.contextmanager
def stand_in(library: Path) -> Iterator[Stub]:
    """zoo.io finds the stand-in; at the end nothing may be open, and nothing have been used against its rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CUFILE", str(library))
        patch.setenv("ZOO_CUDART", str(library))
        patch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
        patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(cuda_event=77, record=lambda stream: None))
        gc.collect()
        made = Stub(library)
        made.reset()
        yield made
        gc.collect()
        pairs = [("opened", "closed"), ("files", "files forgotten"), ("memories", "memories forgotten")]
        assert [(made.count(a), a) for a, b in pairs if not made.comes_to(b, made.count(a))] == []
        assert made.count("faults") == 0


def environment(library: Path) -> dict[str, str]:
    """Of a process that finds it."""
    return {**os.environ, "ZOO_CUFILE": str(library), "ZOO_CUDART": str(library)}
