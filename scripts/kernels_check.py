"""Compile every CUDA source for sm_80, sm_90 and sm_100 (no GPU needed); what did not change is not compiled again."""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The sources of this checkout, also where zoo-kernels is not installed.
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "cuda")]


def main() -> None:
    from zoo.kernels.building import BuildError, build_cuda, find_nvcc
    from zoo.kernels.building.cuda import DEFAULT_ARCHITECTURES

    began = time.monotonic()
    try:
        made = build_cuda()
        nvcc, _ = find_nvcc()
    except BuildError as error:
        sys.exit(f"zoo: kernels-check: {error}")
    new = sum(compiled for _, compiled in made)
    names = ", ".join(f"sm_{a}" for a in DEFAULT_ARCHITECTURES)
    print(
        f"zoo: kernels-check: {len(made)} CUDA sources compile for {names} with {nvcc} "
        f"({new} compiled now, {time.monotonic() - began:.0f} s)"
    )


if __name__ == "__main__":
    main()
