"""Damaged and malicious variants of files, and what must be true of reading any of them."""

from __future__ import annotations

import io
import os
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.profiles import examples

from zoo.checkpointing import CheckpointError

_EDITS = st.tuples(
    st.sampled_from(("set", "insert", "delete", "repeat", "number")),
    st.integers(0, 2**31),
    st.one_of(
        st.binary(min_size=1, max_size=4), st.sampled_from((b"R", b"c", b"b", b"\x81", b"\x93", b"Q", b"\xff" * 8))
    ),
)
edits = st.lists(_EDITS, min_size=1, max_size=4)
"""Changes of bytes: what, where (modulo the size), with which bytes."""


def per_file() -> Callable[[Any], Any]:
    """A property of mutants of one file: few of them in quick tests, 10,000 in a campaign."""
    return examples(times=10 if os.environ.get("ZOO_TEST_PROFILE") == "campaign" else 1)


def mutant(raw: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    """``raw`` with the changes made one after the other."""
    out = bytearray(raw)
    for kind, place, data in changes:
        at = place % max(len(out), 1)
        if kind == "set":
            out[at : at + len(data)] = data
        elif kind == "insert":
            out[at:at] = data
        elif kind == "delete":
            del out[at : at + 3 * len(data)]
        elif kind == "repeat":
            out[at:at] = out[at : at + 40] * len(data)
        else:  # a size becomes a large one
            out[at : at + 8] = (2 ** (8 * min(len(data), 5) + 20)).to_bytes(8, "little")
    return bytes(out)


def repacked(archive: Path, changed: Callable[[bytes], bytes], entry: str = "data.pkl") -> bytes:
    """A file of torch.save whose entry is another one, with checksums that are right."""
    out = io.BytesIO()
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            raw = old.read(name)
            new.writestr(name, changed(raw) if name.endswith("/" + entry) else raw)
    return out.getvalue()


def harmless(read: Callable[[], Any], size: int) -> Any:
    """What ``read`` returns, or the CheckpointError that it raises.

    Raises:
        AssertionError: another exception came through, a module was imported, or much more memory was allocated than
            the file has bytes. Small files may allocate more: messages, and the archive's directory.
    """
    before = set(sys.modules)
    tracemalloc.start()
    try:
        found = read()
    except CheckpointError as error:
        found = error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} came through: {error}") from error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # Python finds the codec of an old archive's names when the first one comes: a table, and none that a file names.
    imported = {name for name in set(sys.modules) - before if not name.startswith("encodings.")}
    assert not imported, imported
    assert peak < 64 * size + (1 << 20), (peak, size)
    return found
