#!/usr/bin/env python3
"""Make .venv ready: `make` runs this when a file that decides what is installed has changed.

    python3 scripts/setup.py check     is everything here that zoo cannot install itself?
    python3 scripts/setup.py install   .venv, torch unless there is one to share, requirements-dev.txt
    python3 scripts/setup.py native    build the Rust extension again
    python3 scripts/setup.py nvcc      the compiler of CUDA as wheels, for machines without a toolkit

Standard library only, and in the syntax of old Pythons, so that an old Python can read it and say that it is too old.
"""

import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
BIN = os.path.join(VENV, "bin")
VENV_PYTHON = os.path.join(BIN, "python")
OLDEST, NEWEST = (3, 10), (3, 13)
OLDEST_TORCH = (2, 11)


def stop(sentence):
    sys.exit("zoo: " + sentence)


def say(sentence):
    print("zoo: " + sentence, flush=True)


def output(*command):
    """What a command prints, or None when it cannot run or fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, universal_newlines=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def numbers(text, parts=2):
    return tuple(int(part) for part in re.findall(r"\d+", text)[:parts])


def dotted(version):
    return ".".join(str(part) for part in version)


# -- what must be there already ---------------------------------------------------------------------------------------


def python_version(command):
    text = output(command, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    return numbers(text) if text else None


def choose_python():
    """The Python that .venv is made from: $PYTHON, or python3, or the newest of python3.13 to python3.10."""
    asked = os.environ.get("PYTHON")
    if asked:
        version = python_version(asked)
        if version is None:
            stop(
                "PYTHON=%s does not run; give the path of a Python %s to %s." % (asked, dotted(OLDEST), dotted(NEWEST))
            )
        if not OLDEST <= version <= NEWEST:
            stop(
                "PYTHON=%s is Python %s; zoo needs Python %s to %s."
                % (asked, dotted(version), dotted(OLDEST), dotted(NEWEST))
            )
        return asked
    names = ["python3"] + ["python3.%d" % minor for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    for name in names:
        version = python_version(name)
        if version and OLDEST <= version <= NEWEST:
            return name
    return stop(
        "Python %s to %s is missing (looked for %s); install one, or name it with `make PYTHON=/path/to/python ...`."
        % (dotted(OLDEST), dotted(NEWEST), ", ".join(names))
    )


def check_compiler():
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    if not any(shutil.which(name.split()[0]) for name in names):
        stop(
            "a C++ compiler is missing (looked for %s); install one, for example the package g++, or set CXX."
            % ", ".join(names)
        )


def needed_cargo():
    """The rust-version of Cargo.toml, as it stands there."""
    with open(os.path.join(ROOT, "Cargo.toml")) as file:
        return re.search(r'^rust-version = "([^"]+)"', file.read(), re.MULTILINE).group(1)


def check_cargo():
    needed = needed_cargo()
    text = output("cargo", "--version")
    what = "the Rust extension zoo.io._native needs Rust %s or newer; " % needed
    if text is None:
        stop("cargo is missing: " + what + "https://rustup.rs installs it.")
    if numbers(text, 3) < numbers(needed, 3):
        stop("%s is too old: %s`rustup update stable` brings it, or https://rustup.rs installs it." % (text, what))


def check():
    """Stop with one sentence when something is missing that cannot be installed from here."""
    # rustup puts cargo here and leaves it to the next login shell to find it.
    os.environ["PATH"] += os.pathsep + os.path.expanduser(os.path.join("~", ".cargo", "bin"))
    python = choose_python()
    check_compiler()
    check_cargo()
    return python


# -- .venv ------------------------------------------------------------------------------------------------------------

PROBE = """
import os, sys, torch
print(torch.__version__)
for path in dict.fromkeys(sys.path):
    if os.path.basename(path) in ("site-packages", "dist-packages") and os.path.isdir(path):
        print(path)
"""


def shared_torch(python):
    """(version, package folders) of a torch that `python` has already and that is new enough, or None."""
    text = output(python, "-c", PROBE)
    if not text:
        return None
    version, folders = text.splitlines()[0], text.splitlines()[1:]
    if numbers(version) < OLDEST_TORCH:
        say(
            "torch %s of %s is too old to share (zoo needs %s); installing one."
            % (version, python, dotted(OLDEST_TORCH))
        )
        return None
    return version, folders


def make_venv(python):
    if os.path.exists(VENV):
        shutil.rmtree(VENV)
    say("making .venv from %s" % python)
    if subprocess.call([python, "-m", "venv", VENV]) != 0:
        stop(
            "%s cannot make a virtual environment; install its venv module (the package python3-venv on Debian)."
            % python
        )
    torch = shared_torch(python)
    if torch is None:
        return
    version, folders = torch
    say("sharing the torch %s that %s has" % (version, python))
    site = output(VENV_PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # Why not --system-site-packages: it shows the packages of the *base* interpreter, so a torch that lives in another
    # virtual environment would stay invisible. addsitedir comes after .venv's own packages and reads .pth files, which
    # finds an editable torch too.
    with open(os.path.join(site, "zoo-shared-torch.pth"), "w") as file:
        for folder in folders:
            file.write("import site; site.addsitedir(%r)\n" % folder)
    # torch's own script stands in the other environment and starts the other Python.
    with open(os.path.join(BIN, "torchrun"), "w") as file:
        file.write("#!%s\nimport sys\n\nfrom torch.distributed.run import main\n\nsys.exit(main())\n" % VENV_PYTHON)
    os.chmod(os.path.join(BIN, "torchrun"), 0o755)
    # uv looks at .venv's own folder only and would install a second torch; this takes torch out of what it resolves.
    with open(os.path.join(VENV, "overrides.txt"), "w") as file:
        file.write("torch; python_version < '0'\n")


def uv(*arguments):
    environment = dict(os.environ, VIRTUAL_ENV=VENV)
    environment.setdefault("UV_HTTP_TIMEOUT", "300")
    overrides = os.path.join(VENV, "overrides.txt")
    extra = ["--override", overrides] if os.path.exists(overrides) else []
    command = [os.path.join(BIN, "uv"), "pip", "install", "--quiet", *extra, *arguments]
    if subprocess.call(command, cwd=ROOT, env=environment) != 0:
        stop("the installation failed for the reason above; `%s` repeats it." % " ".join(command))


def install():
    python = check()
    made_from = os.path.join(VENV, "made-from")
    asked = os.environ.get("PYTHON", "")
    kept = False
    if os.path.exists(made_from) and output(VENV_PYTHON, "-c", "print(1)"):
        with open(made_from) as file:
            kept = file.read() == asked
    if not kept:
        make_venv(python)
        with open(made_from, "w") as file:
            file.write(asked)
    if not os.path.exists(os.path.join(BIN, "uv")):
        # A shared folder may hold a uv of its own, but not in .venv/bin.
        command = [
            VENV_PYTHON,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--ignore-installed",
            "uv",
        ]
        if subprocess.call(command) != 0:
            stop("pip could not install uv for the reason above; `%s` repeats it." % " ".join(command))
    say("installing requirements-dev.txt into .venv")
    # An editable build leaves the Rust extension in the source tree: one remembered from an earlier clone is of no use.
    uv("--reinstall-package", "zoo-core", "-r", "requirements-dev.txt")
    versions = "import sys, torch; print('Python %d.%d, torch %s' % (*sys.version_info[:2], torch.__version__))"
    say("ready: " + (output(VENV_PYTHON, "-c", versions) or "but `import torch` fails in .venv"))


def native():
    check()
    say("building the Rust extension")
    uv("--no-deps", "--reinstall-package", "zoo-core", "-e", ".")


def nvcc():
    say("installing nvcc into .venv (the extra nvcc of zoo-kernels)")
    uv("-e", "./cuda[nvcc]")


if __name__ == "__main__":
    actions = {"check": check, "install": install, "native": native, "nvcc": nvcc}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(__doc__)
    actions[sys.argv[1]]()
