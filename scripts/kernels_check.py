"""Compile every CUDA source for sm_80, sm_90 and sm_100, link the library and load it; no GPU is needed.

What did not change is not compiled again. A table shows what each kernel takes of a multiprocessor; one that spills
registers to memory is an error, and so is one that takes more than the header of its folder says. After loading, every
operation must have a kernel for CUDA. Where torch is built without CUDA, or for another major version than nvcc, the
sources are compiled and a line says why it stops there.
Where there is no toolkit `make nvcc` installs the compiler.
"""

from __future__ import annotations

import re
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

SAID = re.compile(r"^//   (\w+) +(\d+) threads, <= (\d+) registers, >= (\d+) warps", re.MULTILINE)
"""What a header says of a kernel: threads of a block, registers of a thread, warps that a multiprocessor holds."""

Found = dict[tuple[str, str], list["Usage"]]


def usages_of(objects: Sequence[Path]) -> tuple[Found, dict[str, str]]:
    """What each kernel takes, by source and mangled name; and the names as they are written."""
    from zoo.kernels.building import readable, usage_of

    found: Found = {}
    for built in objects:
        for usage in usage_of(built):
            found.setdefault((built.stem.rpartition("-")[0], usage.kernel), []).append(usage)
    return found, readable([kernel for _, kernel in found])


def differences(found: Found, names: dict[str, str], headers: dict[str, str]) -> list[str]:
    """What kernels take beyond what the header of their folder says, or what it does not say; one sentence each.

    Args:
        headers: the text for the name of each source.
    """
    wrong = []
    for (source, kernel), usages in sorted(found.items(), key=lambda item: (item[0][0], names[item[0][1]])):
        name = names[kernel].partition("<")[0]
        said = {line[0]: tuple(map(int, line[1:])) for line in SAID.findall(headers[source])}
        if name not in said:
            wrong.append(f"{name} in {source}.cu is not in the header of its folder")
            continue
        threads, registers, warps = said[name]
        for usage in usages:
            holds = round(64 * usage.occupancy(threads))
            if usage.registers > registers or holds < warps:
                wrong.append(
                    f"{names[kernel]} in {source}.cu takes {usage.registers} registers on sm_{usage.architecture}, and "
                    f"{holds} warps fit; its header says <= {registers} and >= {warps}"
                )
    return wrong


def headers_of(sources: Iterable[Path]) -> dict[str, str]:
    """The header of the folder of each source, and those of common/, by the name of the source."""
    common = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "cuda/zoo/kernels/common").glob("*.cuh")))
    return {
        source.stem: (source.parent / f"{source.parent.name}.h").read_text(encoding="utf-8") + common
        for source in sources
    }


def show_usage(objects: Sequence[Path]) -> None:
    """Print registers, shared memory, stack, spills and occupancy of each kernel.

    Raises:
        SystemExit: one spills; with the names of those that do.
    """
    found, names = usages_of(objects)
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
    from zoo.kernels.building.cuda import DEFAULT_ARCHITECTURES, cuda_sources

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
    objects = [path for path, _ in made]
    show_usage(objects)
    if wrong := differences(*usages_of(objects), headers_of(cuda_sources())):
        sys.exit(f"zoo: kernels-check: {'; '.join(wrong)}. Change the kernel, or what its header says of it.")
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
