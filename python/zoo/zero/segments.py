"""Segments: what the optimizer inside updates.

A segment is the part of one chunk of one bucket that belongs to one parameter group: a flat tensor. Its length and its
place do not depend on the stage; a stage decides which chunks a rank updates. The wrapped optimizer sees segments in
the place of parameters, so it may be any optimizer whose update of an element looks at that element's gradient and
state only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.layout import Slice
from zoo.zero.buckets import Bucket


@dataclass(eq=False)
class Segment:
    """Elements [start, stop) of chunk ``chunk`` of a bucket, all of parameter group ``group``.

    ``tensor`` is what the optimizer updates: an fp32 master copy of 16-bit parameters, otherwise the parameters
    themselves. ``target`` is where a master is written back to, None without one.
    """

    bucket: Bucket
    chunk: int
    group: int
    start: int
    stop: int
    tensor: torch.Tensor
    target: torch.Tensor | None

    def gradient(self) -> torch.Tensor:
        """The reduced gradient of this segment, in the gradient's own dtype."""
        return self.bucket.reduced_chunk(self.chunk)[self.start : self.stop]

    def slices(self) -> list[Slice]:
        """The pieces of logical tensors in this segment, with offsets into it."""
        base = self.chunk * (self.bucket.layout.size // self.bucket.num_chunks)
        return self.bucket.layout.slices(base + self.start, base + self.stop)


def cut_segments(bucket: Bucket) -> list[Segment]:
    """The segments of a trainable bucket that this rank updates: of all chunks at stage 0, of its own otherwise."""
    length = bucket.layout.size // bucket.num_chunks
    segments = []
    for chunk in bucket.updated_chunks():
        base = chunk * length
        values = bucket.chunk_parameters(chunk)
        for group, low, high in _group_ranges(bucket):
            start, stop = max(low - base, 0), min(high - base, length)
            if start < stop:
                part = values[start:stop]
                master = part.float() if part.dtype.itemsize < 4 else part
                target = None if master is part else part
                segments.append(Segment(bucket, chunk, group, start, stop, master.detach().requires_grad_(), target))
    return segments


def _group_ranges(bucket: Bucket) -> Iterable[tuple[int, int, int]]:
    # Buckets hold their parameters ordered by group; padding goes with the group before it.
    groups, offsets = bucket.spec.groups, bucket.layout.offsets
    starts = [i for i in range(len(groups)) if i == 0 or groups[i] != groups[i - 1]]
    ends = [offsets[i] for i in starts[1:]] + [bucket.layout.size]
    for i, end in zip(starts, ends, strict=True):
        yield groups[i], offsets[i], end


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


def check_elementwise(build: Callable[[list[torch.Tensor]], Any], name: str) -> tuple[int, int]:
    """Raise NotImplementedError unless the optimizer updates every element by itself.

    Tries it: two small tensors are updated twice, whole and laid flat and cut elsewhere; the results must agree.

    Returns:
        What the optimizer keeps: the number of states that have one element for each of a tensor's, and the bytes of
        those that are one tensor element for all of it.
    """
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(24, generator=generator) for _ in range(3))
    results: list[torch.Tensor] = []
    for cuts, shape in (([12, 12], (3, 4)), ([7, 17], (-1,))):
        tensors = [part.clone().view(shape).requires_grad_() for part in torch.split(values, cuts)]
        if not results:
            optimizer = build(tensors)  # options that it refuses are not about flat tensors
        try:
            if results:
                optimizer = build(tensors)
            for grad in grads:
                for tensor, part in zip(tensors, torch.split(grad, cuts), strict=True):
                    tensor.grad = part.clone().view(shape)
                optimizer.step()
        except Exception as error:
            raise NotImplementedError(
                f"{name} cannot run under a ZeRO optimizer: a step on a flat tensor ended with {type(error).__name__}: "
                f"{error}. It must work element by element, without a closure."
            ) from error
        results.append(torch.cat([t.detach().flatten() for t in tensors]))
    if not torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-7):
        raise NotImplementedError(
            f"{name} cannot run under a ZeRO optimizer: its update of an element depends on other elements of the "
            "tensor, which may be on other ranks. Use an elementwise one: SGD, Adam, AdamW, Adagrad, RMSprop, …"
        )
    kept = [v for v in optimizer.state[tensors[0]].values() if isinstance(v, torch.Tensor)]
    whole = [v for v in kept if v.shape == tensors[0].shape]
    return len(whole), sum(v.nbytes for v in kept) - sum(v.nbytes for v in whole)
