"""The files of a release: wheels that do not tell who packed them, and an SBOM that names everything."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
from scripts import wheels
from scripts.release import building, sbom
from scripts.release.repacking import repack
from scripts.release.versions import ROOT, found

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

FILES = {
    "zoo/b.py": b"b = 1\n" * 100, "zoo/a.py": b"a = 1\n", "zoo/x.so": bytes(range(256)),
    "zoo/folder/q-1.dist-info/RECORD": b"a record of something else,,\n",
    "p-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "p-1.dist-info/METADATA": b"Name: p\n",
}  # fmt: skip


def wheel(folder: Path, place: str, seed: int) -> Path:
    """The same contents, packed by another hand each time."""
    dice = random.Random(seed)
    folder.mkdir()
    path = folder / "p-1-py3-none-any.whl"
    document = {
        "serialNumber": f"urn:{seed}", "metadata": {"timestamp": str(seed)},
        "ref": f"path+file://{place}/crates/zoo-io#0.1.0",
    }  # fmt: skip
    files = {**FILES, "p-1.dist-info/sboms/x.cyclonedx.json": json.dumps(document).encode()}
    with zipfile.ZipFile(path, "w", dice.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as file:
        for name in dice.sample([*files], len(files)):
            info = zipfile.ZipInfo(name, (1990 + seed, 1, 1, 0, 0, 0))
            info.external_attr = (0o100755 if name.endswith(".so") else dice.choice([0o100600, 0o100664])) << 16
            file.writestr(info, files[name])
        file.writestr("p-1.dist-info/RECORD", f"wrong,{seed},\n")
    return path


def test_wheels_of_the_same_contents_are_the_same_bytes(tmp_path: Path) -> None:
    made = [repack(wheel(tmp_path / str(i), f"/some/where-{i}/else", i), 1_700_000_000) for i in range(4)]
    assert len({path.read_bytes() for path in made}) == 1
    with zipfile.ZipFile(made[0]) as file:
        assert file.testzip() is None
        names = file.namelist()
        assert names[-1].endswith("RECORD")
        assert names[:-1] == sorted(names[:-1])
        assert {info.date_time for info in file.infolist()} == {(2023, 11, 14, 22, 13, 20)}
        assert {oct(info.external_attr >> 16) for info in file.infolist()} == {"0o100644", "0o100755"}
        assert {name: file.read(name) for name in FILES} == FILES
        rows = list(csv.reader(io.StringIO(file.read(names[-1]).decode())))
        assert [row[0] for row in rows] == names
        for name, checksum, size in rows[:-1]:
            sha = base64.urlsafe_b64encode(hashlib.sha256(file.read(name)).digest()).rstrip(b"=").decode()
            assert (checksum, int(size)) == (f"sha256={sha}", len(file.read(name)))
        inside = file.read("p-1.dist-info/sboms/x.cyclonedx.json").decode()
    assert "where" not in inside
    assert "path+file:///zoo/crates/zoo-io#0.1.0" in inside


def test_what_differs_inside_differs(tmp_path: Path) -> None:
    one, other = wheel(tmp_path / "1", "/a", 1), wheel(tmp_path / "2", "/a", 2)
    with zipfile.ZipFile(other, "a") as file:
        file.writestr("zoo/c.py", "c = 1\n")
    assert repack(one, 1_700_000_000).read_bytes() != repack(other, 1_700_000_000).read_bytes()


def test_a_build_tag_is_in_the_name_and_inside(tmp_path: Path) -> None:
    path = repack(wheel(tmp_path / "1", "/a", 1), 0, build="1torch2.15.0")
    assert path.name == "p-1-1torch2.15.0-py3-none-any.whl"
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    with zipfile.ZipFile(path) as file:
        assert b"\nBuild: 1torch2.15.0\n" in file.read("p-1.dist-info/WHEEL")
        assert file.infolist()[0].date_time[0] == 1980


def test_compilers_write_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARGO_HOME", "/a place/cargo")
    monkeypatch.setenv("RUSTFLAGS", "-C debuginfo=0")
    assert wheels.rust_flags(Path("/b")).split("\x1f") == [
        "-C", "debuginfo=0", "--remap-path-prefix=/b=/zoo", "--remap-path-prefix=/a place/cargo=/cargo",
    ]  # fmt: skip
    from zoo.kernels.building.cache import ninja_file
    from zoo.kernels.building.plan import SOURCES, Plan, torch_folder

    text = ninja_file(Plan(name="x", compiler=("c++",), units=(), link_flags=(), key="x"))
    headers = sysconfig.get_path("include")
    for place, name in ((SOURCES, "zoo/kernels"), (torch_folder(), "torch"), (headers, "python")):
        assert f"-ffile-prefix-map={place}={name}" in text


def test_a_library_that_names_a_folder_of_this_machine_is_none(tmp_path: Path) -> None:
    path = tmp_path / "p-1-py3-none-any.whl"
    for data, told in ((b"\0/zoo/a.rs\0", False), (f"\0{wheels.ROOT}/a.rs\0".encode(), True)):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("zoo/x.so", data)
        if told:
            with pytest.raises(SystemExit, match=r"zoo/x\.so in p-1-py3-none-any\.whl names"):
                wheels.check_paths(path)
        else:
            wheels.check_paths(path)


def test_the_tools_of_a_release_have_one_version_each() -> None:
    lines = [line for line in (ROOT / "requirements-release.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines)
    names = {line.partition("==")[0] for line in lines}
    for path in ("pyproject.toml", *(f"{name}/pyproject.toml" for name in ("cuda", "moe", "compression", "dropin"))):
        for need in tomllib.loads((ROOT / path).read_text())["build-system"]["requires"]:
            assert re.split("[<>=]", need)[0] in names


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not on the PATH")
    return sbom.bom(found()["Cargo.toml"][0], [ROOT / "LICENSE"])


def test_the_sbom_names_every_crate_and_package_with_its_licence(document: dict[str, Any]) -> None:
    names = {one["name"] for one in document["components"]}
    assert {*sbom.FOLDERS, "torch", "pydantic", "numpy", "pydantic-core"} <= names
    assert {"pyo3", "zoo-io", "zoo-io-py", "io-uring", "LICENSE"} <= names
    assert not names & {"pytest", "hypothesis", "proptest", "criterion"}, "what only tests need is in no release"
    direct = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {sbom.plain(re.split("[<>=]", need)[0]) for need in direct} <= {sbom.plain(name) for name in names}
    without = [one["name"] for one in document["components"] if one["type"] == "library" and "licenses" not in one]
    assert set(without) <= {"cuda-toolkit"}, "a package that says none is one of NVIDIA's, which torch brings"
    for one in document["components"]:
        if one.get("purl", "").startswith("pkg:cargo/") and not one["name"].startswith("zoo-"):
            assert re.fullmatch("[0-9a-f]{64}", one["hashes"][0]["content"]), one["name"]


def test_the_sbom_hangs_together_and_is_always_the_same(document: dict[str, Any]) -> None:
    refs = [one["bom-ref"] for one in document["components"]]
    assert len(refs) == len(set(refs))
    edges = {one["ref"]: one["dependsOn"] for one in document["dependencies"]}
    assert set(edges) == {"zoo", *refs}
    assert {to for there in edges.values() for to in there} <= set(refs)
    reached, waiting = set[str](), ["zoo"]
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += edges[ref]
    assert {ref for ref in refs if ref.startswith("pkg:")} <= reached
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["serialNumber"])
    assert sbom.bom(found()["Cargo.toml"][0], [ROOT / "LICENSE"]) == document


def test_checksums_are_of_all_files_but_themselves(tmp_path: Path) -> None:
    (tmp_path / "with-kernels").mkdir()
    for name in ("b.whl", "with-kernels/a.whl", building.SUMS):
        (tmp_path / name).write_text(name)
    files = building.released(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in files] == ["b.whl", "with-kernels/a.whl"]
    assert building.digest(files[0]) == hashlib.sha256(b"b.whl").hexdigest()


def test_everybody_may_read_what_a_build_with_a_narrow_umask_has_made(tmp_path: Path) -> None:
    made = tmp_path / "made"
    old = os.umask(0o077)
    try:
        (made / "with-kernels").mkdir(parents=True)
        for name in ("a.whl", "with-kernels/b.whl"):
            (made / name).write_text(name)
    finally:
        os.umask(old)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/old.whl").touch()
    building.keep(made, tmp_path / "dist")
    there = {str(path.relative_to(tmp_path)): path for path in [tmp_path / "dist", *(tmp_path / "dist").rglob("*")]}
    assert {name: oct(path.stat().st_mode & 0o777) for name, path in there.items()} == {
        "dist": "0o755", "dist/a.whl": "0o644", "dist/with-kernels": "0o755", "dist/with-kernels/b.whl": "0o644",
    }  # fmt: skip
    assert there["dist/with-kernels/b.whl"].read_text() == "with-kernels/b.whl"
