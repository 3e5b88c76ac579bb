"""What a ZeRO step will cost, from the plan alone: bytes a rank holds, and bytes it sends.

The traffic is the sum of the hops (``routes.py``) of every bucket's reductions and of the gathers that one forward and
its backward will ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zoo.comm import Communicator
from zoo.zero.buckets import Bucket
from zoo.zero.routes import Hop
from zoo.zero.runtime import REUSE_WINDOW


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes on one rank. Memory is the model states after a step; traffic is one backward and one step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    secondary_bytes: int = 0
    """hpZ: what forward leaves on this rank for backward, beside parameters; gone after the step."""
    wire_bytes: Mapping[str, int]
    """Bytes this rank sends, by operation (the convention of :class:`zoo.comm.OpStats`)."""
    intra_bytes: Mapping[str, int] = field(default_factory=dict)
    """Those of them for ranks of the same node, where it is known which these are."""
    inter_bytes: Mapping[str, int] = field(default_factory=dict)
    """Those of them for other nodes."""

    @property
    def total_bytes(self) -> int:
        """Model states: parameters, gradients and optimizer states."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def forecast(
    buckets: Sequence[Bucket],
    *,
    calls: Iterable[Sequence[Bucket]],
    shard_group: Communicator,
    reduce_dtype: torch.dtype | None,
    optimizer_bytes: int,
    clips: bool,
    keep_bytes: int,
) -> Forecast:
    """Forecast a step of the given buckets.

    Args:
        calls: the buckets that each unit call of a forward uses, in the order in which the calls end.
        shard_group: the ranks that split a bucket.
        reduce_dtype: in which gradients are sent, None for their own.
        optimizer_bytes: bytes of masters and optimizer states on this rank.
        clips: whether the gradient norm is exchanged.
        keep_bytes: see :class:`~zoo.zero.runtime.Runtime`.
    """
    parameters = gradients = 0
    hops: list[Hop] = []
    for bucket in buckets:
        own = bucket.num_bytes // bucket.num_chunks
        parameters += bucket.kept_bytes()
        if bucket.spec.trainable:
            gradients += own if bucket.placement.shard_gradients else bucket.num_bytes
            hops += bucket.reduce_hops(reduce_dtype)
    for bucket, again in (gathers := _gathers(list(calls), keep_bytes)):
        hops += bucket.gather_hops(again=again)
    secondary = sum(bucket.secondary_bytes() for bucket in {bucket for bucket, again in gathers if again})
    trainable = [b for b in buckets if b.spec.trainable]
    if clips and trainable and trainable[0].placement.shard_optimizer:
        hops.append(Hop("all_gather", shard_group, 8 * len(trainable) * shard_group.size))
    wire, intra, inter = _added(hops)
    return Forecast(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer_bytes,
        secondary_bytes=secondary,
        wire_bytes=wire,
        intra_bytes=intra,
        inter_bytes=inter,
    )


def _added(hops: Iterable[Hop]) -> list[dict[str, int]]:
    totals: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for hop in hops:
        for total, sent in zip(totals, hop.sent(), strict=True):
            total[hop.op] += sent
    return [{op: sent for op, sent in total.items() if sent} for total in totals]


def _gathers(calls: list[Sequence[Bucket]], keep_bytes: int) -> list[tuple[Bucket, bool]]:
    """The gathers of one forward and its backward, and whether each is of something that forward had released before.

    Calls must not nest buckets.
    """
    sequence = [bucket for used in calls for bucket in used]
    found: list[tuple[Bucket, bool]] = []
    kept_bytes, position = 0, 0
    kept: dict[Bucket, None] = {}
    released: set[Bucket] = set()
    soon: set[Bucket] = set()
    for used in calls:
        position += len(used)
        for bucket in used:
            if bucket in kept:
                del kept[bucket]
                kept_bytes -= bucket.num_bytes
            elif bucket not in soon:
                found.append((bucket, bucket in released))
            soon.discard(bucket)
        for bucket in used:
            if bucket in sequence[position : position + REUSE_WINDOW]:
                soon.add(bucket)
            elif bucket.num_bytes <= keep_bytes:
                kept[bucket] = None
                kept_bytes += bucket.num_bytes
            else:
                released.add(bucket)
        while kept_bytes > keep_bytes:
            oldest = next(iter(kept))
            del kept[oldest]
            kept_bytes -= oldest.num_bytes
            released.add(oldest)
    return found + [(b, b in released) for b in dict.fromkeys(sequence) if b not in kept]
