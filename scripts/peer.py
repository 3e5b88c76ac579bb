"""An environment with real DeepSpeed, which zoo's side of `tests/clients` is compared with.

    python scripts/peer.py [FOLDER]    make it, .peer by default, with the versions of tests/clients/peers.json

`make peer` does the same (PEER= names another folder). It is apart from .venv, where the name deepspeed is zoo's: most
tests of that name would see the other package.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
RECORDING = ROOT / "tests/clients/peers.json"
# DeepSpeed compiles its CPU optimizers when they are first used; its own requirements name ninja, and setuptools is
# what its setup.py runs with.
TO_BUILD = ("setuptools", "wheel", "ninja")
PROBE = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def stop(sentence: str) -> None:
    sys.exit(f"zoo: peer: {sentence}")


def say(sentence: str) -> None:
    print(f"zoo: {sentence}", flush=True)


def uv(*words: object) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    # Nothing is compiled beforehand, with or without a CUDA toolkit.
    environment |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    environment.setdefault("UV_HTTP_TIMEOUT", "300")
    command = [str(VENV / "bin/uv"), *map(str, words)]
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
        stop(f"`{' '.join(command)}` failed for the reason above")


def installed(python: Path, names: list[str]) -> dict[str, str] | None:
    """Versions of these packages; None where one is missing, or Python."""
    if not python.exists():
        return None
    done = subprocess.run([python, "-c", PROBE, *names], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def make(folder: Path) -> None:
    versions: dict[str, str] = json.loads(RECORDING.read_text(encoding="utf-8"))["versions"]
    python = folder / "bin/python"
    if installed(python, list(versions)) == versions:
        say(f"{folder} is there, with the versions of {RECORDING.relative_to(ROOT)}")
        return
    begun = time.monotonic()
    if not python.exists():
        say(f"making {folder}")
        uv("venv", "--quiet", "--python", VENV / "bin/python", folder)
    needs = [f"{name}=={version}" for name, version in versions.items() if name != "deepspeed"]
    say(f"installing {', '.join(needs)}")
    uv("pip", "install", "--quiet", "--python", python, *needs, *TO_BUILD)
    # Last and not isolated: its setup.py looks at the torch that is there.
    wanted = f"deepspeed=={versions['deepspeed']}"
    say(f"installing {wanted}")
    uv("pip", "install", "--quiet", "--python", python, "--no-build-isolation", wanted)
    if (found := installed(python, list(versions))) != versions:
        stop(f"{folder} has {found}, and the recording was made with {versions}")
    say(f"{folder} is ready after {time.monotonic() - begun:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=".peer", help="of the environment")
    folder = Path(parser.parse_args().folder).absolute()
    make(folder)
    name = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    for command, what in (
        ("make campaign ARGS=tests/clients", "zoo beside it, every case"),
        (".venv/bin/python -m tests.clients.page", "the same as a page, docs/clients/<date>.md"),
        (".venv/bin/python -m tests.clients.cases", "record what tests/clients/peers.json lacks"),
    ):
        print(f"  {f'ZOO_PEER={name} {command}':<68} {what}")


if __name__ == "__main__":
    main()
