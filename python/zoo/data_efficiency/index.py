"""Files of one number a sample: safetensors files of one tensor "values", written and read in pieces.

The header is padded so that the numbers begin at a multiple of 4096 bytes, which is what transfers past the page cache
want. Whatever reads safetensors reads these files too.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.io import Handle

FORMAT = "zoo.data_efficiency/1"
_DTYPES = {"I64": torch.int64, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 4096
_MAX_HEADER_BYTES = 1 << 20
_ITEM_BYTES = 8


class IndexWriter:
    """Writes a file piece by piece; it has its name only when it is whole. Several may write the same one at once: the
    last one stays.

    Args:
        path: of the file. count: numbers in it, N.
        dtype: int64 or float64.
        about: what the file is, as text.
        handle: what writes.

    Raises:
        ValueError: nothing can be written there.
    """

    def __init__(self, path: Path, count: int, dtype: torch.dtype, about: dict[str, str], handle: Handle) -> None:
        self.path, self.count, self.dtype = path, count, dtype
        self._part, self._handle = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part"), handle
        described = {
            "__metadata__": {"format": FORMAT, **about},
            "values": {"dtype": _NAMES[dtype], "shape": [count], "data_offsets": [0, _ITEM_BYTES * count]},
        }
        text = json.dumps(described).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._start = 8 + len(text)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._part.open("xb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.truncate(self._start + _ITEM_BYTES * count)
        except OSError as error:
            raise ValueError(
                f"the index {str(path)!r} cannot be written ({error.strerror}); give another directory, or make this "
                "one writable."
            ) from error
        self._file = handle.open(self._part, "w")

    def put(self, start: int, values: torch.Tensor) -> None:
        """Write ``values`` (n,) as the numbers from ``start`` on."""
        if values.dtype is not self.dtype or start + values.numel() > self.count:
            raise AssertionError(
                f"{self.path}: {values.numel()} {values.dtype} at {start} of {self.count} {self.dtype}"
            )
        if values.numel():
            self._handle.pwrite(values.contiguous(), self._file, self._start + _ITEM_BYTES * start)

    def get(self, start: int, stop: int) -> torch.Tensor:
        """(n,) what was written there."""
        found = torch.empty(stop - start, dtype=self.dtype)
        if stop > start:
            self._handle.pread(found, self._part, self._start + _ITEM_BYTES * start)
        return found

    def commit(self) -> None:
        """All is written: give the file its name."""
        self._file.close()
        with self._part.open("rb") as file:
            os.fsync(file.fileno())
        self._part.replace(self.path)

    def discard(self) -> None:
        """Remove what was written."""
        self._file.close()
        self._part.unlink(missing_ok=True)


class Index:
    """A file of N numbers; memory-mapped, so that single ones cost no more than their page.

    Attributes:
        path: of the file. dtype: of its numbers. about: what it says of itself.
        values: (N,) numpy array on the file.

    Raises:
        ValueError: it is no such file, or not whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
                text = file.read(length) if length <= min(_MAX_HEADER_BYTES, size) else b""
        except OSError as error:
            raise ValueError(
                f"the index {str(path)!r} cannot be read ({error.strerror}); give a file that "
                "zoo.data_efficiency.DataAnalyzer wrote."
            ) from None
        self._start = 8 + length
        self.dtype, count, self.about = self._described(text)
        if size != self._start + _ITEM_BYTES * count:
            raise self._wrong(f"it has {size} bytes, and {count} numbers need {self._start + _ITEM_BYTES * count}")
        kind: Any = "<i8" if self.dtype is torch.int64 else "<f8"
        self.values = np.memmap(self.path, dtype=kind, mode="r", offset=self._start, shape=(count,))

    def _described(self, text: bytes) -> tuple[torch.dtype, int, dict[str, str]]:
        try:
            header = json.loads(text)
            about, described = header["__metadata__"], header["values"]
            (count,), dtype = described["shape"], _DTYPES[described["dtype"]]
            sound = type(count) is int and 0 < count < 1 << 60 and described["data_offsets"] == [0, _ITEM_BYTES * count]
            if not sound or len(header) != 2 or about["format"] != FORMAT:
                raise ValueError
            about = {str(key): str(value) for key, value in about.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._wrong("its header is not that of an index") from None
        return dtype, count, about

    def _wrong(self, what: str) -> ValueError:
        return ValueError(
            f"the index {str(self.path)!r} cannot be used: {what}. Give a file that "
            "zoo.data_efficiency.DataAnalyzer wrote."
        )

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def pieces(self, count: int, handle: Handle) -> Iterator[torch.Tensor]:
        """All numbers in order, at most ``count`` at a time, read past the mapping."""
        for start in range(0, len(self), count):
            piece = torch.empty(min(count, len(self) - start), dtype=self.dtype)
            handle.pread(piece, self.path, self._start + _ITEM_BYTES * start)
            yield piece


class SortedIndex:
    """Samples in the order of a metric, and how many of them a difficulty allows.

    Args:
        samples: file of sample numbers in the order of the metric.
        values: file of the metric's values in that order; None where only percentiles are asked for.
        num_samples: of the data set.

    Raises:
        ValueError: they do not belong to each other or to the data set, or are not sorted.
    """

    def __init__(self, samples: str, values: str | None, num_samples: int) -> None:
        self.samples = Index(samples)
        self.values = Index(values) if values is not None else None
        for index in (self.samples, self.values):
            if index is not None and len(index) != num_samples:
                raise ValueError(
                    f"the index {str(index.path)!r} is of {len(index)} samples, and the data set has {num_samples}; "
                    "analyse this data set."
                )
        self._check(num_samples)

    def _check(self, num_samples: int, piece: int = 1 << 20) -> None:
        """Every sample once (as far as a sum of 64-bit hashes tells), and values in order."""
        found = expected = np.uint64(0)
        before: Any = None
        for start in range(0, num_samples, piece):
            ids = np.asarray(self.samples.values[start : start + piece])
            if self.samples.dtype is not torch.int64 or ids.min() < 0 or ids.max() >= num_samples:
                raise ValueError(f"the index {str(self.samples.path)!r} does not hold the numbers of samples.")
            with np.errstate(over="ignore"):
                found += _hashes(ids).sum(dtype=np.uint64)
                expected += _hashes(np.arange(start, start + len(ids))).sum(dtype=np.uint64)
            if self.values is not None:
                values = np.asarray(self.values.values[start : start + piece])
                if not (values[1:] >= values[:-1]).all() or (before is not None and values[0] < before):
                    raise ValueError(f"the index {str(self.values.path)!r} is not in the order of its values.")
                before = values[-1]
        if found != expected:
            raise ValueError(f"the index {str(self.samples.path)!r} does not hold every sample once.")

    def up_to(self, value: float) -> int:
        """How many samples have a metric of at most ``value``."""
        if self.values is None:
            raise AssertionError("an index without values was asked for one")
        return int(np.searchsorted(self.values.values, value, side="right"))

    def percentile(self, percent: float) -> int:
        """How many samples are the ``percent`` per cent with the lowest metric, rounded up."""
        return min(len(self.samples), -int(-len(self.samples) * percent // 100))


def _hashes(numbers: Any) -> Any:
    z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return z ^ (z >> np.uint64(27))
