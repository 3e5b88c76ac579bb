"""The files of a release: built, built again elsewhere, compared, and tried."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts import wheels
from scripts.release import sbom
from scripts.release.versions import ROOT, checked, stop

SUMS = "SHA256SUMS"


def say(sentence: str) -> None:
    print(f"zoo: release: {sentence}", flush=True)


def build() -> list[Path]:
    """Wheels and source archives, and beside them the SBOM and the checksums; the files."""
    wheels.build()
    version = checked()
    files = released(wheels.DIST)
    sbom.write(wheels.DIST / f"zoo-{version}.cdx.json", version, files)
    files = released(wheels.DIST)
    lines = [f"{digest(path)}  {path.relative_to(wheels.DIST)}\n" for path in files]
    (wheels.DIST / SUMS).write_text("".join(lines), encoding="utf-8")
    say(f"{len(files)} files and {SUMS} are in {wheels.DIST}")
    return files


def released(folder: Path) -> list[Path]:
    """All files but the checksums."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def twice() -> None:
    """Two builds of this commit, in clean clones at different paths, whose caches, folders and times differ.

    What the second one has made is in dist/.
    """
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        stop("there are changes that are no part of a commit, and a release is of a commit: commit them first.")
    kept: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="zoo-release-") as name:
        for number, place in enumerate(("a", "a/much/longer/place/for the second")):
            began = time.monotonic()
            clone = Path(name) / place / "zoo"
            clone.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            environment = {
                **os.environ, **installed(), "HOME": str(Path(name) / f"home-{number}"),
                "ZOO_CACHE_DIR": str(Path(name) / f"cache-{number}"), "PYTHONHASHSEED": str(number),
                "TZ": ("UTC", "Asia/Tokyo")[number], "LC_ALL": "C.UTF-8",
            }  # fmt: skip
            old = os.umask((0o022, 0o077)[number])
            try:
                words = [sys.executable, "-m", "scripts.release", "build"]
                subprocess.run(words, cwd=clone, env=environment, check=True)
            finally:
                os.umask(old)
            dist = clone / "dist"
            kept.append({str(path.relative_to(dist)): digest(path) for path in released(dist)})
            say(f"build {number + 1} of 2: {len(kept[-1])} files in {time.monotonic() - began:.0f} s")
            keep(dist, wheels.DIST if number else Path(name) / "first")
        different = sorted(path for path in kept[0].keys() | kept[1].keys() if kept[0].get(path) != kept[1].get(path))
        if different:
            aside = ROOT / "build/first"
            keep(Path(name) / "first", aside)
            stop(f"two builds differ in {', '.join(different)}; the first is in {aside}, the second in {wheels.DIST}.")
    say(f"two builds are equal, byte for byte: {len(kept[0])} files")


def keep(made: Path, place: Path) -> None:
    """A copy in the place of what was there, which everybody may read, whatever the umask of the build was."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(made, place)
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def installed() -> dict[str, str]:
    """Where tools and what they have downloaded are, wherever HOME is."""
    home = Path.home()
    places = {
        "ZOO_VENV": wheels.VENV, "CARGO_HOME": home / ".cargo", "RUSTUP_HOME": home / ".rustup",
        "UV_CACHE_DIR": home / ".cache/uv",
    }  # fmt: skip
    return {name: os.environ.get(name, str(place)) for name, place in places.items()}


def try_them(pythons: list[str]) -> None:
    """Train with what is in dist/, and nothing but that, on each of these; none: the Python of .venv, at length."""
    subprocess.run([sys.executable, "-m", "scripts.wheels", "try", *pythons], cwd=ROOT, check=True)
