"""The CUDA kernels of zoo on the CPU: their sources, compiled with a header that makes a fiber of each thread of CUDA.

:func:`emulated` lets the functions of ``zoo.kernels`` run them on tensors of the CPU, bindings included, so that every
check of ``benchmarks.gpu`` runs without a GPU. Of speed, registers and memory models this says nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zoo.kernels import loading
from zoo.kernels.building.cache import build, cache_dir
from zoo.kernels.building.plan import KERNEL_FLAGS, SOURCES, Plan, Unit, binding_flags, cpu_plan, keyed, source_files
from zoo.kernels.operators import Operator

HERE = Path(__file__).resolve().parent
LAUNCH = re.compile(r"(\w+(?:<(?:[^<>;]|<[^<>;]*>)*>)?)\s*<<<(.*?)>>>\(", re.DOTALL)
SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
CHECKED = ("-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-static-libubsan")
# What a binding for CUDA says, and what it says here; each stands there once.
IN_HEADERS = {
    "checks.h": [("DEVICE = at::kCUDA", "DEVICE = at::kCPU")],
    "operators.h": [
        ("c10::DispatchKey::CUDA;", "c10::DispatchKey::CPU;\n    library_.def(schema.c_str());"),
        ("TORCH_LIBRARY_FRAGMENT(zoo, m)", "TORCH_LIBRARY_FRAGMENT(zoo_emulated, m)"),
        ("#if !defined(ZOO_CUDA)", "#if true"),  # operators made of operators: here they call the emulated ones
    ],
}
RISING, FALLING = 0, 1
"""The order in which threads and blocks run."""


def translated(text: str) -> str:
    """Launches as calls: ``k<<<g, b, m, s>>>(a)`` becomes ``zoo_emulator::launch(g, b, m, s, [&] { k(a); })``; and the
    shared memory that a launch asks for as that of the emulator."""
    text = SHARED.sub(r"\1* const \2 = static_cast<\1*>(zoo_emulator::shared_memory());", text)
    while found := LAUNCH.search(text):
        depth, at = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        call = f"zoo_emulator::launch({found[2]}, [&] {{ {found[1]}({text[found.end() : at]}; }})"
        text = text[: found.start()] + call + text[at:]
    return text


def write_sources(folder: Path) -> list[Path]:
    """The sources as they are compiled here, in ``folder``: kernels end in .cu.cpp. Returns what to compile."""
    made = []
    for path in source_files(".h", ".cuh", ".cu", ".cpp"):
        text = path.read_text(encoding="utf-8")
        for old, new in IN_HEADERS.get(path.name, []):
            if text.count(old) != 1:
                raise AssertionError(f"{path.name} has {old!r} {text.count(old)} times; the emulator expects it once.")
            text = text.replace(old, new)
        is_kernel, launches = path.suffix == ".cu", path.suffix in (".cu", ".cuh")
        calls_operators = path.name == "binding.cpp" and "define.of_operators(" in text
        if calls_operators:
            text = text.replace('"zoo::', '"zoo_emulated::')
        to = folder / path.parent.name / (path.name + ".cpp" * is_kernel)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(translated(text) if launches else text, encoding="utf-8")
        has_kernel = path.name == "binding.cpp" and path.with_name(f"{path.parent.name}.cu").exists()
        if is_kernel or has_kernel or calls_operators:
            made.append(to)
    return made


def plan() -> Plan:
    """The library of all operations on emulated CUDA."""
    cpu = cpu_plan()
    ours = [*sorted(HERE.rglob("*.h")), *sorted(HERE.rglob("*.cpp")), Path(__file__)]
    sources = source_files(".h", ".cuh", ".cu", ".cpp")
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in (*ours, *sources))).hexdigest()[:20]
    folder = cache_dir() / "emulated" / digest
    units = []
    for path in (*write_sources(folder), HERE / "exports.cpp"):
        name = f"{path.parent.name}-{path.name}"
        if path.name == "binding.cpp":
            flags = ("-DZOO_CUDA=1", f"-I{HERE / 'include'}", *binding_flags(), "-O1")
        else:
            flags = (
                *KERNEL_FLAGS, "-std=c++20", "-O1", *CHECKED, f"-I{HERE / 'include'}", f"-I{folder}", "-include",
                "cuda_runtime.h",
            )  # fmt: skip
        units.append(Unit(name=name, source=path, flags=flags))
    return keyed("zoo_kernels_emulated", cpu.compiler, units, (*cpu.link_flags, *CHECKED), [digest], sources)


_library: ctypes.CDLL | None = None


def load() -> ctypes.CDLL:
    """The library, built if need be."""
    global _library
    if _library is None:
        path = build(plan())
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        _library = ctypes.CDLL(str(path))
    return _library


@contextlib.contextmanager
def emulated(order: int = RISING) -> Iterator[None]:
    """Operations on tensors of the CPU run the kernels for CUDA inside the block."""
    load().zoo_emulator_order(order)
    changed: list[tuple[Operator, Any]] = []
    loading.native()
    try:
        for path in sorted(SOURCES.glob("*/ops.py")):
            for found in vars(import_module(f"zoo.kernels.{path.parent.name}.ops")).values():
                if isinstance(found, Operator):
                    changed.append((found, found._kernel))
                    found._kernel = getattr(torch.ops.zoo_emulated, found.name).default
        yield
    finally:
        for operator, kernel in changed:
            operator._kernel = kernel
