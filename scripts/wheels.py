"""Wheels of all distributions, and a training with nothing but them in an empty environment.

    python -m scripts.wheels build    a source archive of each distribution and, made from that, its wheel, into dist/
    python -m scripts.wheels try      install them into a new environment and train with the defaults
    python -m scripts.wheels try PYTHON ...    the same in short on each of these

A commit gives the same bytes wherever it is built with the same compilers: files have the time of the commit, what
compilers write down of paths does not name this machine, tools have the versions of requirements-release.txt, and
wheels are packed again (scripts/release/repacking.py). torch and the other packages come from where uv gets them, its
cache first.

ZOO_VENV names another .venv; ZOO_TORCH_PYTHONS further Pythons, with another torch and with hatchling, for which there
is a wheel with kernels too.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from scripts.release.repacking import repack

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("ZOO_VENV", ROOT / ".venv"))
UV = str(VENV / "bin/uv")
DIST = ROOT / "dist"
FOLDERS = {"zoo-core": ".", "zoo-kernels": "cuda", "zoo-moe": "moe", "zoo-compression": "compression"}
# Takes another package's name: it is built and tried, and installed by nobody who does not name it.
STANDIN = {"deepspeed": "dropin"}
# Nobody asked for these, and a machine without a GPU has no use for them.
UNWANTED = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "deepspeed")


def stop(sentence: str) -> None:
    sys.exit(f"zoo: wheels: {sentence}")


def say(sentence: str) -> None:
    print(f"zoo: {sentence}", flush=True)


def run(*command: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """What a command prints, both streams; stops with all of it where the command fails."""
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        stop(f"`{' '.join(words)}` failed with {result.returncode}:\n{result.stdout}")
    return result.stdout


# -- building ---------------------------------------------------------------------------------------------------------


def build() -> list[Path]:
    """The wheels, in dist/, with the source archives that they were made from."""
    shutil.rmtree(DIST, ignore_errors=True)
    work = ROOT / "build/wheels"
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": time_of_commit(),
        # Not that of `make setup`, whose flags are others: each would compile all crates again after the other.
        "CARGO_TARGET_DIR": str(work / "target"),
        "CARGO_ENCODED_RUSTFLAGS": rust_flags(work),
    }
    tools = ("--build-constraints", ROOT / "requirements-release.txt")
    wheels = []
    for name, folder in {**FOLDERS, **STANDIN}.items():
        build_one = (UV, "build", "--quiet", "--python", VENV / "bin/python", "--out-dir", DIST, *tools)
        run(*build_one, "--sdist", ROOT / folder, env=environment)
        (archive,) = DIST.glob(f"{name.replace('-', '_')}-*.tar.gz")
        unpacked = unpack(archive, work / name)
        run(*build_one, "--wheel", unpacked, env=environment)
        (wheel,) = DIST.glob(f"{name.replace('-', '_')}-*.whl")
        repack(wheel, int(time_of_commit()))
        check_contents(name, wheel, ROOT / folder)
        wheels.append(wheel)
    for python in (VENV / "bin/python", *filter(None, os.environ.get("ZOO_TORCH_PYTHONS", "").split(os.pathsep))):
        wheels.append(build_with_kernels(Path(python), environment))
    for leftover in DIST.rglob(".gitignore"):
        leftover.unlink()
    return wheels


def rust_flags(work: Path) -> str:
    """Where sources lie, as rustc writes it into messages of panics: the same everywhere. Flags as cargo parts them."""
    places = {str(work): "/zoo", os.environ.get("CARGO_HOME", str(Path.home() / ".cargo")): "/cargo"}
    given = os.environ.get("RUSTFLAGS", "").split()
    return "\x1f".join([*given, *(f"--remap-path-prefix={there}={name}" for there, name in places.items())])


def build_with_kernels(python: Path, environment: dict[str, str]) -> Path:
    """The wheel of zoo-kernels for who has no compiler, apart from the others: an installer would prefer it.

    It is for the version of torch that ``python`` has, which its name says.
    """
    torch = run(python, "-c", "import torch; print(torch.__version__.partition('+')[0])").split()[-1]
    into = DIST / "with-kernels"
    before = set(into.glob("*.whl"))
    run(
        UV, "build", "--quiet", "--python", python, "--no-build-isolation", "--wheel",
        "--out-dir", into, ROOT / "build/wheels/zoo-kernels" / unpacked_name("zoo_kernels"),
        env={**environment, "ZOO_WHEEL_KERNELS": "cpu"},
    )  # fmt: skip
    shutil.rmtree(into / "ahead")
    (wheel,) = set(into.glob("*.whl")) - before
    wheel = repack(wheel, int(time_of_commit()), build=f"1torch{torch}")
    with zipfile.ZipFile(wheel) as file:
        libraries = [name for name in file.namelist() if name.startswith("zoo/kernels/ahead/")]
    if len(libraries) != 2 or wheel.name.endswith("-any.whl"):
        stop(f"{wheel.name} was to have two libraries and be for one kind of machine; it has {libraries}.")
    check_paths(wheel)
    say(f"{wheel.name} with the CPU kernels: {wheel.stat().st_size:,} bytes")
    return wheel


def unpacked_name(prefix: str) -> str:
    (archive,) = DIST.glob(f"{prefix}-*.tar.gz")
    return archive.name.removesuffix(".tar.gz")


def time_of_commit() -> str:
    """Seconds since 1970; of a source tree without git, the beginning of 2020."""
    if (ROOT / ".git").exists():
        return run("git", "log", "-1", "--format=%ct").strip()
    return "1577836800"


def unpack(archive: Path, into: Path) -> Path:
    shutil.rmtree(into, ignore_errors=True)
    with tarfile.open(archive) as file:
        if hasattr(tarfile, "data_filter"):  # from Python 3.10.12 and 3.11.4 on; the archive is of this very run
            file.extraction_filter = tarfile.data_filter
        file.extractall(into)
    (folder,) = into.iterdir()
    for path in folder.rglob("*"):
        os.utime(path)  # cargo compiles what is newer than its product, and the archive has the time of the commit
    return folder


def check_contents(name: str, wheel: Path, folder: Path) -> None:
    """Stop where a wheel lacks a file of its packages (sources that are compiled later, data, marks) or its licence."""
    with zipfile.ZipFile(wheel) as file:
        there = set(file.namelist())
    sources = folder / "python" if name == "zoo-core" else folder
    asked = run("git", "ls-files", "zoo", cwd=sources).split() if (ROOT / ".git").exists() else []
    missing = sorted({*asked} - there)
    packages = {Path(path).parts[1] for path in there if path.startswith("zoo/")}
    missing += [f"zoo/{package}/py.typed" for package in packages if f"zoo/{package}/py.typed" not in there]
    if not any(path.endswith("licenses/LICENSE") for path in there):
        missing.append("LICENSE")
    if name == "zoo-core" and not any(path.startswith("zoo/io/_native") and path.endswith(".so") for path in there):
        missing.append("the Rust extension")
    check_paths(wheel)
    if missing:
        stop(f"{wheel.name} lacks {', '.join(missing)}.")
    say(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(there)} files")


def check_paths(wheel: Path) -> None:
    """Stop where a library in a wheel tells of a folder of this machine: elsewhere other bytes would come out."""
    places = {str(ROOT), str(VENV), sys.base_prefix, os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))}
    places -= {"/usr", "/usr/local"}  # the same on every machine
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            data = file.read(name) if name.endswith(".so") else b""
            if told := sorted(place for place in places if f"{place}/".encode() in data):
                stop(f"{name} in {wheel.name} names {', '.join(told)}; compilers have to map it to another name.")


# -- trying -----------------------------------------------------------------------------------------------------------


def try_them() -> None:
    """Install zoo-core by itself into an empty environment, train, add the plug-ins, look at what there is."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zoo-wheels-") as name:
        home = Path(name)
        python = make_environment(home)
        environment = {
            "HOME": str(home),
            # Neither .venv nor this folder: what is found is what the wheels have brought.
            "PATH": os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not p.startswith(str(ROOT))),
            "ZOO_CACHE_DIR": str(home / "cache"),
        }
        try_training(home, python, environment)
        try_readme(home, python, environment)
        try_without_compiler(home, python, environment)
        try_plugins(home, python, environment)
        try_package(home, python, environment)
        try_with_kernels(home, python, environment)
    say(f"the wheels train in an empty environment ({time.monotonic() - began:.0f} s)")


def try_on(other: str) -> None:
    """The same in short on another Python, without a compiler: with the kernels of the wheel for its torch, if there is
    one, else with the references."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zoo-wheels-") as name:
        home = Path(name)
        python = make_environment(home, other)
        torch = run(python, "-c", "import torch; print(torch.__version__.partition('+')[0])").split()[-1]
        fits = [*(DIST / "with-kernels").glob(f"zoo_kernels-*-1torch{torch}-*.whl")]
        for wheel in fits:
            run(UV, "pip", "install", "--quiet", "--python", python, "--no-deps", "--reinstall", wheel)
        environment = {"HOME": str(home), "PATH": str(python.parent), "ZOO_CACHE_DIR": str(home / "cache")}
        # The module that prepares updates once is for one version of Python; without it steps take longer.
        if fits:
            run(python, "-c", "from zoo.kernels import loading; assert loading.native()", cwd=home, env=environment)
        zoo = python.parent / "zoo"
        said = run(zoo, "train", "byte_lm", "--steps", 20, "--set", "steps_per_print=10", cwd=home, env=environment)
        if not re.search(r"step +20/20", said) or not (home / "runs/bytes/loss.png").exists():
            stop(f"the example did not train:\n{said}")
        run(zoo, "report", home / "runs/bytes", cwd=home, env=environment)
        try_plugins(home, python, environment)
        try_package(home, python, environment)
    how = f"with the kernels for torch {torch}" if fits else f"with torch {torch}, for which dist/ has no kernels"
    say(f"the wheels train on {other} {how} ({time.monotonic() - began:.0f} s)")


def make_environment(home: Path, other: str | None = None) -> Path:
    """An environment with zoo-core and what it asks for; torch is that of .venv, shared where .venv shares it.

    With ``other`` it is one of that Python, and has what an installer chooses for it.
    """
    run(UV, "venv", "--quiet", "--python", other or VENV / "bin/python", home / "venv")
    python = home / "venv/bin/python"
    own = other is None
    extra: list[object] = []
    if own:
        (home / "constraints.txt").write_text(
            re.sub(r"(?m)^(zoo-|-e ).*\n", "", run(UV, "pip", "freeze", "--python", VENV / "bin/python"))
        )
        extra = ["--constraint", home / "constraints.txt"]
    shared = next(VENV.glob("lib/*/site-packages/zoo-shared-torch.pth"), None)
    if shared is not None and own:
        (target,) = (home / "venv").glob("lib/*/site-packages")
        shutil.copy(shared, target)
        extra += ["--override", VENV / "overrides.txt"]
    install(python, *extra, *DIST.glob("zoo_core-*.whl"))
    installed = set(re.findall(r"^([\w-]+)", run(UV, "pip", "freeze", "--python", python).lower(), re.MULTILINE))
    if "zoo-kernels" not in installed:
        stop("installing zoo-core did not bring zoo-kernels.")
    if unwanted := sorted(installed.intersection(UNWANTED)):
        stop(f"installing zoo-core brought {', '.join(unwanted)}, which nobody asked for.")
    return python


def install(python: Path, *what: object) -> None:
    """From dist/ what is there, the rest from where uv finds it."""
    # uv keeps wheels by name and version, and these have those of the last time.
    again = [word for name in FOLDERS for word in ("--refresh-package", name)]
    run(UV, "pip", "install", "--quiet", "--python", python, "--find-links", DIST, *again, *what)
    for wheel in DIST.glob("*.whl"):
        check_installed(wheel, python)


def check_installed(wheel: Path, python: Path) -> None:
    """Stop where a distribution is installed and is not, file by file, that of dist/."""
    (site,) = python.parent.parent.glob("lib/*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        if not (site / file.namelist()[0]).exists():
            return
        for name in file.namelist():
            if name.startswith("zoo/") and (site / name).read_bytes() != file.read(name):
                stop(f"{name} was installed from elsewhere than {wheel.name}.")


def try_training(home: Path, python: Path, environment: dict[str, str]) -> None:
    """The packaged example under its defaults, which compiles the native operations first."""
    zoo = python.parent / "zoo"
    said = run(zoo, "train", "byte_lm", "--steps", 20, "--set", "steps_per_print=10", cwd=home, env=environment)
    built = re.findall(r"zoo: building (\S+) from (\S+)", said)
    names, folders = [name for name, _ in built], [folder for _, folder in built]
    if names != ["zoo_kernels_cpu", "zoo_kernels_python"] or not all(f.startswith(str(home / "venv")) for f in folders):
        stop(
            f"the native operations and their classes were to be compiled once, from the wheel; were: {built}:\n{said}"
        )
    if not re.search(r"step +20/20", said) or not (home / "runs/bytes/loss.png").exists():
        stop(f"the example did not train:\n{said}")
    say("`zoo train byte_lm` compiled the native operations from the wheel and trained")


def try_readme(home: Path, python: Path, environment: dict[str, str]) -> None:
    """The first Python example of README.md, as it stands, in a folder with nothing of zoo."""
    (example, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    where = "import zoo\nfrom zoo.kernels import loading\n"
    where += f"assert all(path.startswith({str(home)!r}) for path in zoo.__path__), zoo.__path__\n"
    where += "assert loading.native(), loading.why_not()\n"
    (home / "example.py").write_text(example + where)
    run(python, "example.py", cwd=home, env={**environment, "ZOO_KERNELS": "native"})
    say("the example of README.md ran")


SMALL_PROGRAM = """
import torch
from zoo.optim import AdamW, Lion
for kind in (AdamW, Lion):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    assert weight.max() < 1
"""


def try_without_compiler(home: Path, python: Path, environment: dict[str, str]) -> None:
    """Where nothing can be compiled the references run, which is said once."""
    nothing = {**environment, "PATH": str(python.parent), "ZOO_CACHE_DIR": str(home / "empty")}
    said = run(python, "-c", SMALL_PROGRAM, cwd=home, env=nothing)
    if said.count("cannot be used") != 1:
        stop(f"without a compiler one sentence was to say that the references run instead:\n{said}")
    say("without a compiler the references ran, and said so once")


def try_with_kernels(home: Path, python: Path, environment: dict[str, str]) -> None:
    """The wheel with kernels runs them where nothing can be compiled, and puts nothing into the cache."""
    (wheel,) = (DIST / "with-kernels").glob("zoo_kernels-*.whl")
    run(UV, "pip", "install", "--quiet", "--python", python, "--no-deps", "--reinstall", wheel)
    cache = home / "no-cache"
    nothing = {**environment, "PATH": str(python.parent), "ZOO_CACHE_DIR": str(cache), "ZOO_KERNELS": "native"}
    said = run(python, "-c", SMALL_PROGRAM, cwd=home, env=nothing)
    if said or cache.exists():
        stop(f"the kernels of {wheel.name} were to run without a word and without a cache:\n{said}")
    say(f"without a compiler the kernels of {wheel.name} ran")


def try_plugins(home: Path, python: Path, environment: dict[str, str]) -> None:
    """The other distributions tell about themselves through their entry points, in one version."""
    install(python, "--no-deps", *DIST.glob("zoo_moe-*.whl"), *DIST.glob("zoo_compression-*.whl"))
    program = """
from importlib.metadata import version
from zoo import registry
names = ("kernels", "moe", "compression")
print(*{version("zoo-core"), *(registry.get("subpackage", name).version for name in names)}, len(registry.problems()))
"""
    said = run(python, "-c", program, cwd=home, env=environment).split()
    if len(said) != 2 or said[1] != "0":
        stop(f"the distributions were to have one version and no problem, and said {' '.join(said)}.")
    say(f"all four distributions are of version {said[0]}")
    install(python, "--no-deps", *DIST.glob("deepspeed-*.whl"))
    program = "import deepspeed as d; from importlib.metadata import version; print(d.__name__, version('deepspeed'))"
    said = run(python, "-c", program, cwd=home, env=environment).split()
    if said[0] != "zoo.deepspeed" or not said[-1].endswith("+zoo"):
        stop(f"import deepspeed was to give zoo.deepspeed in a version of its own, and gave {' '.join(said)}.")
    say(f"deepspeed {said[-1]} is zoo under that name")


def try_package(home: Path, python: Path, environment: dict[str, str]) -> None:
    """The package of examples/plugin, as somebody has it who has only these wheels: installed, its own tests pass."""
    package = home / "package"
    shutil.copytree(ROOT / "examples/plugin", package, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    install(python, "--no-deps", package)
    (package / "zoo_example").rename(package / "not_here")  # what is tested is what was installed
    constraints = home / "constraints.txt"
    install(python, *(["--constraint", constraints] if constraints.exists() else []), "pytest")
    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package, env=environment)
    passed = re.search(r"^(\d+) passed(, \d+ warnings?)? in", said, re.MULTILINE)
    if passed is None:
        stop(f"all tests of examples/plugin were to pass with the wheels, none left out:\n{said}")
    say(f"{passed[1]} tests of examples/plugin pass outside of the tree")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build"]:
            build()
        case ["try"]:
            try_them()
        case ["try", *others]:
            for one in others:
                try_on(one)
        case _:
            sys.exit(__doc__)
