"""The wrapped optimizer on this rank's segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zoo.comm import Communicator
from zoo.zero.buckets import Bucket
from zoo.zero.parts import BucketParts
from zoo.zero.segments import Segment, cut_segments, in_pieces
from zoo.zero.trial import Keeps, check_elementwise, what_it_keeps


class Updater:
    """Builds the wrapped optimizer on the segments of the buckets and runs its steps, piece by piece.

    What it can do is read off its class. ``needs_whole_tensors``: it gets parts of single tensors, and ``parts=`` to
    bring them together (:class:`~zoo.zero.parts.BucketParts`). ``keeps_masters``: it takes 16-bit parameters and
    gradients as they are, keeps fp32 masters among its states and has ``step(grad_scale=)``, so that scaling, update
    and rounding are one pass. Any other gets fp32 masters as parameters, and gradients converted piece by piece.

    Args:
        buckets: the trainable ones.
        groups: the parameter groups of the user; their options, without "params", are given to the optimizer.
        options: arguments of the optimizer.
        sub_group_size: elements of a piece.
    """

    def __init__(
        self, buckets: Sequence[Bucket], optimizer: Any, groups: Sequence[Mapping[str, Any]], options: dict[str, Any],
        *, comm: Communicator, sub_group_size: int,
    ) -> None:  # fmt: skip
        self._buckets = buckets
        whole = bool(getattr(optimizer, "needs_whole_tensors", False))
        self._scales = bool(getattr(optimizer, "keeps_masters", False))
        name = getattr(optimizer, "__name__", str(optimizer))
        plain = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        if not whole:
            check_elementwise(lambda tensors: optimizer(tensors, **options), name)
        self.keeps: list[Keeps] = []
        for group in plain:
            self.keeps.append(what_it_keeps(lambda tensors, g=group: optimizer([{**g, "params": tensors}], **options)))  # type: ignore[misc]
        cut = [cut_segments(b, masters=not self._scales, by_tensor=whole) for b in buckets]
        self.segments = [s for segments in cut for s in segments]
        self._parts = BucketParts(comm) if whole else None
        if self._parts is not None:
            self._parts.adopt(self.segments)
            options = {**options, "parts": self._parts}
        inner: list[dict[str, Any]] = [{**g, "params": []} for g in plain]
        for segment in self.segments:
            inner[segment.group]["params"].append(segment.tensor)
        self.inner = optimizer(inner, **options)
        self._pieces = self._cut(sub_group_size)

    def _cut(self, limit: int) -> list[tuple[Sequence[Bucket], list[Segment]]]:
        if self._parts is not None:  # pieces of whole buckets, the same on every rank
            pieces: list[tuple[list[Bucket], list[Segment]]] = []
            size = 0
            for bucket in self._buckets:
                if not pieces or size + bucket.layout.size > limit:
                    pieces.append(([], []))
                    size = 0
                size += bucket.layout.size
                pieces[-1][0].append(bucket)
                pieces[-1][1].extend(s for s in self.segments if s.bucket is bucket)
            return list(pieces)
        if any(s.target is not None for s in self.segments):
            return [((), piece) for piece in in_pieces(self.segments, limit)]
        return [((), self.segments)]

    def update(self, factor: float, groups: Sequence[Mapping[str, Any]]) -> None:
        """One step with ``factor`` times the reduced gradients and the options of ``groups``. Collective with parts."""
        inner = self.inner
        for outer, group in zip(groups, inner.param_groups, strict=True):
            group.update({k: v for k, v in outer.items() if k != "params"})
        whole = [group["params"] for group in inner.param_groups]
        try:
            for buckets, piece in self._pieces:
                if len(self._pieces) > 1:
                    self._restrict(piece)
                if self._parts is not None:
                    self._parts.about(buckets)
                self._update_piece(piece, factor)
        finally:
            for group, tensors in zip(inner.param_groups, whole, strict=True):
                group["params"] = tensors

    def _restrict(self, piece: Sequence[Segment]) -> None:
        for group in self.inner.param_groups:
            group["params"] = []
        for segment in piece:
            self.inner.param_groups[segment.group]["params"].append(segment.tensor)

    def _update_piece(self, piece: Sequence[Segment], factor: float) -> None:
        for segment in piece:
            gradient = segment.gradient()
            if segment.target is not None:
                gradient = gradient.float()
            segment.tensor.grad = gradient if factor == 1.0 or self._scales else gradient.mul_(factor)
        if self._scales:
            self.inner.step(grad_scale=factor)
        else:
            self.inner.step()
        for segment in piece:
            segment.tensor.grad = None
            if segment.target is not None:
                segment.target.copy_(segment.tensor)

    def make_states(self) -> None:
        """Make the entries that the optimizer keeps, with values that mean nothing; parameters change too."""
        for segment in self.segments:
            segment.tensor.grad = torch.zeros_like(segment.tensor)
        if self._parts is not None:
            self._parts.about(self._buckets)
        self.inner.step()
        for segment in self.segments:
            segment.tensor.grad = None

    def write_back(self, segment: Segment) -> None:
        """Bring the value of a segment, which was just loaded, to the parameters that are computed with."""
        if segment.target is not None:
            segment.target.copy_(segment.tensor)
        else:
            value = segment.value(self.inner.state.get(segment.tensor, {}))
            if value.data_ptr() != segment.tensor.data_ptr():
                segment.tensor.detach().copy_(value)

    def state_bytes(self) -> int:
        """Bytes of masters and optimizer states on this rank."""
        total = sum(s.tensor.nbytes for s in self.segments if s.target is not None)
        for state in self.inner.state.values():
            total += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
        return total

    def forecast_bytes(self) -> int:
        """What :meth:`state_bytes` will be after the first step."""
        total = 0
        for segment in self.segments:
            keeps, itemsize = self.keeps[segment.group], segment.bucket.spec.dtype.itemsize
            per_element = keeps.num_states * max(itemsize, 4) + (4 if itemsize < 4 else 0)
            total += segment.tensor.numel() * per_element + keeps.scalar_bytes
        return total
