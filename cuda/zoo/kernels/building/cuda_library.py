"""The library of all operations on CUDA: the CUDA sources, and the bindings that make operators of torch of them.

It registers kernels for operators that the CPU library defines, so that one is loaded first.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zoo.kernels.building.cache import build, cache_dir
from zoo.kernels.building.cuda import FLAGS, build_cuda, cuda_sources, find_nvcc, run
from zoo.kernels.building.plan import (
    BuildError,
    Plan,
    Unit,
    binding_flags,
    compiler_version,
    find_compiler,
    keyed,
    source_files,
    torch_folder,
)

NAME = "zoo_kernels_cuda"


def cuda_plan(architectures: Sequence[int]) -> Plan:
    """The library of all operations for these GPUs; none of them has to be here.

    Raises:
        BuildError: there is no compiler, no nvcc or no torch for CUDA, or nvcc and torch differ in their CUDA version.
    """
    import torch

    compiler = find_compiler()
    nvcc, extra = find_nvcc()
    release = run([str(nvcc), "--version"])
    runtime = find_runtime(torch.version.cuda, release, nvcc)
    flags = (*binding_flags(), "-DZOO_CUDA=1", *(f"-isystem{path}" for path in include_folders(nvcc, extra)))
    bindings = sorted({path.parent / "binding.cpp" for path in cuda_sources()})
    units = [Unit(name=f"{path.parent.name}-binding", source=path, flags=flags) for path in bindings]
    # The runtime is the one that torch has loaded, found again by its soname: a process has one. -z defs: a symbol that
    # is nowhere is an error here, not in the middle of training.
    lib = torch_folder() / "lib"
    link = ("-shared", f"-L{lib}", "-lc10_cuda", "-ltorch_cpu", "-lc10", str(runtime), "-Wl,-z,now", "-Wl,-z,defs")
    facts = [compiler_version(compiler), torch.__version__, platform.machine(), release, *FLAGS]
    plan = keyed(NAME, compiler, units, link, facts, source_files(".h", ".cpp", ".cu", ".cuh"))
    numbers = ".".join(str(a) for a in sorted(set(architectures)))
    return replace(plan, key=f"{plan.key}-sm{numbers}", more_files=len(cuda_sources()))


def build_cuda_library(architectures: Sequence[int], *, quiet: bool = False) -> Path:
    """The library, compiled unless the cache has it: for these GPUs, or for these and more.

    Raises:
        BuildError: see :func:`cuda_plan`; or a compiler or the linker failed, with its words.
    """
    plan = cuda_plan(architectures)
    return built_for(plan, architectures) or build(
        plan, quiet=quiet, objects=lambda: [path for path, _ in build_cuda(sorted(set(architectures)))]
    )


def built_for(plan: Plan, architectures: Sequence[int]) -> Path | None:
    """A library in the cache that differs from the one of ``plan`` in having more architectures at most."""
    prefix = plan.key.rpartition("-sm")[0] + "-sm"
    for folder in sorted((cache_dir() / "kernels").glob(f"{prefix}*")):
        has = folder.name.removeprefix(prefix).split(".")
        if {str(a) for a in architectures} <= set(has) and (folder / f"{plan.name}.so").exists():
            return folder / f"{plan.name}.so"
    return None


def find_runtime(cuda: str | None, release: str, nvcc: Path) -> Path:
    """The library of the CUDA runtime that this torch uses, to link against.

    Args:
        cuda: the CUDA version that torch was built for, None without CUDA.
        release: what ``nvcc --version`` prints.

    Raises:
        BuildError: torch is without CUDA, nvcc is of another major version, or the library is nowhere.
    """
    if cuda is None:
        raise BuildError("this torch is built without CUDA; install one that is built with it.")
    major = cuda.partition(".")[0]
    found = re.search(r"release (\d+)\.", release)
    if found is None or found[1] != major:
        raise BuildError(
            f"{nvcc} is of CUDA {found[1] if found else 'an unknown version'} and torch of CUDA {cuda}; they must be "
            "of one major version: put another nvcc first on the PATH, or install another torch."
        )
    root = torch_folder()
    home = nvcc.resolve().parents[1]
    folders = [
        root / "lib", root.parent / f"nvidia/cu{major}/lib", root.parent / "nvidia/cuda_runtime/lib",
        *(Path(entry) / f"nvidia/cu{major}/lib" for entry in sys.path), home / "lib64",
        home / "lib", *home.glob("targets/*/lib"),
    ]  # fmt: skip
    for folder in folders:
        for path in sorted(folder.glob("libcudart*.so*")):
            if re.fullmatch(rf"libcudart(-[0-9a-f]+)?\.so\.{major}(\.\d+)*", path.name):
                return path
    raise BuildError(
        f"libcudart.so.{major} is not there (looked in {', '.join(map(str, folders))}); install the CUDA toolkit."
    )


def include_folders(nvcc: Path, extra: Sequence[str]) -> list[Path]:
    """Where the headers of the CUDA runtime are: with nvcc, or where the flags for nvcc say."""
    home = nvcc.resolve().parents[1]
    folders = [Path(flag[2:]) for flag in extra if flag.startswith("-I")]
    folders += [home / "include", *home.glob("targets/*/include")]
    found = [folder for folder in dict.fromkeys(folders) if (folder / "cuda_runtime_api.h").exists()]
    if not found:
        raise BuildError(f"cuda_runtime_api.h is not beside {nvcc}; install the headers of the CUDA runtime.")
    if found[0] == Path("/usr/include"):
        return []  # the compiler looks there anyway, and naming it would change the order of its own folders
    # Of wheels, some of the headers belong to the compiler: one folder with all of them, else all folders.
    parts = [folder for folder in dict.fromkeys(folders) if (folder / "crt/host_defines.h").exists()]
    whole = [folder for folder in found if folder in parts]
    return whole[:1] or [*found[:1], *parts[:1]]
