"""Building a plan with ninja, once, whoever asks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from zoo.kernels.building.plan import SOURCES, BuildError, Plan, torch_folder

MAX_LINES = 20
"""How much of a compiler's output goes into an error."""


def cache_dir() -> Path:
    """Where compiled things are kept: ``$ZOO_CACHE_DIR``, else ``$XDG_CACHE_HOME/zoo``, else ``~/.cache/zoo``."""
    asked = os.environ.get("ZOO_CACHE_DIR")
    if asked:
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoo"


def build(plan: Plan, *, quiet: bool = False, objects: Callable[[], Sequence[Path]] | None = None) -> Path:
    """The library of ``plan``, compiled unless the cache has it.

    Processes that ask for one plan at the same time, on one machine, compile it once: the others wait. The lock is the
    kernel's (flock), so it is gone when its holder is, however that ended; an unfinished folder is thrown away by the
    next builder.

    Args:
        quiet: without the lines on stderr that say what is going on.
        objects: makes further objects that belong to the library; called only if it has to be built.

    Raises:
        BuildError: the compiler or the linker failed, or the cache cannot be written.
    """
    home = cache_dir() / "kernels"
    library = home / plan.key / f"{plan.name}.so"
    if library.exists():
        return library
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / f"{plan.key}.lock"):
            if not library.exists():
                _build_into(home, plan, quiet, objects)
    except OSError as error:
        raise BuildError(
            f"the cache {home} cannot be written ({error}); set ZOO_CACHE_DIR to a folder that can."
        ) from error
    return library


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; the kernel gives it back when this process ends, however it ends."""
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_into(home: Path, plan: Plan, quiet: bool, objects: Callable[[], Sequence[Path]] | None) -> None:
    for leftover in home.glob(f"{plan.key}.tmp-*"):  # we hold the lock: whoever made these is gone
        shutil.rmtree(leftover, ignore_errors=True)
    folder = home / f"{plan.key}.tmp-{os.getpid()}"
    folder.mkdir()
    try:
        began = time.monotonic()
        _say(f"building {plan.name} from {SOURCES} with {plan.compiler[0]}, once ({plan.files} files)", quiet)
        more = objects() if objects is not None else ()
        (folder / "build.ninja").write_text(ninja_file(plan, more), encoding="utf-8")
        _run_ninja(folder, plan, quiet)
        for path in folder.iterdir():
            if path.name != f"{plan.name}.so":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.rename(home / plan.key)
        _say(f"built {plan.name} in {time.monotonic() - began:.0f} s, kept in {home / plan.key}", quiet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ninja_file(plan: Plan, objects: Sequence[Path] = ()) -> str:
    """The text of ``build.ninja``: one edge a unit, one to link them and ``objects``."""

    def quoted(text: str) -> str:
        # Once for the shell that ninja starts, once for ninja.
        import shlex

        return shlex.quote(text).replace("$", "$$")

    def path(text: object) -> str:
        return re.sub(r"([$ :])", r"$\1", str(text))

    # What a compiler writes down of where sources lie (assertions, messages) is the same wherever it runs.
    places = {SOURCES: "zoo/kernels", torch_folder(): "torch", sysconfig.get_path("include"): "python"}
    mapped = " ".join(quoted(f"-ffile-prefix-map={there}={name}") for there, name in places.items())
    compiler = " ".join(map(quoted, plan.compiler))
    lines = [
        "ninja_required_version = 1.8",
        "rule compile",
        f"  command = {compiler} -MMD -MF $out.d {mapped} $flags -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        f"  command = {compiler} $in -o $out $flags",
    ]
    for unit in plan.units:
        lines += [f"build {unit.name}.o: compile {path(unit.source)}", f"  flags = {' '.join(map(quoted, unit.flags))}"]
    inputs = " ".join([*(f"{unit.name}.o" for unit in plan.units), *map(path, objects)])
    lines += [f"build {plan.name}.so: link {inputs}", f"  flags = {' '.join(map(quoted, plan.link_flags))}"]
    return "\n".join([*lines, f"default {plan.name}.so", ""])


def find_ninja() -> str:
    """The path of ninja: that of the wheel ``ninja``, else the one on the PATH."""
    with contextlib.suppress(ImportError):
        import ninja

        found = Path(ninja.BIN_DIR) / "ninja"
        if found.exists():
            return str(found)
    on_path = shutil.which("ninja")
    if on_path is None:
        raise BuildError("ninja is missing; pip install ninja (zoo-kernels depends on it).")
    return on_path


def _run_ninja(folder: Path, plan: Plan, quiet: bool) -> None:
    command = [find_ninja(), "-C", str(folder)]
    if os.environ.get("MAX_JOBS", "").isdigit():
        command.append(f"-j{os.environ['MAX_JOBS']}")
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    output: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        if process.stdout is None:
            raise AssertionError("a process started with a pipe has no pipe")
        for line in process.stdout:
            output.append(line.rstrip())
            done = re.match(r"\[(\d+/\d+)\]", line)
            if done and not quiet and sys.stderr.isatty():
                sys.stderr.write(f"\rzoo: building {plan.name} {done[1]} ")
                sys.stderr.flush()
        code = process.wait()
    if not quiet and sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if code != 0:
        errors = [line for line in output if "error" in line.lower() or "undefined reference" in line] or output
        raise BuildError(f"{plan.compiler[0]} failed on {plan.name}:\n" + "\n".join(errors[:MAX_LINES]))


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        sys.stderr.write(f"zoo: {text}\n")
        sys.stderr.flush()
