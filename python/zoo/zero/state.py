"""The training state of a ZeRO optimizer as logical slices: what a checkpoint is made of.

Every element of every logical tensor is owned by exactly one rank, whatever the stage, so the slices of all ranks
together are the state of the run, and any other placement can be filled from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.zero.buckets import Bucket
from zoo.zero.segments import Segment

Reader = Callable[[str, str, int, int], torch.Tensor]
"""``read(name, role, start, length)``: these elements as a 1-D tensor; KeyError when there is no such state."""


@dataclass(frozen=True)
class StateSlice:
    """Elements [start, start + length) of the logical tensor ``name`` of ``shape``, in its row-major order.

    ``role`` is "parameter" (the fp32 value, or a frozen parameter in its own dtype) or the name of an optimizer state.
    ``tensor`` is a flat view of the live state: copy it before training goes on. What lives on NVMe is read when
    ``tensor`` is asked for, and is a copy.
    """

    name: str
    role: str
    start: int
    length: int
    shape: tuple[int, ...]
    source: torch.Tensor | Stored

    @property
    def tensor(self) -> torch.Tensor:
        """The elements, flat."""
        if isinstance(self.source, torch.Tensor):
            return self.source
        return self.source.read()

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.source.dtype


@dataclass(frozen=True)
class Stored:
    """``length`` elements of some state on NVMe, from element ``start`` of what ``load(start, length)`` reads."""

    load: Callable[[int, int], torch.Tensor]
    dtype: torch.dtype
    start: int = 0
    length: int = -1

    def __getitem__(self, part: slice) -> Stored:
        """A part of it, still unread."""
        return Stored(self.load, self.dtype, self.start + part.start, part.stop - part.start)

    def read(self) -> torch.Tensor:
        """The elements."""
        return self.load(self.start, self.length)


def slices_of(
    segments: Iterable[Segment], state: Mapping[Any, Any], buckets: Sequence[Bucket], *, owned: bool = True,
    stored: Callable[[Segment], Mapping[str, Stored]] | None = None,
) -> Iterator[StateSlice]:  # fmt: skip
    """The slices this rank holds; with ``owned`` only its own chunk of every bucket, so that no two ranks overlap.

    ``stored`` gives, by role, what of a segment is on NVMe.
    """
    for segment in segments:
        if owned and not segment.bucket.owns(segment.chunk):
            continue
        entries = state.get(segment.tensor, {})
        roles: dict[str, torch.Tensor | Stored] = {"parameter": segment.value(entries)}
        roles |= tensor_states(entries, segment)
        roles |= stored(segment) if stored is not None else {}
        for role, tensor in roles.items():
            yield from _cut(segment.bucket, segment.slices(), role, tensor)
    for bucket in buckets:
        if not bucket.spec.trainable:
            if owned and not any(bucket.owns(chunk) for chunk in range(bucket.num_chunks)):
                continue
            low, high = bucket.own_range()
            shard = bucket.parameters.shard
            kept = shard if shard is not None else Stored(bucket.parameters.load, bucket.spec.dtype)
            yield from _cut(bucket, bucket.layout.slices(low, high), "parameter", kept)


def _cut(bucket: Bucket, pieces: Sequence[Any], role: str, tensor: torch.Tensor | Stored) -> Iterator[StateSlice]:
    shapes = {t.name: t.shape for t in bucket.layout.tensors}
    for piece in pieces:
        part = tensor[piece.offset : piece.offset + piece.length]
        yield StateSlice(piece.name, role, piece.start, piece.length, shapes[piece.name], part)


def tensor_states(state: Mapping[str, Any], segment: Segment) -> dict[str, torch.Tensor]:
    """The states that have one element for each of the segment's; a master is not one of them, but the parameter."""
    return {
        k: v
        for k, v in state.items()
        if isinstance(v, torch.Tensor) and v.shape == segment.tensor.shape and k != "master"
    }


def scalar_states(state: Mapping[str, Any], segment: Segment) -> dict[str, float]:
    """The states that are one number for the whole segment, such as Adam's step."""
    rest = {k: v for k, v in state.items() if k != "master" and k not in tensor_states(state, segment)}
    return {
        k: float(v)
        for k, v in rest.items()
        if isinstance(v, (int, float)) or (isinstance(v, torch.Tensor) and v.numel() == 1)
    }


def scalars_of(segments: Sequence[Segment], state: Mapping[Any, Any]) -> dict[str, float]:
    """``"<role>/<name>" -> value`` for the scalar states of every tensor this rank has a part of."""
    found: dict[str, float] = {}
    for segment in segments:
        for role, value in scalar_states(state.get(segment.tensor, {}), segment).items():
            for piece in segment.slices():
                found[f"{role}/{piece.name}"] = value
    return found


def fill_segment(segment: Segment, state: dict[str, Any], read: Reader, scalars: Mapping[str, float]) -> bool:
    """Load a segment's parameters and states; False if the source has no optimizer state for it.

    ``state`` must hold the entries that the optimizer makes in a step: they are what is looked for.
    """
    pieces = segment.slices()
    if not pieces:
        return True
    for piece in pieces:
        part = segment.value(state)[piece.offset : piece.offset + piece.length]
        part.copy_(read(piece.name, "parameter", piece.start, piece.length))
    found: set[bool] = set()
    for role, tensor in tensor_states(state, segment).items():
        tensor.zero_()  # padding
        for piece in pieces:
            try:
                value = read(piece.name, role, piece.start, piece.length)
            except KeyError:
                found.add(False)
                continue
            found.add(True)
            tensor[piece.offset : piece.offset + piece.length].copy_(value)
    for role in scalar_states(state, segment):
        numbers = {scalars.get(f"{role}/{piece.name}") for piece in pieces}
        found |= {v is not None for v in numbers}
        if len(numbers) > 1:
            raise ValueError(
                f"the state {role!r} differs between parameters that share an optimizer segment "
                f"({', '.join(p.name for p in pieces)}: {sorted(map(str, numbers))}); give them parameter groups "
                f"of their own."
            )
        number = numbers.pop()
        if number is not None:
            state[role] = torch.full_like(state[role], number) if isinstance(state[role], torch.Tensor) else number
    if len(found) > 1:
        raise ValueError(f"the source holds only part of the optimizer state of {', '.join(p.name for p in pieces)}.")
    return found != {False}


def fill_frozen(bucket: Bucket, read: Reader) -> None:
    """Load a frozen bucket: this rank's shard where it is partitioned, all of it where it is whole."""
    low, high = bucket.own_range() if bucket.partitioned else (0, bucket.layout.size)
    parameters = bucket.parameters
    tensor = parameters.own_shard() if bucket.partitioned else parameters.full
    for piece in bucket.layout.slices(low, high):
        part = tensor[piece.offset : piece.offset + piece.length]
        part.copy_(read(piece.name, "parameter", piece.start, piece.length))
    if parameters.shard is None:  # it was a copy
        parameters.set_shard(tensor)
