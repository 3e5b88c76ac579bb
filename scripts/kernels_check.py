"""Compile every CUDA source (no GPU needed); says so when there is nothing to compile."""

import shutil
import sys
from pathlib import Path

SOURCES = sorted((Path(__file__).parent.parent / "cuda").rglob("*.cu"))


def main() -> None:
    if not SOURCES:
        print("zoo: kernels-check: there are no .cu files yet, so nothing was compiled")
        return
    # The first .cu file brings its compile command along; until then an unchecked file must not look checked.
    nvcc = shutil.which("nvcc") or "no nvcc on the PATH"
    names = ", ".join(str(path) for path in SOURCES)
    sys.exit(f"zoo: kernels-check: no rule compiles {names} yet ({nvcc}); add it to {Path(__file__).name}")


if __name__ == "__main__":
    main()
