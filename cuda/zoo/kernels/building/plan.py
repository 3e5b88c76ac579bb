"""What is compiled, how, and under which key."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]
"""The folder of the package: one folder an operation."""

# No contraction: a fused multiply-add would make the bits depend on the instruction set. No errno and no traps: neither
# changes a result, both keep loops from being vectorised.
KERNEL_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-Wno-maybe-uninitialized",
)  # fmt: skip

# 512 bits against 256 in the AVX-512 version, measured on Zen 4: AdamW is 2 to 5 % slower on one huge tensor, 3 to 6 %
# faster on 168 tensors and on thousands of small ones.
ISAS = {
    "portable": (),
    "avx2": ("-mavx2", "-mf16c", "-mfma"),
    "avx512": (
        "-mavx2", "-mf16c", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
    ),
}  # fmt: skip


PYTHON_MODULE = "zoo_kernels_python"
"""The name of the module that ``python.cpp`` begins with."""


class BuildError(RuntimeError):
    """The native library cannot be built here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One object: ``source`` compiled with ``flags``."""

    name: str
    source: Path
    flags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A shared library: its units, the command that links them, and the key under which the result is kept."""

    name: str
    compiler: tuple[str, ...]
    units: tuple[Unit, ...]
    link_flags: tuple[str, ...]
    key: str
    more_files: int = 0
    """How many files are compiled by other means, for the line that says what is going on."""

    @property
    def files(self) -> int:
        """How many files the library is made of."""
        return len(self.units) + self.more_files


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: ``$CXX``, else the first of g++, c++ and clang++.

    Raises:
        BuildError: there is none.
    """
    asked = os.environ.get("CXX")
    if asked:
        command = tuple(shlex.split(asked))
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"CXX={asked} is not a program that can be run; set it to a C++ compiler, or unset it.")
        return command
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name) is not None:
            return (name,)
    raise BuildError("there is no C++ compiler (looked for $CXX, g++, c++ and clang++); install one, for example g++.")


def compiler_version(command: Sequence[str]) -> str:
    """The first line of ``--version``, which names the compiler and its version."""
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{shlex.join(command)} --version failed: {error}") from error
    return result.stdout.partition("\n")[0]


def is_clang(version: str) -> bool:
    """Whether a compiler says that it is clang."""
    return "clang" in version.lower()


def cpu_plan(*, sanitize: bool = False) -> Plan:
    """The library of all operations on the CPU.

    Args:
        sanitize: with address and undefined-behaviour sanitizers, for ``make sanitize``.

    Raises:
        BuildError: there is no compiler.
    """
    import torch

    compiler = find_compiler()
    version = compiler_version(compiler)
    x86 = _is_x86()
    common = _common_flags(version, sanitize)
    units = []
    for source in source_files(".cpp"):
        name = f"{source.parent.name}-{source.stem}"
        if source.stem == "python":
            continue
        if source.stem == "binding":
            units.append(Unit(name=name, source=source, flags=(*binding_flags(), *common)))
        elif source.parent.name == "common":
            units.append(Unit(name=name, source=source, flags=(*KERNEL_FLAGS, *common)))
        else:
            for isa, flags in ISAS.items() if x86 else [("portable", ())]:
                flags = (*KERNEL_FLAGS, *common, f"-DZOO_ISA={isa}", *flags)
                units.append(Unit(name=f"{name}-{isa}", source=source, flags=flags))
    facts = [version, torch.__version__, platform.machine()]
    return keyed("zoo_kernels_cpu", compiler, units, _link_flags(sanitize), facts, source_files(".h", ".cpp"))


def python_plan(*, sanitize: bool = False) -> Plan:
    """The module of the classes that kernels offer to Python: of each ``python.cpp``, for this version of Python.

    The library of :func:`cpu_plan` has nothing of Python in it, so that one is for all versions. pybind11 is the copy
    in the headers of torch.

    Args:
        sanitize: as for :func:`cpu_plan`.

    Raises:
        BuildError: there is no compiler, or Python came without its headers.
    """
    import torch

    compiler = find_compiler()
    version = compiler_version(compiler)
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise BuildError(
            f"the headers of Python are missing ({include / 'Python.h'}); install them, on Debian with "
            f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev."
        )
    flags = (*binding_flags(), *_common_flags(version, sanitize))
    units = [Unit(name="common-binding", source=SOURCES / "common/binding.cpp", flags=flags)]
    for source in source_files(".cpp"):
        if source.stem == "python":
            unit_flags = (*flags, f"-isystem{include}")
            units.append(Unit(name=f"{source.parent.name}-python", source=source, flags=unit_flags))
    facts = [version, torch.__version__, platform.machine(), str(sys.implementation.cache_tag)]
    link = (*_link_flags(sanitize), "-ltorch_python")
    return keyed(PYTHON_MODULE, compiler, units, link, facts, source_files(".h", ".cpp"))


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _common_flags(version: str, sanitize: bool) -> tuple[str, ...]:
    # clang's OpenMP calls are not in the runtime that torch brings; without the flag the kernels use one thread.
    common: tuple[str, ...] = () if is_clang(version) else ("-fopenmp",)
    common += ("-DZOO_X86=1",) if _is_x86() else ()
    return common + (
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1") if sanitize else ()
    )


def _link_flags(sanitize: bool) -> tuple[str, ...]:
    # No -fopenmp here: that would link a second OpenMP runtime beside torch's. -z now: a missing symbol must be an
    # error when the library is loaded, not the end of the process in the middle of training.
    link: tuple[str, ...] = ("-shared", f"-L{torch_folder() / 'lib'}", "-ltorch_cpu", "-lc10", "-Wl,-z,now")
    return link + (("-fsanitize=address,undefined",) if sanitize else ())


def torch_folder() -> Path:
    """Where torch is installed."""
    import torch

    return Path(torch.__file__).parent


def binding_flags() -> tuple[str, ...]:
    """What the files that include headers of torch are compiled with."""
    import torch

    include = torch_folder() / "include"
    return (
        "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-isystem{include}",
        f"-isystem{include / 'torch/csrc/api/include'}",
    )  # fmt: skip


def source_files(*suffixes: str) -> list[Path]:
    """The files of all operations that end so, in order."""
    return [path for path in sorted(SOURCES.glob("*/*")) if path.suffix in suffixes]


def keyed(
    name: str, compiler: tuple[str, ...], units: Sequence[Unit], link: tuple[str, ...], facts: Sequence[str],
    sources: Sequence[Path],
) -> Plan:  # fmt: skip
    """The plan, under a key of everything given and of the text of ``sources``."""
    # Where torch lies changes nothing, its version does: environments with the same torch share what is built.
    torch = str(torch_folder())
    texts = [name, *compiler, *facts, *(flag.replace(torch, "torch") for flag in link)]
    for unit in units:
        texts += [unit.name, *(flag.replace(torch, "torch") for flag in unit.flags)]
    # Headers are shared: the text of all of them decides, not only of those that a unit includes today.
    key = f"{name}-{digest_of(texts, sources)}"
    return Plan(name=name, compiler=compiler, units=tuple(units), link_flags=link, key=key)


def digest_of(texts: Sequence[str], files: Sequence[Path]) -> str:
    """20 digits that follow from these texts and from the names and contents of these files of the package."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    for path in files:
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]
