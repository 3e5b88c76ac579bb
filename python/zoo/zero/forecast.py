"""What a ZeRO step will cost, from the plan alone: bytes a rank holds, and bytes it sends.

Symbols: P elements of a bucket with its padding, N ranks, n = P/N, b bytes an element, s optimizer states an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zoo.zero.buckets import Bucket
from zoo.zero.runtime import REUSE_WINDOW


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes on one rank. Memory is the model states after a step; traffic is one backward and one step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    wire_bytes: Mapping[str, int]
    """Bytes this rank sends, by operation (the convention of :class:`zoo.comm.OpStats`)."""

    @property
    def total_bytes(self) -> int:
        """Model states: parameters, gradients and optimizer states."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def forecast(
    buckets: Sequence[Bucket],
    *,
    calls: Iterable[Sequence[Bucket]],
    num_chunks: int,
    optimizer_bytes: int,
    clips: bool,
    keep_bytes: int,
) -> Forecast:
    """Forecast a step of the given buckets.

    Args:
        calls: the buckets that each unit call of a forward uses, in the order in which the calls end.
        num_chunks: N.
        optimizer_bytes: bytes of masters and optimizer states on this rank.
        clips: whether the gradient norm is exchanged.
        keep_bytes: see :class:`~zoo.zero.runtime.Runtime`.
    """
    parameters = gradients = 0
    gathered = reduced = 0
    for bucket in buckets:
        own = bucket.num_bytes // num_chunks
        parameters += own if bucket.partitioned else bucket.num_bytes
        if not bucket.spec.trainable:
            continue
        place = bucket.placement
        gradients += own if place.shard_gradients else bucket.num_bytes
        reduced += bucket.num_bytes
        if not bucket.partitioned:  # of the mean gradient at stage 0, of the new parameters at 1 and 2
            gathered += bucket.num_bytes
    gathered += _gathered_by_units(list(calls), keep_bytes)

    def sent(message: int) -> int:
        return message * (num_chunks - 1) // num_chunks

    wire = {"reduce_scatter": sent(reduced), "all_gather": sent(gathered)}
    trainable = [b for b in buckets if b.spec.trainable]
    if clips and trainable and trainable[0].placement.shard_optimizer:
        wire["all_gather"] += sent(8 * len(trainable) * num_chunks)
    return Forecast(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer_bytes,
        wire_bytes=wire if num_chunks > 1 else {},
    )


def _gathered_by_units(calls: list[Sequence[Bucket]], keep_bytes: int) -> int:
    """Bytes of gathered messages in one forward and its backward; calls must not nest buckets."""
    sequence = [bucket for used in calls for bucket in used]
    total, kept_bytes, position = 0, 0, 0
    kept: dict[Bucket, None] = {}
    soon: set[Bucket] = set()
    for used in calls:
        position += len(used)
        for bucket in used:
            if bucket in kept:
                del kept[bucket]
                kept_bytes -= bucket.num_bytes
            elif bucket not in soon:
                total += bucket.num_bytes
            soon.discard(bucket)
        for bucket in used:
            if bucket in sequence[position : position + REUSE_WINDOW]:
                soon.add(bucket)
            elif bucket.num_bytes <= keep_bytes:
                kept[bucket] = None
                kept_bytes += bucket.num_bytes
        while kept_bytes > keep_bytes:
            oldest = next(iter(kept))
            del kept[oldest]
            kept_bytes -= oldest.num_bytes
    return total + sum(b.num_bytes for b in set(sequence) if b not in kept)
