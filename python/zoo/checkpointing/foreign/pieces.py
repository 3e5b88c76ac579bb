"""A checkpoint of another system as logical tensors: what ``zoo.checkpointing.Checkpoint`` says."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from zoo.checkpointing.errors import CheckpointError, MissingStateError
from zoo.checkpointing.foreign.unpickling import Unknown
from zoo.layout import Box, tiles

_SHORT_BYTES = 256
"""Runs of fewer bytes are read with what is between them: a read of their own costs more than the bytes."""
_SLAB_BYTES = 4 << 20


class Elements(Protocol):
    """What is stored of a tensor: read in runs of its row-major order."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def numel(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class Run:
    """Elements [start, start + length) of a tensor in one role, from element ``first`` of what is stored."""

    start: int
    length: int
    source: Elements
    first: int = 0


@dataclass(frozen=True)
class BoxPart:
    """A box of a tensor in one role, which is stored as a tensor of its own."""

    box: Box
    source: Elements


class ForeignCheckpoint:
    """An open, checked checkpoint that another system wrote.

    It is read as :class:`zoo.checkpointing.Checkpoint` is, so ``optimizer.load_state(found.read, found.scalars)`` of a
    zoo.zero optimizer continues from it.

    Attributes:
        tag, path: its name and place.
        world_size: of the job that wrote it, 1 where that is not known.
        meta: what else it says, as plain values.
        scalars: "<role>/<name>" → number, as step counts.
        shapes: name → shape of every tensor.
        roles: name → role → dtype, as "float32".
        unknown: (file, global) of every class or function that its pickles name and nobody here knows.
    """

    def __init__(self, tag: str, path: Path, *, world_size: int = 1) -> None:
        self.tag, self.path, self.world_size = tag, path, world_size
        self.meta: dict[str, Any] = {}
        self.scalars: dict[str, float | int] = {}
        self.unknown: list[tuple[str, Unknown]] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._roles: dict[str, dict[str, str]] = {}
        self._runs: dict[tuple[str, str], list[Run]] = {}
        self._boxes: dict[tuple[str, str], list[BoxPart]] = {}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape."""
        return self._shapes

    @property
    def roles(self) -> Mapping[str, Mapping[str, str]]:
        """Name → role → dtype."""
        return self._roles

    # -- what readers of formats say ----------------------------------------------------------------------------------

    def add(self, name: str, role: str, shape: Sequence[int], runs: Iterable[Run]) -> None:
        """A tensor in one role, in runs of its row-major order that are it, in any order.

        Raises:
            CheckpointError: it was there before, has another shape in another role, or the runs are not all of it once.
        """
        ordered = sorted((run for run in runs if run.length), key=lambda run: run.start)
        end, numel = 0, math.prod(shape)
        for run in ordered:
            if run.start != end or run.length < 0 or run.first < 0 or run.first + run.length > run.source.numel:
                raise self._wrong(name, role, end, run.start)
            end += run.length
        if end != numel:
            raise self._wrong(name, role, end, numel)
        self._describe(name, role, shape, {run.source.dtype for run in ordered})
        self._runs[name, role] = ordered

    def add_boxes(
        self, name: str, role: str, shape: Sequence[int], parts: Sequence[BoxPart], dtype: torch.dtype
    ) -> None:
        """A tensor in one role, in boxes that are it.

        Raises:
            CheckpointError: as :meth:`add`, and for boxes that overlap, lie outside, or leave something out.
        """
        whole = tuple(shape)
        for part in parts:
            if not part.box.fits(whole) or part.source.numel != part.box.numel:
                raise CheckpointError(f"{role} {name!r} of shape {whole} has a part {part.box} that does not fit it")
        if not tiles([part.box for part in parts], whole):
            raise CheckpointError(f"the parts of {role} {name!r} overlap, or leave some of its shape {whole} out")
        self._describe(name, role, shape, {part.source.dtype for part in parts} | {dtype})
        parts = [part for part in parts if part.box.numel]
        if all(part.box.is_run_in(whole) for part in parts):  # rows, say: a part of one can be read alone
            runs = [Run(Box.whole(whole).number_of(p.box.offsets), p.box.numel, p.source) for p in parts]
            self._runs[name, role] = sorted(runs, key=lambda run: run.start)
        else:
            self._boxes[name, role] = parts

    def add_whole(self, name: str, role: str, source: Elements, shape: Sequence[int] | None = None) -> None:
        """A tensor that is stored as it is."""
        self.add(name, role, source.shape if shape is None else shape, [Run(0, source.numel, source)])

    def change_role(self, name: str, role: str, other: str) -> None:
        """What was taken for one role is another."""
        if role in self._roles.get(name, {}) and other not in self._roles[name]:
            self._roles[name][other] = self._roles[name].pop(role)
            self._runs[name, other] = self._runs.pop((name, role))

    def remove(self, name: str) -> None:
        """A tensor is not there."""
        for role in self._roles.pop(name):
            self._runs.pop((name, role), None)
            self._boxes.pop((name, role), None)
        del self._shapes[name]

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Give each tensor another name, in ``scalars``, among tied ones and in DeepSpeed's groups too.

        Raises:
            CheckpointError: two would have the same.
        """
        names = {name: name_of(name) for name in self._shapes}
        if len(set(names.values())) < len(names):
            twice = sorted(
                new for name, new in names.items() if new != name and (new in names or name in names.values())
            )
            raise CheckpointError(
                f"checkpoint {self.tag!r} has tensors that would have one name: {', '.join(twice[:5])}"
            )
        self._shapes = {names[name]: shape for name, shape in self._shapes.items()}
        self._roles = {names[name]: roles for name, roles in self._roles.items()}
        self._runs = {(names[name], role): runs for (name, role), runs in self._runs.items()}
        self._boxes = {(names[name], role): parts for (name, role), parts in self._boxes.items()}
        keys = {key: key.partition("/") for key in self.scalars}
        self.scalars = {f"{r}{slash}{names.get(n, n)}": self.scalars[key] for key, (r, slash, n) in keys.items()}
        tied = self.meta.get("tied")
        if isinstance(tied, dict):
            self.meta["tied"] = {name_of(alias): name_of(name) for alias, name in tied.items()}
        for group in self.meta.get("deepspeed", {}).get("param_groups", ()):
            if isinstance(group.get("names"), (list, tuple)):
                group["names"] = [name_of(name) if isinstance(name, str) else name for name in group["names"]]

    def _describe(self, name: str, role: str, shape: Sequence[int], dtypes: set[torch.dtype]) -> None:
        shape = tuple(shape)
        if role in self._roles.get(name, {}) or self._shapes.get(name, shape) != shape:
            raise CheckpointError(f"{role} {name!r} is there twice, or has several shapes, {shape} among them")
        if len(dtypes) > 1:
            raise CheckpointError(f"{role} {name!r} is stored in several dtypes: {', '.join(sorted(map(str, dtypes)))}")
        self._shapes[name] = shape
        dtype = dtypes.pop() if dtypes else torch.float32
        self._roles.setdefault(name, {})[role] = str(dtype).removeprefix("torch.")

    def _wrong(self, name: str, role: str, end: int, start: int) -> CheckpointError:
        low, high, what = min(end, start), max(end, start), "missing" if end < start else "there twice or too many"
        return CheckpointError(f"elements {low} to {high - 1} of {role} {name!r} in {str(self.path)!r} are {what}")

    # -- what users read ----------------------------------------------------------------------------------------------

    def read(self, name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
        """Elements [start, start + length) of a tensor in one role: (length,), in the dtype they are stored in.

        In the place of ``start`` may be a box of ``length`` elements, which come in its row-major order.

        Raises:
            MissingStateError: no such tensor or role (also a KeyError).
            CheckpointError: a range outside of it, or a file that cannot be read any more.
        """
        if isinstance(start, Box):
            return self.read_box(name, role, start).reshape(-1)
        dtype, numel = self._dtype_of(name, role), math.prod(self._shapes[name])
        if start < 0 or length < 0 or start + length > numel:
            raise CheckpointError(
                f"[{start}, {start + length}) lies outside of {role} {name!r}, which has {numel} elements in "
                f"checkpoint {self.tag!r}"
            )
        if (name, role) in self._boxes:
            return self._read_boxes(name, role, start, length, dtype)
        out = torch.empty(length, dtype=dtype)
        runs = self._runs[name, role]
        begin = max(bisect.bisect_right([run.start for run in runs], start) - 1, 0)
        for run in runs[begin:]:
            low, high = max(run.start, start), min(run.start + run.length, start + length)
            if run.start >= start + length:
                break
            if low < high:
                out[low - start : high - start] = run.source.read(run.first + low - run.start, high - low)
        return out

    def read_box(self, name: str, role: str, box: Box) -> torch.Tensor:
        """The elements of a box of a tensor in one role: of the shape ``box.sizes``.

        Read are its runs, where they are long enough; else what is between them too, a few MiB at a time. So a rank
        that wants some columns of a large matrix neither reads nor holds the others.

        Raises:
            MissingStateError, CheckpointError: as :meth:`read`.
        """
        dtype = self._dtype_of(name, role)
        whole = Box.whole(self._shapes[name])
        if not box.fits(whole.sizes):
            raise CheckpointError(
                f"{box} lies outside of {role} {name!r}, which has shape {whole.sizes} in checkpoint {self.tag!r}"
            )
        if not box.numel:
            return torch.empty(box.sizes, dtype=dtype)
        out = torch.empty(box.sizes, dtype=dtype)
        if box.is_run_in(whole.sizes):
            return self.read(name, role, whole.number_of(box.offsets), box.numel).view(box.sizes)
        length = next(length for _, length in box.runs_in(whole.sizes))
        if length * dtype.itemsize >= _SHORT_BYTES and (name, role) not in self._boxes:
            flat = out.view(-1)
            for number, (start, _) in enumerate(box.runs_in(whole.sizes)):
                flat[number * length : (number + 1) * length] = self.read(name, role, start, length)
            return out
        for part in _slabs(box, whole.strides[0] * dtype.itemsize):
            start = whole.number_of(part.offsets)
            stop = whole.number_of([stop - 1 for stop in part.stops]) + 1
            at = part.offsets[0] - box.offsets[0]
            found = self.read(name, role, start, stop - start)
            out[at : at + part.sizes[0]] = found.as_strided(part.sizes, whole.strides)
        return out

    def tensor(self, name: str, role: str = "parameter") -> torch.Tensor:
        """A whole tensor in one role, in its shape."""
        shape = self._shapes.get(name, ())
        return self.read(name, role, 0, math.prod(shape)).view(shape)

    def rank_state(self, rank: int) -> dict[str, torch.Tensor]:
        """What belonged to one rank alone: nothing that other systems write could be used."""
        return {}

    def weights(self) -> ForeignCheckpoint:
        """Its parameters and buffers alone."""
        found = ForeignCheckpoint(self.tag, self.path, world_size=self.world_size)
        found.meta, found.unknown = self.meta, self.unknown
        kept = [(n, role) for n, roles in self._roles.items() for role in roles if role in ("parameter", "buffer")]
        for name, role in kept:
            found._shapes[name] = self._shapes[name]
            found._roles.setdefault(name, {})[role] = self._roles[name][role]
            if (name, role) in self._boxes:
                found._boxes[name, role] = self._boxes[name, role]
            else:
                found._runs[name, role] = self._runs[name, role]
        return found

    def close(self) -> None:
        """Nothing to do: files are closed when nobody reads them any more."""

    def __enter__(self) -> ForeignCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _dtype_of(self, name: str, role: str) -> torch.dtype:
        if role not in self._roles.get(name, {}):
            held = ", ".join(sorted(self._roles[name])) if name in self._roles else "no tensor of that name"
            raise MissingStateError(f"checkpoint {self.tag!r} has no {role} of {name!r}; it has {held}")
        dtype: torch.dtype = vars(torch)[self._roles[name][role]]
        return dtype

    def _read_boxes(self, name: str, role: str, start: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(length, dtype=dtype)
        whole = Box.whole(self._shapes[name])
        wanted = whole.run(start, start + length)
        for part in self._boxes[name, role]:
            common = [c for c in map(part.box.intersection, wanted) if c is not None and c.numel]
            if not common:
                continue
            values = part.source.read().view(part.box.sizes)
            for box in common:
                ranges = zip(box.offsets, box.stops, part.box.offsets, strict=True)
                found = values[tuple(slice(low - base, high - base) for low, high, base in ranges)].reshape(-1)
                for at, count in box.runs_in(whole.sizes):
                    out[at - start : at - start + count] = found[:count]
                    found = found[count:]
        return out


def _slabs(box: Box, row_bytes: int) -> Iterable[Box]:
    """A box in parts along its first dim, of which each spans a few MiB of the whole tensor."""
    rows = max(_SLAB_BYTES // max(row_bytes, 1), 1)
    first, last = box.offsets[0], box.stops[0]
    for start in range(first, last, rows):
        yield Box((start, *box.offsets[1:]), (min(rows, last - start), *box.sizes[1:]))
