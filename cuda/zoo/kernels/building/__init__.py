"""Compiling the native operations: on first use, ahead of time with ``zoo build``, or into a wheel.

Vocabulary. *Unit*: one source compiled with one set of flags into one object. Which there are follows from the folders:
of an operation, ``binding.cpp`` makes a unit for CPUs and, where there is a ``.cu``, one for CUDA; ``python.cpp`` makes
one of the module of classes; every other ``.cpp`` makes one for each instruction set. *Plan*: all units of a library
with the compiler, and a key over everything that decides what comes out: sources, flags, compiler, torch, architecture.
*Cache*: ``$ZOO_CACHE_DIR`` or ``~/.cache/zoo``; a finished library is at ``kernels/<key>/``. A library is built in a
folder beside it under a file lock and renamed into place, so ranks that start together build once, and whoever dies
while building blocks nobody.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zoo.kernels.building.ahead import build_ahead, built_ahead, name_ahead
from zoo.kernels.building.cache import build, cache_dir
from zoo.kernels.building.plan import PYTHON_MODULE, BuildError, Plan, cpu_plan, python_plan

if TYPE_CHECKING:
    from zoo.kernels.building.cuda import build_cuda, find_nvcc, parse_architectures, usage_of
    from zoo.kernels.building.cuda_library import build_cuda_library, cuda_plan
    from zoo.kernels.building.usage import Usage, readable

__all__ = [
    "PYTHON_MODULE", "BuildError", "Plan", "Usage", "build", "build_ahead", "build_cuda", "build_cuda_library",
    "built_ahead", "cache_dir", "cpu_plan", "cuda_plan", "find_nvcc", "name_ahead", "parse_architectures",
    "python_plan", "readable", "usage_of",
]  # fmt: skip

_OF_CUDA = {
    **dict.fromkeys(("build_cuda", "find_nvcc", "parse_architectures", "usage_of"), "cuda"),
    **dict.fromkeys(("build_cuda_library", "cuda_plan"), "cuda_library"),
    **dict.fromkeys(("Usage", "readable"), "usage"),
}


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: every program that computes on a CPU comes by here, and needs nothing of CUDA.
    if name not in _OF_CUDA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OF_CUDA[name]}"), name)
