"""Run the tests of the CPU kernels, and those of the CUDA kernels on the emulator, on libraries built with address and
undefined-behaviour sanitizers.

torch itself is not built with them, so the runtime of the address sanitizer is preloaded, leaks (the interpreter's own,
mostly) are not looked for, and tests that start processes or compilers of their own are left out.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def runtime(compiler: str, name: str) -> str:
    """The path of a sanitizer's runtime library, as the compiler knows it."""
    path = subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
    if not Path(path).is_absolute():
        sys.exit(f"zoo: sanitize: {compiler} has no {name}; install the sanitizer libraries of this compiler.")
    return path


def main() -> None:
    compiler = os.environ.get("CXX", "g++").split()[0]
    environment = {
        **os.environ,
        # libstdc++ as well: the sanitizer must find its exception functions when it starts.
        "LD_PRELOAD": " ".join(runtime(compiler, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "ZOO_KERNELS": "native",
        "ZOO_KERNELS_SANITIZE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels"]
    # The last ones: kernels without a barrier, on purpose.
    for name in ("building", "cuda_library", "cuda_mutants"):
        command += ["--ignore", f"tests/kernels/test_{name}.py"]
    sys.exit(subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
