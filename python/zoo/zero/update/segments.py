"""Segments: what the optimizer inside updates.

A segment is a flat part of one chunk of one bucket that belongs to one parameter group, or, for an optimizer that needs
whole tensors, to one tensor. Its length and its place do not depend on the stage; a stage decides which chunks a rank
updates. The wrapped optimizer sees segments in the place of parameters.

On the CPU a segment is small enough for the caches. An optimizer written in operations on tensors passes over its
segment once an operation, with temporaries of its size: of 4 million elements torch's AdamW takes a third of the time
in parts of :data:`CACHED_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from zoo.layout import Slice
from zoo.shard.buckets import Bucket
from zoo.shard.gradients import BucketGradients
from zoo.shard.offload.tiers import Tier
from zoo.shard.roles import ORIGINAL

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

    def value(self, state: Mapping[str, Any]) -> torch.Tensor:
        """The parameters in the precision in which they are kept: the master where there is one. Flat."""
        master: torch.Tensor | None = state.get("master")
        return self.values() if master is None else master.detach().view(-1)

    def moved_to(self, part: torch.Tensor) -> None:
        """The memory of the parameters is another one now: ``part``, flat."""
        if self.target is None:
            self.tensor.data = part
        else:
            self.target = part

    def slices(self) -> list[Slice]:
        """The pieces of logical tensors in this segment, with offsets into it."""
        return self.bucket.layout.slices(self.first, self.first + self.stop - self.start)


def lay_flat(state: dict[str, Any]) -> None:
    """Make the tensors among states such that a flat view of each is its memory."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            state[key] = value.contiguous()


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
    for chunk in bucket.updated_chunks():
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
    base = bucket.layout.shard_range(chunk, bucket.num_chunks)[0] - bucket.kept_range()[0]
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
