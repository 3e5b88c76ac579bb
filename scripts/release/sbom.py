"""What is in a release: every crate that is compiled into it and every package that it asks for, as CycloneDX."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import uuid
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from scripts.release.versions import ROOT

FOLDERS = {"zoo-core": ".", "zoo-kernels": "cuda", "zoo-moe": "moe", "zoo-compression": "compression"}
SPEC = "1.6"
# Names of licences that packages write in their own ways, as SPDX has them.
_SPDX = {
    "apache 2.0": "Apache-2.0", "apache software license": "Apache-2.0", "apache license 2.0": "Apache-2.0",
    "mit license": "MIT", "bsd license": "BSD-3-Clause", "bsd-3-clause license": "BSD-3-Clause", "bsd": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause", "isc license": "ISC", "isc license (iscl)": "ISC",
    "python software foundation license": "PSF-2.0", "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
}  # fmt: skip


def write(path: Path, version: str, files: list[Path]) -> None:
    """The document, of the files of a release."""
    document = bom(version, files)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def bom(version: str, files: list[Path]) -> dict[str, Any]:
    """CycloneDX 1.6. Versions of crates are those of Cargo.lock, of packages those that this environment has: others
    that the requirements allow would do too.

    Args:
        files: their names and checksums are components as well.
    """
    packages, needs = python_packages()
    crates, uses = rust_crates()
    made = [
        {"type": "file", "bom-ref": f"file:{path.name}", "name": path.name,
         "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]}
        for path in sorted(files)
    ]  # fmt: skip
    own = [one for one in packages if one["name"] in FOLDERS]
    root = {"type": "application", "bom-ref": "zoo", "name": "zoo", "version": version}
    licences = [{"license": {"id": "Apache-2.0"}}]
    edges = {
        "zoo": sorted(one["bom-ref"] for one in own), **needs, **uses,
        **{one["bom-ref"]: [] for one in made},
    }  # fmt: skip
    core = next(one["bom-ref"] for one in own if one["name"] == "zoo-core")
    edges[core] = sorted([*edges[core], *(ref for ref in uses if ref.startswith("pkg:cargo/zoo-io-py@"))])
    # The same contents have the same number.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([packages, crates, made], sort_keys=True))
    return {
        "bomFormat": "CycloneDX", "specVersion": SPEC, "serialNumber": f"urn:uuid:{number}", "version": 1,
        "metadata": {"component": {**root, "licenses": licences}},
        "components": [*packages, *crates, *made],
        "dependencies": [{"ref": ref, "dependsOn": to} for ref, to in sorted(edges.items())],
    }  # fmt: skip


def python_packages() -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """What the distributions ask for when they run, without extras; and which asks for which."""
    found: dict[str, dict[str, Any]] = {}
    needs: dict[str, list[str]] = {}
    waiting = list(FOLDERS)
    while waiting:
        name = plain(waiting.pop())
        if name in found:
            continue
        there = distribution(name)
        wanted = [need for need in map(_needed, there.requires or []) if need is not None]
        here = [need for need in wanted if _is_installed(need)]
        found[name] = component("pypi", name, there.version, licence_of(there.metadata))
        needs[name] = here
        waiting += here
    edges = {
        found[name]["bom-ref"]: sorted({found[plain(n)]["bom-ref"] for n in there}) for name, there in needs.items()
    }
    return [found[name] for name in sorted(found)], edges


def plain(name: str) -> str:
    """As PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _needed(requirement: str) -> str | None:
    """The name, where it is asked for on this machine and without an extra."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    return parsed.name if parsed.marker is None or parsed.marker.evaluate({"extra": ""}) else None


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def component(kind: str, name: str, version: str, licence: str | None, checksum: str | None = None) -> dict[str, Any]:
    """A library."""
    # What stands behind a + is a part of the version, and means something else in an address.
    purl = f"pkg:{kind}/{name}@{version.replace('+', '%2B')}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if licence:
        is_expression = re.fullmatch(r"\(*[\w.+-]+\)*( (AND|OR|WITH) \(*[\w.+-]+\)*)*", licence)
        found["licenses"] = [{"expression": licence} if is_expression else {"license": {"name": licence}}]
    if checksum:
        found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return found


def licence_of(metadata: Any) -> str | None:
    """An expression of SPDX where the package says one, else what it calls its licence."""
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    # The field License may hold a name or the whole text.
    written = [line.strip() for line in str(metadata.get("License") or "").splitlines() if line.strip()]
    lines = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if line.startswith("License ::")]
    names = [*(written if len(written) == 1 else []), *(line for line in lines if line != "OSI Approved")]
    return _SPDX.get(names[0].lower(), names[0]) if names else None


def rust_crates() -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """What is compiled into zoo.io._native on this platform, from Cargo.lock."""
    words = ["cargo", "metadata", "--format-version=1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]
    said = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    checksums = dict(re.findall(r'name = "([^"]+)"\n.*\n.*\nchecksum = "(\w+)"', (ROOT / "Cargo.lock").read_text()))
    by_id = {one["id"]: one for one in said["packages"]}
    nodes = {
        node["id"]: [d["pkg"] for d in node["deps"] if any(k["kind"] is None for k in d["dep_kinds"])]
        for node in said["resolve"]["nodes"]
    }
    (start,) = (key for key, one in by_id.items() if one["name"] == "zoo-io-py")
    reached, waiting = set(), [start]
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            waiting += nodes[key]
    found = {
        key: component("cargo", by_id[key]["name"], by_id[key]["version"], _slashes(by_id[key]["license"]),
                       checksums.get(by_id[key]["name"]))
        for key in sorted(reached)
    }  # fmt: skip
    edges = {found[key]["bom-ref"]: sorted(found[to]["bom-ref"] for to in nodes[key]) for key in found}
    return sorted(found.values(), key=lambda one: str(one["bom-ref"])), edges


def _slashes(licence: str | None) -> str | None:
    """Old crates write MIT/Apache-2.0 for a choice."""
    return licence.replace("/", " OR ") if licence else None
