"""The CPU library inside a wheel, for who has no compiler."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

from zoo.kernels.building.cache import build
from zoo.kernels.building.plan import PYTHON_MODULE, SOURCES, cpu_plan, digest_of, python_plan, source_files

FOLDER = SOURCES / "ahead"
"""Where wheels with kernels have their libraries; several may lie there, for several versions of torch."""


def name_ahead(*, python: bool = False) -> str:
    """The file name of a library that fits these sources, this torch and this kind of processor.

    ``python``: of the module of classes, which has to fit this version of Python too.

    torch promises no binary interface in C++, so its version must be the same, to the last number; what is behind a
    ``+`` (CPU or which CUDA) changes nothing on the CPU.
    """
    import torch

    # The flags are in plan.py.
    sources = digest_of((), [*source_files(".h", ".cpp"), SOURCES / "building/plan.py"])
    version = torch.__version__.partition("+")[0]
    what = f"{PYTHON_MODULE}-{sys.implementation.cache_tag}" if python else "zoo_kernels_cpu"
    return f"{what}-torch{version}-{platform.machine()}-{sources}.so"


def built_ahead(*, python: bool = False) -> Path | None:
    """The library that came with the package and fits, if there is one; ``python``: the module of classes."""
    if not FOLDER.exists():
        return None  # the name is made of all sources, which takes longer than to look
    path = FOLDER / name_ahead(python=python)
    return path if path.exists() else None


def build_ahead(folder: Path, *, python: bool = False) -> Path:
    """Compile the library (or take it from the cache) and lay a copy into ``folder``, ready for a wheel.

    Args:
        python: the module of classes, for this version of Python, in the place of the library.

    Raises:
        BuildError: it cannot be compiled here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = python_plan() if python else cpu_plan()
    return Path(shutil.copy(build(plan), folder / name_ahead(python=python)))
