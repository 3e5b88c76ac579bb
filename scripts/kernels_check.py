"""Compile every CUDA source for sm_80, sm_90 and sm_100, link the library and load it; no GPU is needed.

What did not change is not compiled again. After loading, every operation must have a kernel for CUDA. Where torch is
built without CUDA, or for another major version than nvcc, the sources are compiled and a line says why it stops there.
Where there is no toolkit `make nvcc` installs the compiler.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The sources of this checkout, also where zoo-kernels is not installed.
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "cuda")]


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
        sys.exit(
            f"zoo: kernels-check: without a kernel for CUDA: {', '.join(missing)}; see binding_cuda.cpp of the others."
        )
    print(
        f"zoo: kernels-check: the library links and loads, and all {len(operations)} operations have a kernel for "
        f"CUDA; none was run ({time.monotonic() - began:.0f} s)"
    )


if __name__ == "__main__":
    main()
