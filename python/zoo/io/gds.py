"""GPUDirect Storage: tensors of a GPU travel between it and the device, without host memory in between."""

from __future__ import annotations

from typing import Any

import torch

from zoo.io import _native
from zoo.io.errors import UnavailableError
from zoo.io.notices import once


def engine_of(**settings: Any) -> _native.Engine | None:
    """An engine for tensors of GPUs; None, which is said once, where cuFile or a CUDA runtime is missing or refuses."""
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
