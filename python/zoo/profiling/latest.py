"""What the latest profile says of one module, asked by the module itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import nn

if TYPE_CHECKING:
    from zoo.profiling.profile import ModuleProfile
    from zoo.profiling.profiler import FlopsProfiler

__all__ = ["get_module_duration", "get_module_flops", "get_module_macs", "note", "profile_of"]

_profilers: WeakKeyDictionary[nn.Module, ref[FlopsProfiler]] = WeakKeyDictionary()


def note(profiler: FlopsProfiler) -> None:
    """``profiler`` has begun with its model."""
    for module in profiler.model.modules():
        _profilers[module] = ref(profiler)


def profile_of(module: nn.Module) -> ModuleProfile:
    """Of the latest profile in which ``module`` was, or is.

    Raises:
        ValueError: it was in none, or the profiler is gone.
    """
    found = _profilers.get(module)
    profiler = None if found is None else found()
    if profiler is None:
        raise ValueError(
            f"no profile of this {type(module).__name__}: call start_profile() of a profiler of its model."
        )
    path = next(path for path, one in profiler.model.named_modules() if one is module)
    return profiler.profile.module(path)


def get_module_flops(module: nn.Module) -> int:
    """FLOPs of its forward, and of the modules in it."""
    return profile_of(module).forward.flops


def get_module_macs(module: nn.Module) -> int:
    """Multiply-accumulates of its forward, and of the modules in it."""
    return profile_of(module).forward.macs


def get_module_duration(module: nn.Module) -> Any:
    """Seconds of its forward; None where nothing was computed."""
    return profile_of(module).seconds
