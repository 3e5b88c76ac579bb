"""Segments: what the optimizer inside updates.

A segment is a flat part of one chunk of one bucket that belongs to one parameter group, or, for an optimizer that needs
whole tensors, to one tensor. Its length and its place do not depend on the stage; a stage decides which chunks a rank
updates. The wrapped optimizer sees segments in the place of parameters.

On the CPU a segment is small enough for the caches. An optimizer written in operations on tensors passes over its
segment once an operation, with temporaries of its size: of 4 million elements torch's AdamW takes a third of the time
in parts of :data:`CACHED_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from zoo.layout import Slice, Stored
from zoo.shard.buckets import Bucket
from zoo.shard.gradients import BucketGradients
from zoo.shard.offload.tiers import Tier
from zoo.shard.roles import ORIGINAL, PARAMETER, RoleBuffer

CACHED_BYTES = 1 << 19
"""Of a segment that the CPU updates; gradient, states and temporaries come to six times as much. It is small enough for
the last cache, and for the allocator to keep the memory of the temporaries."""


@dataclass(eq=False)
class Segment:
    """Elements [start, stop) of chunk ``chunk`` of a bucket, all of parameter group ``group``.

    ``tensor`` is what the optimizer updates: the parameters themselves, or an fp32 master copy of 16-bit ones where the
    optimizer does not keep one among its states. ``target`` is where such a master is written back to, else None.
    Of what lives on NVMe there is only a single repeated element (:func:`absent`) until the update brings it here.
    """

    bucket: Bucket
    chunk: int
    group: int
    start: int
    stop: int
    tensor: torch.Tensor
    target: torch.Tensor | None
    keeps_any_shape: ClassVar[bool] = False
    """States of any shape are of all of one parameter: they can be saved."""
    inner: Any = None
    """The optimizer."""
    stored: dict[str, RoleBuffer] = field(default_factory=dict)
    """What lives on NVMe of the states, by name; "" is a master that the optimizer got as its parameter."""
    loaded_gradient: torch.Tensor | None = None

    @property
    def first(self) -> int:
        """Where it begins in the flat buffer of the bucket."""
        return self.chunk * (self.bucket.layout.size // self.bucket.num_chunks) + self.start

    @property
    def gradients(self) -> BucketGradients:
        """Those of the bucket: only trainable ones have segments."""
        if self.bucket.gradients is None:
            raise AssertionError(f"a segment of the frozen bucket of {self.bucket.label}.")
        return self.bucket.gradients

    def gradient(self) -> torch.Tensor:
        """The reduced gradient of this segment, in the gradient's own dtype."""
        if self.loaded_gradient is not None:
            return self.loaded_gradient
        return self.gradients.reduced_chunk(self.chunk)[self.start : self.stop]

    def values(self) -> torch.Tensor:
        """(stop - start,) what the optimizer updates."""
        return self.tensor.detach()

    # What the optimizer keeps of it: its own tensors, which stay the same objects.

    @property
    def entries(self) -> dict[str, Any]:
        """All of that, by name."""
        found: dict[str, Any] = self.inner.state.get(self.tensor, {})
        return found

    def value(self) -> torch.Tensor:
        """The parameters in the precision in which they are kept: the master where there is one. Flat."""
        master: torch.Tensor | None = self.entries.get("master")
        return self.values() if master is None else master.detach().view(-1)

    def states(self) -> dict[str, torch.Tensor]:
        """What has one element for each of the segment's, flat; a master is not among them, but the parameter."""
        shape = self.tensor.shape
        return {
            k: v.reshape(-1)
            for k, v in self.entries.items()
            if isinstance(v, torch.Tensor) and v.shape == shape and k != "master"
        }

    def numbers(self) -> dict[str, float | int]:
        """What is one number for the whole segment, such as Adam's step. What is a tensor, is a float here."""
        found, states = dict[str, float | int](), self.states()
        for name, value in self.entries.items():
            if name in states or name == "master":
                continue
            if isinstance(value, int):
                found[name] = int(value)  # a bool too
            elif isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                found[name] = float(value)
        return found

    def others(self) -> dict[str, Any]:
        """What is neither; where the segment is all of a parameter, tensors among it can be saved."""
        rest = self.entries.keys() - {"master"} - self.states().keys() - self.numbers().keys()
        return {name: self.entries[name] for name in sorted(rest)}

    def of_any_shape(self) -> dict[str, torch.Tensor]:
        """The tensors of other shapes that can be saved."""
        return {k: v for k, v in self.others().items() if self.keeps_any_shape and isinstance(v, torch.Tensor)}

    def roles(self) -> dict[str, torch.Tensor]:
        """By role the elements: "parameter", exact, and :meth:`states`. What is on NVMe has no values here."""
        return {PARAMETER: self.value(), **self.states()}

    def sources(self) -> dict[str, torch.Tensor | Stored]:
        """The same for a :class:`~zoo.layout.StateSlice`: what is on NVMe is not read yet."""
        found: dict[str, torch.Tensor | Stored] = {**self.roles()}
        master = "master" if "master" in self.entries else "" if self.target is not None else None
        if master in self.stored or (master is None and self.bucket.parameters_on_nvme):
            # Where no master exists yet the parameters are all there is.
            if self.bucket.parameters_on_nvme or self.target is None:
                found[PARAMETER] = self.bucket.parameters.shard.source(self.start, self.stop - self.start)
            else:
                found[PARAMETER] = self.target
        for name, role in self.stored.items():
            if role.kept:
                found[PARAMETER if name in ("", "master") else name] = role.source()
        return found

    def lay_flat(self) -> None:
        """Make the tensors among what is kept such that a flat view of each is its memory."""
        entries = self.entries
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                entries[key] = value.contiguous()

    def round_parameters(self) -> None:
        """The parameters become what :meth:`value` is by now."""
        value, own = self.value(), self.values()
        if self.target is not None:
            self.target.copy_(self.tensor)
        elif value.data_ptr() != own.data_ptr():
            own.copy_(value)

    def in_memory(self) -> dict[str, torch.Tensor]:
        """The tensors that are in memory between updates, by name; "" is a master that the optimizer got."""
        found: dict[str, Any] = {"": self.tensor} if self.target is not None else {}
        found |= self.entries
        return {k: v for k, v in found.items() if isinstance(v, torch.Tensor) and k not in self.stored}

    def moved_to(self, part: torch.Tensor) -> None:
        """The memory of the parameters is another one now: ``part``, flat."""
        if self.target is None:
            self.tensor.data = part.view(self.tensor.shape)
        else:
            self.target = part.view(self.tensor.shape)

    def slices(self) -> list[Slice]:
        """The pieces of logical tensors in this segment, with offsets into it."""
        return self.bucket.layout.slices(self.first, self.first + self.stop - self.start)


def cut_segments(bucket: Bucket, *, masters: bool, by_tensor: bool, in_one_pass: bool = False) -> list[Segment]:
    """The segments of a trainable bucket that this rank updates: of all chunks at stage 0, of its own otherwise.

    Args:
        masters: give the optimizer fp32 copies of 16-bit parameters. Where states are offloaded and parameters on
            a GPU, it gets copies in any case.
        by_tensor: cut at the boundaries of tensors, not only of parameter groups.
        in_one_pass: the optimizer reads and writes each element once: caches are no reason to cut.
    """
    length = bucket.layout.size // bucket.num_chunks
    dtype = updated_dtype(bucket, masters=masters)
    caches = (bucket.updates_off_device or bucket.device.type != "cuda") and not (by_tensor or in_one_pass)
    # What comes from NVMe comes in long reads, and its pieces are cut by ``sub_group_size``.
    caches = caches and bucket.placements.states.tier is not Tier.NVME
    most = CACHED_BYTES // dtype.itemsize if caches else max(length, 1)
    ranges = list(_tensor_ranges(bucket) if by_tensor else _group_ranges(bucket))
    segments = []
    for chunk in bucket.updated_chunks:
        base = chunk * length
        make = _Maker(bucket, chunk, dtype)
        for group, low, high in ranges:
            first, last = max(low - base, 0), min(high - base, length)
            for start in range(first, last, most):
                segments.append(make.segment(group, start, min(start + most, last)))
    return segments


def updated_dtype(bucket: Bucket, *, masters: bool) -> torch.dtype:
    """In which the optimizer gets parameters; with ``masters`` 16-bit ones as fp32 copies."""
    return torch.float32 if masters and bucket.spec.dtype.itemsize < 4 else bucket.spec.dtype


class _Maker:
    """Makes the segments of one chunk, which the optimizer updates as ``dtype``."""

    def __init__(self, bucket: Bucket, chunk: int, dtype: torch.dtype) -> None:
        self._bucket, self._chunk, self._dtype = bucket, chunk, dtype
        self._values = bucket.parameters.chunk(chunk)

    @cached_property
    def _read(self) -> torch.Tensor:
        """What is not in memory, read once for all segments."""
        return self._bucket.parameters.shard.read()

    def segment(self, group: int, start: int, stop: int) -> Segment:
        """Elements [start, stop)."""
        bucket, values, dtype = self._bucket, self._values, self._dtype
        part = values[start:stop] if values is not None else absent_of(stop - start, bucket.spec.dtype)
        off_device = bucket.updates_off_device  # the update runs where the states are
        copied = dtype is not part.dtype or off_device
        tensor = part
        if copied and bucket.placements.states.tier is Tier.NVME:
            tensor = absent_of(stop - start, dtype)
        elif copied:
            source = original_of(bucket, self._chunk, start, stop) if dtype is not part.dtype else None
            if source is None:
                source = part if values is not None else self._read[start:stop]
            tensor = source.to("cpu" if off_device and not source.is_meta else source.device, dtype)
        tensor = tensor.detach().requires_grad_()
        return Segment(bucket, self._chunk, group, start, stop, tensor, part if copied else None)


def original_of(bucket: Bucket, chunk: int, start: int, stop: int) -> torch.Tensor | None:
    """Elements [start, stop) of a chunk as the parameters came, to be the memory of masters; None: not in memory."""
    originals = bucket.roles.get(ORIGINAL)
    if originals is None or originals.values is None:
        return None
    base = bucket.layout.shard_range(chunk, bucket.num_chunks)[0] - bucket.kept_range[0]
    # Detached it is no view: what a view is of would keep the memory when the master goes to another.
    return originals.values[base + start : base + stop].detach()


def absent_of(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape without memory: one NaN that repeats."""
    return torch.full((1,), float("nan"), dtype=dtype).expand(numel)


def absent(tensor: torch.Tensor) -> torch.Tensor:
    """What takes the place of a flat tensor whose values are elsewhere."""
    return absent_of(tensor.numel(), tensor.dtype)


def _group_ranges(bucket: Bucket) -> Iterable[tuple[int, int, int]]:
    # Buckets hold their parameters ordered by group; padding goes with the group before it.
    groups, offsets = bucket.spec.groups, bucket.layout.offsets
    starts = [i for i in range(len(groups)) if i == 0 or groups[i] != groups[i - 1]]
    ends = [offsets[i] for i in starts[1:]] + [bucket.layout.size]
    for i, end in zip(starts, ends, strict=True):
        yield groups[i], offsets[i], end


def _tensor_ranges(bucket: Bucket) -> Iterable[tuple[int, int, int]]:
    for group, tensor, offset in zip(bucket.spec.groups, bucket.layout.tensors, bucket.layout.offsets, strict=True):
        yield group, offset, offset + tensor.numel


def in_pieces(segments: Sequence[Segment], limit: int) -> list[list[Segment]]:
    """Consecutive segments in lists of at most ``limit`` elements (one segment may exceed it alone)."""
    pieces: list[list[Segment]] = []
    size = 0
    for segment in segments:
        if not pieces or size + segment.tensor.numel() > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(segment)
        size += segment.tensor.numel()
    return pieces
