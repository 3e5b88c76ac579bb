"""The CUDA sources: finding nvcc, and compiling them without a GPU.

The ``.cu`` files include nothing of torch and export plain C functions, so that they need nothing but nvcc.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zoo.kernels.building.cache import cache_dir, locked
from zoo.kernels.building.plan import SOURCES, BuildError, source_files
from zoo.kernels.building.usage import Usage, parse

DEFAULT_ARCHITECTURES = (80, 90, 100)
USAGE = ".usage"
# -fmad=false: the bits of the CPU kernels and of the reference, which round every operation by itself.
# -Xptxas=-v: what each kernel takes, which is kept beside its object.
FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", "-Xcompiler", "-fPIC,-fvisibility=hidden")


def parse_architectures(text: str) -> tuple[int, ...]:
    """``"80,90,100"`` as numbers.

    Raises:
        ValueError: it is something else.
    """
    parts = [part.strip().removeprefix("sm_") for part in text.split(",")]
    if not all(part.isdigit() and 50 <= int(part) < 1000 for part in parts):
        raise ValueError(f"--cuda-arch {text}: it must be compute capabilities without the dot, such as 80,90,100.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def find_nvcc() -> tuple[Path, tuple[str, ...]]:
    """nvcc, and the flags it needs here: from the PATH, ``$CUDA_HOME``, or the wheels of the extra ``nvcc``.

    Raises:
        BuildError: there is none.
    """
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path), ()
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin/nvcc").exists():
        return Path(home) / "bin/nvcc", ()
    roots = [Path(entry) / "nvidia/cu13" for entry in sys.path]
    for root in roots:
        if (root / "bin/nvcc").exists():
            # The headers of the runtime may have come with torch, into another folder of packages.
            includes = [other / "include" for other in roots if (other / "include/cuda_runtime.h").exists()]
            return root / "bin/nvcc", tuple(f"-I{path}" for path in dict.fromkeys(includes))
    raise BuildError(
        "there is no nvcc (looked on the PATH, in $CUDA_HOME and for wheels); install the CUDA toolkit, or "
        "pip install 'zoo-kernels[nvcc]'."
    )


def cuda_sources() -> list[Path]:
    """Every ``.cu`` file of the package."""
    return sorted(SOURCES.glob("*/*.cu"))


def build_cuda(architectures: Sequence[int] = DEFAULT_ARCHITECTURES) -> list[tuple[Path, bool]]:
    """Compile every CUDA source for these GPUs, one object for all of them; none of them has to be here.

    Objects are kept in the cache under a hash of their source, all headers, flags and nvcc, each with what ptxas wrote
    about its kernels (:func:`usage_of`). As many are compiled at a time as this process has processors, or as
    ``MAX_JOBS`` says.

    Returns:
        The objects, and whether each had to be compiled.

    Raises:
        BuildError: there is no nvcc, or it failed; with its words.
    """
    nvcc, extra = find_nvcc()
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    command = [str(nvcc), *FLAGS, *extra, *codes]
    version = run([str(nvcc), "--version"])
    common = hashlib.sha256(repr((command, version)).encode())
    for path in source_files(".h", ".cuh"):
        common.update(path.name.encode() + b"\0" + path.read_bytes())
    home = cache_dir() / "kernels"
    home.mkdir(parents=True, exist_ok=True)

    def make(source: Path) -> tuple[Path, bool]:
        digest = common.copy()
        digest.update(source.read_bytes())
        target = home / f"{source.stem}-{digest.hexdigest()[:20]}.o"
        with locked(target.with_suffix(".lock")):
            missing = not target.exists()
            if missing:
                unfinished = target.with_suffix(".tmp")
                _, words = run_both([*command, "-c", str(source), "-o", str(unfinished)])
                target.with_suffix(USAGE).write_text(words, encoding="utf-8")
                unfinished.replace(target)
        return target, missing

    asked = os.environ.get("MAX_JOBS", "")
    workers = int(asked) if asked.isdigit() and int(asked) > 0 else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(make, cuda_sources()))


def usage_of(built: Path) -> list[Usage]:
    """What the kernels of an object of :func:`build_cuda` take, one entry for each kernel and architecture.

    Raises:
        BuildError: ptxas wrote it in a form that is not known.
    """
    return parse(built.with_suffix(USAGE).read_text(encoding="utf-8"))


def run(command: list[str]) -> str:
    """What a command prints; a BuildError with its words if it fails."""
    return run_both(command)[0]


def run_both(command: list[str]) -> tuple[str, str]:
    """What a command writes to its output and its error output; a BuildError with its words if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(result.stderr or result.stdout)[-4000:]}")
    return result.stdout, result.stderr
