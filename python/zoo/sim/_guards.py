"""The few internal names of torch that the simulator stands on, each with a clear error where a torch lacks it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["graph_task_running", "internal", "outlive_ranks", "quiet"]

_GUARD_OF_ITS_THREAD = torch.torch_version.TorchVersion(torch.__version__) < "2.15"


def internal(module: Any, name: str) -> Any:
    """``module.name``, or an error that says which internal name this torch does not have."""
    try:
        return getattr(module, name)
    except AttributeError:
        raise NotImplementedError(
            f"zoo.sim needs {getattr(module, '__name__', module)}.{name}, which torch {torch.__version__} does not "
            "have; zoo.sim is meant for torch 2.11 and newer: use one of those, or change what "
            "calls zoo/sim/_guards.py"
        ) from None


def graph_task_running() -> bool:
    """Whether this thread is inside ``backward``."""
    current: Callable[[], int] = internal(torch._C, "_current_graph_task_id")
    return current() != -1


def outlive_ranks() -> None:
    """Let the calling thread own what torch keeps of the first thread that asks for it.

    Where there is no GPU, the first FakeTensorMode (DTensors make them) puts a stand-in for the CUDA device guard in
    place. In torch 2.11 that is gone with its thread, and the next mode in another thread crashes; 2.15 is well.
    """
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if _GUARD_OF_ITS_THREAD and make is not None and not torch.cuda.is_available():
        make()


@contextlib.contextmanager
def _disabled() -> Any:
    from torch.utils import _python_dispatch

    with internal(_python_dispatch, "_disable_current_modes")():
        yield


def quiet() -> contextlib.AbstractContextManager[Any]:
    """A context in which no dispatch mode of the current thread sees the simulator's own tensor work."""
    if internal(torch._C, "_len_torch_dispatch_stack")() > 0:
        return _disabled()
    return contextlib.nullcontext()
