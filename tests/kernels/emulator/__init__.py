"""The CUDA kernels of zoo on the CPU: their sources, compiled with a header that makes a fiber of each thread of CUDA.

:func:`emulated` lets the functions of ``zoo.kernels`` run them on tensors of the CPU, bindings included, so that every
check of ``benchmarks.gpu`` runs without a GPU. Of speed, registers and memory models this says nothing.

Every barrier and every mask has a number in the library (:mod:`tests.kernels.emulator.places`): one that a test names
is taken away or weakened while it runs (:class:`Mutant`), and nothing is compiled again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tests.kernels.emulator.places import kernel_files, numbered, places, places_in

from zoo.kernels import loading
from zoo.kernels.building.cache import build, cache_dir
from zoo.kernels.building.plan import KERNEL_FLAGS, SOURCES, Plan, Unit, binding_flags, cpu_plan, keyed, source_files
from zoo.kernels.operators import Operator

HERE = Path(__file__).resolve().parent
LAUNCH = re.compile(r"(\w+(?:<(?:[^<>;]|<[^<>;]*>)*>)?)\s*<<<(.*?)>>>\(", re.DOTALL)
ASKED_FOR = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
DECLARED = re.compile(r"__shared__ ([\w ]+?) (\w+)((?:\[[^\]]+\])*);")
CHECKED = ("-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-static-libubsan")
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1")
# What a binding for CUDA says, and what it says here; each stands there once.
IN_HEADERS = {
    "checks.h": [("DEVICE = at::kCUDA", "DEVICE = at::kCPU")],
    "operators.h": [
        ("c10::DispatchKey::CUDA;", "c10::DispatchKey::CPU;\n    library_.def(schema.c_str());"),
        ("TORCH_LIBRARY_FRAGMENT(zoo, m)", "TORCH_LIBRARY_FRAGMENT(zoo_emulated, m)"),
        ("#if !defined(ZOO_CUDA)", "#if true"),  # operators made of operators: here they call the emulated ones
    ],
}
RISING, FALLING, OF_BLOCK, OF_INTERVAL, AHEAD, MIXED = ORDERS = range(6)
"""The order in which threads and blocks run; from the third on drawn by a seed: a permutation for each block, another
one for each interval between barriers, warps that run as far ahead of the others as barriers let them, and warps in
turns that are drawn. ``schedule.h`` has the same numbers."""

TAKEN_AWAY, OF_WARP, WITHOUT_LANE = CHANGES = range(1, 4)
"""What a mutant does. Taken away, a barrier waits for nobody and an exchange takes what others have brought so far; a
barrier of the warp is ``__syncwarp`` for ``__syncthreads``; without a lane, its bit is missing in a mask."""


@dataclass(frozen=True)
class Mutant:
    """A change of the barrier or mask number ``place``."""

    place: int
    change: int
    lane: int = 0


def translated(text: str, first: int = 0) -> str:
    """Launches as calls: ``k<<<g, b, m, s>>>(a)`` becomes ``zoo_emulator::launch(g, b, m, s, [&] { k(a); })``; shared
    memory as that of the emulator; and barriers and masks with numbers from ``first`` on."""
    text = ASKED_FOR.sub(r"\1* const \2 = static_cast<\1*>(zoo_emulator::shared_memory());", numbered(text, first))
    text = DECLARED.sub(r"static \1 \2\3; zoo_emulator::declare(&\2, sizeof(\2));", text)
    while found := LAUNCH.search(text):
        depth, at = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        call = f"zoo_emulator::launch({found[2]}, [&] {{ {found[1]}({text[found.end() : at]}; }})"
        text = text[: found.start()] + call + text[at:]
    return text


def sources_here() -> dict[Path, tuple[str, bool]]:
    """The sources as they are compiled here: folder and name → text, and whether it is compiled (else it is a header);
    kernels end in .cu.cpp."""
    made, number, kernels = {}, 0, kernel_files()
    for path in source_files(".h", ".cuh", ".cu", ".cpp"):
        text = path.read_text(encoding="utf-8")
        for old, new in IN_HEADERS.get(path.name, []):
            if text.count(old) != 1:
                raise AssertionError(f"{path.name} has {old!r} {text.count(old)} times; the emulator expects it once.")
            text = text.replace(old, new)
        is_kernel = path.suffix == ".cu"
        calls_operators = path.name == "binding.cpp" and "define.of_operators(" in text
        if calls_operators:
            text = text.replace('"zoo::', '"zoo_emulated::')
        has_kernel = path.name == "binding.cpp" and path.with_name(f"{path.parent.name}.cu").exists()
        here = Path(path.parent.name) / (path.name + ".cpp" * is_kernel)
        made[here] = (translated(text, number) if path in kernels else text, is_kernel or has_kernel or calls_operators)
        number += len(list(places_in(text))) if path in kernels else 0
    return made


def plan() -> Plan:
    """The library of all operations on emulated CUDA; under ``make sanitize`` with the sanitizers of that."""
    cpu = cpu_plan()
    sanitize = os.environ.get("ZOO_KERNELS_SANITIZE") == "1"
    checked = SANITIZED if sanitize else CHECKED
    made = sources_here()
    ours = [path.read_text(encoding="utf-8") for end in ("h", "cpp") for path in sorted(HERE.rglob(f"*.{end}"))]
    texts = [*ours, *(text for text, _ in made.values())]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]
    folder = cache_dir() / "emulated" / digest
    for name, (text, _) in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    units = []
    for path in (*(folder / name for name, (_, compiled) in made.items() if compiled), HERE / "exports.cpp"):
        name = f"{path.parent.name}-{path.name}"
        if path.name == "binding.cpp":
            of_binding = checked if sanitize else ()
            flags = ("-DZOO_CUDA=1", f"-I{HERE / 'include'}", *binding_flags(), "-O1", *of_binding)
        else:
            flags = (
                *KERNEL_FLAGS, "-std=c++20", "-O1", *checked, f"-I{HERE / 'include'}", f"-I{folder}", "-include",
                "cuda_runtime.h",
            )  # fmt: skip
        units.append(Unit(name=name, source=path, flags=flags))
    return keyed("zoo_kernels_emulated", cpu.compiler, units, (*cpu.link_flags, *checked), [digest], [])


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
def emulated(order: int = RISING, seed: int = 0, *, mutant: Mutant | None = None) -> Iterator[None]:
    """Operations on tensors of the CPU run the kernels for CUDA inside the block.

    Args:
        order: one of :data:`ORDERS`.
        seed: what an order that is drawn follows from.
        mutant: a barrier or mask to be taken away or weakened.
    """
    library = load()
    library.zoo_emulator_order(order, ctypes.c_uint64(seed))
    if mutant is not None:
        library.zoo_emulator_mutant(mutant.place, mutant.change, mutant.lane)
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
        library.zoo_emulator_mutant(-1, 0, 0)


def hits() -> list[int]:
    """How many threads have come to each place since the library was loaded."""
    pointer = load().zoo_emulator_hits
    pointer.restype = ctypes.POINTER(ctypes.c_uint64)
    return list(pointer()[: len(places())])
