"""The index: what is where in a checkpoint's files, in columns of integers.

A *state* is a logical tensor in one role, with a dtype. A *piece* is a run of consecutive elements of a state, in
row-major order, or a box of it, in the order of the box; it lies in one file without gaps. Columns are sorted by state
and by the first element, so that a run is found by bisection, and checks are arithmetic on whole columns: 10⁶ runs take
a fraction of a second. Boxes, which parts of a matrix are (its columns, say) that would be a run for each row, are few:
``box`` says where the d offsets and the d sizes of one are in ``extents``, -1 for a run.

As bytes: b"zooindex", the length of the header (8 bytes, little endian), the header (JSON: names, shapes, dtypes,
files, and of each column where it is), padding to 8, and the columns, little endian. Sizes are checked before anything
is made of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format.exact import dtype_named
from zoo.checkpointing.format.names import check_file
from zoo.layout import Box, tiles

BLOCK_BYTES = 1 << 20
"""Of a file, bytes that have a checksum together."""
_MAGIC = b"zooindex"
_COLUMNS: dict[str, str] = {
    "state": "<i4", "start": "<i8", "length": "<i8", "file": "<i4", "offset": "<i8", "box": "<i4", "extents": "<i8",
    "own_rank": "<i4", "own_name": "<i4", "own_length": "<i8", "own_file": "<i4", "own_offset": "<i8",
    "sums": "<u4",
}  # fmt: skip
_OF_BOXES = ("box", "extents")
OF_PIECES = ("state", "start", "length", "file", "offset", "box")
"""The columns that have one number for each piece."""
Column = npt.NDArray[Any]


@dataclass(frozen=True)
class State:
    """A logical tensor in one role."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileEntry:
    """A file: its name, its size in bytes, and where in the column of sums those of its blocks begin."""

    name: str
    size: int
    first_sum: int = -1

    @property
    def num_blocks(self) -> int:
        """Blocks that have a sum."""
        return -(-self.size // BLOCK_BYTES)


@dataclass
class Index:
    """See the head of the file. ``own_*`` are tensors that belong to one rank and no logical tensor."""

    states: list[State]
    own_names: list[tuple[str, str]]
    files: list[FileEntry]
    columns: dict[str, Column]
    _of: dict[tuple[str, str], int] = field(default_factory=dict, repr=False)
    _rows: Column = field(default_factory=lambda: np.zeros(1, np.int64), repr=False)
    _boxes: dict[int, Box] = field(default_factory=dict, repr=False)
    _with_boxes: frozenset[int] = field(default_factory=frozenset, repr=False)

    def __post_init__(self) -> None:
        for number, state in enumerate(self.states):
            if self._of.setdefault((state.name, state.role), number) != number:
                raise CheckpointError(f"the index has {state.role} {state.name!r} twice")
        self._rows = np.searchsorted(self.columns["state"], np.arange(len(self.states) + 1))
        if not len(self.columns["box"]):
            self.columns["box"] = np.full(len(self.columns["state"]), -1, _COLUMNS["box"])

    # Finding ---------------------------------------------------------------------------------------------------------

    def number_of(self, name: str, role: str) -> int | None:
        """The state of this name in this role; None: there is none."""
        return self._of.get((name, role))

    def meeting(self, state: int, start: int, stop: int) -> range:
        """The rows of the pieces that have some of the elements [start, stop) of a state."""
        low, high = int(self._rows[state]), int(self._rows[state + 1])
        if start >= stop or low == high:
            return range(0)
        starts = self.columns["start"][low:high]
        if state in self._with_boxes:  # whose last elements are in no order
            return range(low, low + int(np.searchsorted(starts, stop, "left")))
        first = int(np.searchsorted(starts, start, "right")) - 1
        last = int(np.searchsorted(starts, stop, "left"))
        return range(low + max(first, 0), low + last)

    def box_of(self, row: int) -> Box | None:
        """The box that a piece is; None: it is a run."""
        return self._boxes.get(row)

    def sums_of(self, file: int) -> Column | None:
        """The CRC-32C of each block of a file; None where there are none (version 2)."""
        entry = self.files[file]
        if entry.first_sum < 0:
            return None
        return self.columns["sums"][entry.first_sum : entry.first_sum + entry.num_blocks]

    # Checking --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every element of every state is there exactly once, and every piece lies in its file.

        Raises:
            CheckpointError: names the tensor, the elements and the file.
        """
        self._check_places("", [dtype_named(state.dtype).itemsize for state in self.states], "state")
        self._check_places("own_", [dtype_named(dtype).itemsize for _, dtype in self.own_names], "own_name")
        self._check_overlap()
        for entry in self.files:
            if entry.size < 0 or (
                entry.first_sum >= 0 and entry.first_sum + entry.num_blocks > len(self.columns["sums"])
            ):
                raise CheckpointError(f"the index has no checksums for all of the {entry.size} bytes of {entry.name}")
        c = self.columns
        state, start, length = c["state"], c["start"], c["length"]
        if len(state) and (
            np.any(state[1:] < state[:-1]) or np.any((state[1:] == state[:-1]) & (start[1:] < start[:-1]))
        ):
            raise CheckpointError("the columns of the index are not sorted by state and first element")
        self._read_boxes()
        filled = length > 0
        if self._with_boxes:
            self._check_boxes()
            filled &= ~np.isin(state, list(self._with_boxes))
        state, start, length, file = state[filled], start[filled], length[filled], c["file"][filled]
        ends = start + length
        first = np.ones(len(state), bool)
        first[1:] = state[1:] != state[:-1]
        expected = np.where(first, 0, np.concatenate([[0], ends[:-1]]) if len(ends) else ends)
        wrong = np.flatnonzero(start != expected)
        if len(wrong):
            row = int(wrong[0])
            self._tell_gap(int(state[row]), int(start[row]), int(expected[row]), file, row, ends)
        covered = np.zeros(len(self.states), np.int64)
        last = np.ones(len(state), bool)
        last[:-1] = state[1:] != state[:-1]
        covered[state[last]] = ends[last]
        numels = np.array([one.numel for one in self.states], dtype=np.int64)
        numels[list(self._with_boxes)] = 0
        for number in np.flatnonzero(covered != numels)[:1]:
            one, end = self.states[number], int(covered[number])
            many = "missing: no rank holds them" if end < one.numel else "too many"
            low, high = min(end, one.numel), max(end, one.numel) - 1
            raise CheckpointError(f"elements {low} to {high} of {one.role} {one.name!r} (of {one.numel}) are {many}")

    def _read_boxes(self) -> None:
        """What ``box`` and ``extents`` say, compared with the other columns."""
        c = self.columns
        self._boxes = {}
        for row in np.flatnonzero(c["box"] >= 0).tolist():
            state, first = self.states[int(c["state"][row])], int(c["box"][row])
            dims = len(state.shape)
            numbers = c["extents"][first : first + 2 * dims].tolist()
            if len(numbers) < 2 * dims or min(numbers, default=0) < 0:
                raise CheckpointError(f"the index has a box of {state.role} {state.name!r} that is none: {numbers}")
            box = Box(tuple(numbers[:dims]), tuple(numbers[dims:]))
            start, length = int(c["start"][row]), int(c["length"][row])
            whole = Box.whole(state.shape)
            if not box.fits(state.shape) or box.numel != length or whole.number_of(box.offsets) != start or not length:
                raise CheckpointError(
                    f"the index has a {box} of {state.role} {state.name!r}, of shape {state.shape}, that does not fit "
                    f"its {length} elements from element {start}"
                )
            self._boxes[row] = box
        self._with_boxes = frozenset(c["state"][list(self._boxes)].tolist())

    def _check_boxes(self) -> None:
        """Where a state has boxes, they and its runs are all of it."""
        c, known = self.columns, set()
        for number in sorted(self._with_boxes):
            state = self.states[number]
            whole, parts = Box.whole(state.shape), []
            for row in range(int(self._rows[number]), int(self._rows[number + 1])):
                box, start = self._boxes.get(row), int(c["start"][row])
                stop = start + int(c["length"][row])
                if stop > whole.numel and box is None:
                    raise CheckpointError(
                        f"elements {whole.numel} to {stop - 1} of {state.role} {state.name!r} are too many"
                    )
                parts += [box] if box is not None else whole.run(start, stop)
            cut = (state.shape, tuple(parts))
            if cut not in known and not tiles(parts, state.shape):
                raise CheckpointError(
                    f"the {len(parts)} parts of {state.role} {state.name!r}, of shape {state.shape}, have not each of "
                    "its elements exactly once: some are missing, or are there twice"
                )
            known.add(cut)

    def _tell_gap(self, state: int, start: int, expected: int, file: Column, row: int, ends: Column) -> None:
        one = self.states[state]
        what = f"{one.role} {one.name!r}"
        if start > expected:
            raise CheckpointError(f"elements {expected} to {start - 1} of {what} are missing: no rank holds them")
        last = min(expected, int(ends[row])) - 1
        names = [self.files[int(file[r])].name for r in (row - 1, row)]
        raise CheckpointError(f"elements {start} to {last} of {what} are there twice: in {names[0]} and in {names[1]}")

    def _check_places(self, prefix: str, itemsizes: Sequence[int], key: str) -> None:
        c = self.columns
        kinds, length, file, offset = c[key], c[f"{prefix}length"], c[f"{prefix}file"], c[f"{prefix}offset"]
        if not len(kinds):
            return
        for column, limit in ((kinds, len(itemsizes)), (file, len(self.files))):
            if int(column.min()) < 0 or int(column.max()) >= limit:
                raise CheckpointError("the index names a tensor or a file that it does not have")
        sizes = np.array([entry.size for entry in self.files], dtype=np.int64)
        # Lengths are compared with room // itemsize: a product of a huge length would wrap around.
        room = (sizes[file] - offset) // np.array(itemsizes, dtype=np.int64)[kinds]
        wrong = np.flatnonzero((offset < 0) | (length < 0) | (offset > sizes[file]) | (length > room))
        if prefix == "" and len(wrong) == 0:
            wrong = np.flatnonzero(c["start"] < 0)
        if len(wrong):
            row = int(wrong[0])
            raise CheckpointError(
                f"the index has {int(length[row])} elements at byte {int(offset[row])} of "
                f"{self.files[int(file[row])].name}, which has {int(sizes[file[row]])} bytes"
            )

    def _check_overlap(self) -> None:
        """Pieces have together no more bytes than their file: otherwise a small file would be a large tensor."""
        held = np.zeros((2, len(self.files)), dtype=np.int64)  # in units of 1 and of 2**31 bytes: sums stay exact
        c = self.columns
        for prefix, key, dtypes in (
            ("", "state", [state.dtype for state in self.states]),
            ("own_", "own_name", [dtype for _, dtype in self.own_names]),
        ):
            if len(c[key]):
                each = np.array([dtype_named(dtype).itemsize for dtype in dtypes], dtype=np.int64)[c[key]]
                num_bytes = c[f"{prefix}length"] * each
                np.add.at(held[0], c[f"{prefix}file"], num_bytes & 0x7FFFFFFF)
                np.add.at(held[1], c[f"{prefix}file"], num_bytes >> 31)
        for entry, low, high in zip(self.files, *held.tolist(), strict=True):
            if low + (high << 31) > entry.size:
                raise CheckpointError(
                    f"the index has {low + (high << 31)} bytes of tensors in {entry.name}, which has {entry.size}: "
                    "some of them are there twice"
                )

    # As bytes --------------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """See the head of the file."""
        place, columns = 0, {}
        written = dict(self.columns)
        if not np.any(written["box"] >= 0):
            written["box"] = written["extents"] = np.zeros(0, np.int64)
        for name, kind in _COLUMNS.items():
            columns[name] = [len(written[name]), place]
            place += -(-len(written[name]) * np.dtype(kind).itemsize // 8) * 8
        header = json.dumps({
            "block_bytes": BLOCK_BYTES,
            "states": [[s.name, s.role, s.dtype, list(s.shape)] for s in self.states],
            "own_names": [list(pair) for pair in self.own_names],
            "files": [[f.name, f.size, f.first_sum] for f in self.files],
            "columns": columns,
        }, separators=(",", ":")).encode()  # fmt: skip
        header += b" " * (-len(header) % 8)
        parts = [_MAGIC, len(header).to_bytes(8, "little"), header]
        for name, kind in _COLUMNS.items():
            raw = np.ascontiguousarray(written[name], dtype=kind).tobytes()
            parts += [raw, b"\0" * (-len(raw) % 8)]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Index:
        """The reverse; checked as :meth:`check` does.

        Raises:
            CheckpointError: it is no index, or one that contradicts itself.
        """
        try:
            found = cls._decode(data)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the index cannot be read: {error!r}") from None
        found.check()
        return found

    @classmethod
    def _decode(cls, data: bytes) -> Index:
        size = int.from_bytes(data[8:16], "little")
        if data[:8] != _MAGIC or size > len(data) - 16:
            raise CheckpointError("the index is cut off, or is none")
        header = json.loads(data[16 : 16 + size])
        if header["block_bytes"] != BLOCK_BYTES:
            raise CheckpointError(
                f"the index has blocks of {header['block_bytes']} bytes; this zoo reads {BLOCK_BYTES}"
            )
        body, columns = memoryview(data)[16 + size :], {}
        for name, kind in _COLUMNS.items():
            if name in _OF_BOXES and name not in header["columns"]:  # version 3
                columns[name] = np.zeros(0, kind)
                continue
            count, place = header["columns"][name]
            itemsize = np.dtype(kind).itemsize
            if not 0 <= count <= len(body) // itemsize or not 0 <= place <= len(body) - count * itemsize:
                raise CheckpointError(f"the column {name!r} of the index lies outside of it")
            columns[name] = np.frombuffer(body, dtype=kind, count=count, offset=place)
        if not len(columns["box"]):
            columns["box"] = np.full(len(columns["state"]), -1, _COLUMNS["box"])
        for group in (OF_PIECES,
                      ("own_rank", "own_name", "own_length", "own_file", "own_offset")):  # fmt: skip
            if len({len(columns[name]) for name in group}) > 1:
                raise CheckpointError("the columns of the index have different lengths")
        states = [State(_text(n), _text(r), _text(d), _shape(s)) for n, r, d, s in header["states"]]
        files = [FileEntry(check_file(n), _number(s), _number(f, -1)) for n, s, f in header["files"]]
        shapes: dict[str, tuple[int, ...]] = {}
        for state in states:
            if shapes.setdefault(state.name, state.shape) != state.shape:
                raise CheckpointError(f"the index has {state.name!r} with two shapes")
        return cls(states, [(_text(n), _text(d)) for n, d in header["own_names"]], files, columns)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"the index has {value!r} in the place of a name")
    return value


def _number(value: object, low: int = 0) -> int:
    if type(value) is not int or not low <= value < 1 << 62:
        raise CheckpointError(f"the index has {value!r} in the place of a size")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    found = tuple(_number(dim) for dim in value)
    if math.prod(found) >= 1 << 62 or len(found) > 64:
        raise CheckpointError(f"the index has the shape {found}")
    return found


def empty_columns() -> dict[str, Column]:
    """Of an index without pieces."""
    return {name: np.zeros(0, kind) for name, kind in _COLUMNS.items()}
