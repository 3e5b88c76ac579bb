"""Compile every CUDA source for sm_80, sm_90 and sm_100, link the library and load it; no GPU is needed.

What did not change is not compiled again. A table shows what each kernel takes of a multiprocessor; one that spills
registers to memory is an error. After loading, every operation must have a kernel for CUDA. Where torch is
built without CUDA, or for another major version than nvcc, the sources are compiled and a line says why it stops there.
Where there is no toolkit `make nvcc` installs the compiler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.kernels.building.usage import Usage

ROOT = Path(__file__).resolve().parent.parent
# The sources of this checkout, also where zoo-kernels is not installed.
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "cuda")]

THREADS = 256
"""Of a block, in the column of the occupancy; most kernels are launched so, those with a warp for a row with 128."""


def show_usage(objects: Sequence[Path]) -> None:
    """Print registers, shared memory, stack, spills and occupancy of each kernel.

    Raises:
        SystemExit: one spills; with the names of those that do.
    """
    from zoo.kernels.building import readable, usage_of

    found: dict[tuple[str, str], list[Usage]] = {}
    for built in objects:
        for usage in usage_of(built):
            found.setdefault((built.stem.rpartition("-")[0], usage.kernel), []).append(usage)
    names = readable([kernel for _, kernel in found])
    architectures = sorted({usage.architecture for usages in found.values() for usage in usages})
    columns = [f"sm_{a}" for a in architectures]
    print(
        f"Of each kernel for {', '.join(columns)}: registers of a thread, shared memory of a block, stack and spills "
        f"of a thread (bytes), and the % of a multiprocessor's warps that fit in blocks of {THREADS} threads."
    )
    print(f"{'kernel':64} {'registers':>12} {'shared':>8} {'stack':>6} {'spills':>6} {'occupancy':>14}")
    for (source, kernel), usages in sorted(found.items(), key=lambda item: (item[0][0], names[item[0][1]])):
        usages = sorted(usages, key=lambda usage: usage.architecture)
        print(
            f"{source + ': ' + names[kernel]:64} {joined(u.registers for u in usages):>12} "
            f"{max(u.shared_bytes for u in usages):8} {max(u.stack_bytes for u in usages):6} "
            f"{max(u.spill_bytes for u in usages):6} {joined(round(100 * u.occupancy(THREADS)) for u in usages):>14}"
        )
    spilling = [
        f"{names[kernel]} in {source}.cu for sm_{u.architecture} ({u.spill_bytes} bytes)"
        for (source, kernel), usages in found.items()
        for u in usages
        if u.spill_bytes
    ]
    if spilling:
        sys.exit(
            f"zoo: kernels-check: registers are spilled to memory by {', '.join(spilling)}; let a thread keep less, or "
            "give the kernel smaller __launch_bounds__."
        )


def joined(numbers: Iterable[int]) -> str:
    """``"32/30/30"``."""
    return "/".join(map(str, numbers))


def main() -> None:
    from zoo.kernels import loading
    from zoo.kernels.building import BuildError, build_cuda, cuda_plan, find_nvcc
    from zoo.kernels.building.cuda import DEFAULT_ARCHITECTURES

    began = time.monotonic()
    try:
        nvcc, _ = find_nvcc()
    except BuildError as error:
        sys.exit(f"zoo: kernels-check: {error} Here `make nvcc` does the latter.")
    try:
        made = build_cuda()
    except BuildError as error:
        sys.exit(f"zoo: kernels-check: {error}")
    new = sum(compiled for _, compiled in made)
    names = ", ".join(f"sm_{a}" for a in DEFAULT_ARCHITECTURES)
    print(
        f"zoo: kernels-check: {len(made)} CUDA sources compile for {names} with {nvcc} "
        f"({new} compiled now, {time.monotonic() - began:.0f} s)"
    )
    show_usage([path for path, _ in made])
    try:
        cuda_plan(DEFAULT_ARCHITECTURES)
    except BuildError as error:
        print(f"zoo: kernels-check: the library is not linked: {error}")
        return
    try:
        loading.load_cuda(DEFAULT_ARCHITECTURES)
    except (BuildError, OSError) as error:
        sys.exit(f"zoo: kernels-check: {error}")
    operations = loading.operations()
    missing = [name for name in operations if not loading.has_cuda_kernel(name)]
    if missing:
        sys.exit(f"zoo: kernels-check: without a kernel for CUDA: {', '.join(missing)}; each folder needs a .cu.")
    print(
        f"zoo: kernels-check: the library links and loads, and all {len(operations)} operations have a kernel for "
        f"CUDA; none was run ({time.monotonic() - began:.0f} s)"
    )


if __name__ == "__main__":
    main()
