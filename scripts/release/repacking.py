"""Wheels whose bytes depend on nothing but their contents: not on who built them, where, or when."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import time
import zipfile
from pathlib import Path

SBOM = re.compile(r"\.dist-info/sboms/.+\.cyclonedx\.json$")
_PLACE = re.compile(r"path\+file://[^#\"]*?/(?=crates/)")


def repack(wheel: Path, epoch: int, *, build: str = "") -> Path:
    """Write a wheel again: files in the order of their names and RECORD last, times of ``epoch``, modes 644 or 755, one
    level of compression; in SBOMs no place of the machine that built. RECORD has the new checksums.

    Args:
        build: a build tag (PEP 427), which is put into the name. Returns: the wheel's path.
    """
    with zipfile.ZipFile(wheel) as file:
        infos = [info for info in file.infolist() if not info.is_dir()]
        contents = {info.filename: (file.read(info), info.external_attr >> 16) for info in infos}
    # A package may have such folders of its own.
    (record,) = (name for name in contents if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
    del contents[record]
    for name, (data, mode) in contents.items():
        if SBOM.search(name):
            contents[name] = cleaned(data), mode
        if build and name == record.replace("/RECORD", "/WHEEL"):
            contents[name] = re.sub(rb"(?m)^(Root-Is-Purelib: .*)$", rb"\1\nBuild: " + build.encode(), data), mode
    rows = [[name, f"sha256={checksum(data)}", str(len(data))] for name, (data, _) in sorted(contents.items())]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*rows, [record, "", ""]])
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, (data, mode) in [*sorted(contents.items()), (record, (text.getvalue().encode(), 0o644))]:
            info = zipfile.ZipInfo(name, time.gmtime(max(epoch, 315532800))[:6])  # a zip knows no time before 1980
            info.external_attr = (0o100755 if mode & 0o111 else 0o100644) << 16
            info.compress_type, info.create_system = zipfile.ZIP_DEFLATED, 3
            file.writestr(info, data)
    wheel.unlink()
    distribution, version, *tags = wheel.name.split("-")
    return new.replace(wheel.with_name("-".join([distribution, version, *filter(None, [build]), *tags[-3:]])))


def checksum(data: bytes) -> str:
    """As RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def cleaned(data: bytes) -> bytes:
    """An SBOM of Rust crates without where their sources lay, and without its time: the wheel has one."""
    found = json.loads(_PLACE.sub("path+file:///zoo/", data.decode()))
    found.pop("serialNumber", None)
    found.get("metadata", {}).pop("timestamp", None)
    return (json.dumps(found, indent=1, sort_keys=True) + "\n").encode()
