"""GPUDirect Storage: tensors of a GPU travel between it and the device, without host memory in between."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zoo.io import _native
from zoo.io.errors import UnavailableError
from zoo.io.notices import once

_SETTINGS = Path("/etc/cufile.json")
_LOG, _OTHER_SETTINGS = "CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON"


def _keep_log_out() -> None:
    """cuFile makes a file ``cufile.log`` in the current folder, unless its settings name a folder for it or the
    environment a file; an empty name is none (README of the library, and what NVIDIA's own tests set)."""
    if _LOG in os.environ or _OTHER_SETTINGS in os.environ:
        return
    with suppress(OSError):  # no settings
        if any(line.strip().startswith('"dir"') for line in _SETTINGS.read_text(errors="replace").splitlines()):
            return
    os.environ[_LOG] = ""


def engine_of(**settings: Any) -> _native.Engine | None:
    """An engine for tensors of GPUs; None, which is said once, where cuFile or a CUDA runtime is missing or refuses."""
    _keep_log_out()
    try:
        return _native.Engine(backend="gds", **settings)
    except UnavailableError as error:
        once(f"{error}: tensors of a GPU travel through page-locked host memory")
        return None


def use_of(tensor: torch.Tensor) -> tuple[tuple[int, int], Any]:
    """The GPU and the event that it passes before the tensor may be used, for the engine; and what keeps the event."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return (tensor.device.index or 0, event.cuda_event), event


class Registration:
    """Memory of a GPU that cuFile knows: transfers within it need no memory of cuFile's in between.

    It is kept until this is closed and no operation uses it any more.
    """

    def __init__(self, native: _native.Registration) -> None:
        self._native = native

    def close(self) -> None:
        """Forget it as soon as no operation uses it. A second time has no effect."""
        self._native.close()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
