"""What a ZeRO step will cost, from the plan alone: bytes a rank holds, and bytes it sends.

Symbols: P elements of a bucket with its padding, N ranks, n = P/N, b bytes an element, s optimizer states an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zoo.zero.buckets import Bucket
from zoo.zero.offload.plan import Tier
from zoo.zero.runtime import REUSE_WINDOW


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes on one rank. Memory is the model states after a step; traffic is one backward and one step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    wire_bytes: Mapping[str, int]
    """Bytes this rank sends, by operation (the convention of :class:`zoo.comm.OpStats`)."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Model states by tier: device, host, nvme. Where the device is the CPU, device and host are the same memory."""
    buffers_bytes: int = 0
    """The most host memory that buffers between memory and NVMe take."""
    pinned_bytes: int = 0
    """Of the host memory, what is page-locked with pin_memory."""
    nvme_files_bytes: int = 0
    """The size of the files, whole pages."""
    nvme_read_bytes: int = 0
    nvme_written_bytes: int = 0
    """Traffic of one backward and one step with the forward before them."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, and the total."""
        return {**asdict(self), "total_bytes": self.total_bytes}

    def table(self) -> str:
        """One line a figure."""
        rows = [
            ("parameters in memory", self.parameters_bytes), ("gradients in memory", self.gradients_bytes),
            ("optimizer states in memory", self.optimizer_bytes),
            *((f"model states, tier {tier}", size) for tier, size in self.tiers.items()),
            ("buffers of offloading", self.buffers_bytes), ("page-locked", self.pinned_bytes),
            ("files on NVMe", self.nvme_files_bytes), ("read from NVMe a step", self.nvme_read_bytes),
            ("written to NVMe a step", self.nvme_written_bytes),
            *((f"sent a step, {op}", size) for op, size in self.wire_bytes.items()),
        ]  # fmt: skip
        return "\n".join(f"{name:<32}{size:>20,} bytes" for name, size in rows)

    @property
    def total_bytes(self) -> int:
        """Model states: parameters, gradients and optimizer states."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def forecast(
    buckets: Sequence[Bucket],
    *,
    calls: Iterable[Sequence[Bucket]],
    num_chunks: int,
    optimizer_bytes: Mapping[Tier, int],
    clips: bool,
    keep_bytes: int,
) -> Forecast:
    """Forecast a step of the given buckets.

    Args:
        calls: the buckets that each unit call of a forward uses, in the order in which the calls end.
        num_chunks: N.
        optimizer_bytes: bytes of masters and optimizer states on this rank, by tier.
        clips: whether the gradient norm is exchanged.
        keep_bytes: see :class:`~zoo.zero.runtime.Runtime`.
    """
    parameters = gradients = 0
    gathered = reduced = 0
    for bucket in buckets:
        own = bucket.num_bytes // num_chunks
        kept = 0 if bucket.parameters_on_nvme else own
        parameters += kept if bucket.partitioned else bucket.num_bytes
        if not bucket.spec.trainable:
            continue
        place = bucket.placement
        kept = 0 if bucket.parks else own
        gradients += kept if place.shard_gradients else bucket.num_bytes
        reduced += bucket.num_bytes
        if not bucket.partitioned:  # of the mean gradient at stage 0, of the new parameters at 1 and 2
            gathered += bucket.num_bytes
    gathered += gathered_by_units(list(calls), keep_bytes, lambda bucket: bucket.num_bytes)

    def sent(message: int) -> int:
        return message * (num_chunks - 1) // num_chunks

    wire = {"reduce_scatter": sent(reduced), "all_gather": sent(gathered)}
    trainable = [b for b in buckets if b.spec.trainable]
    if clips and trainable and trainable[0].placement.shard_optimizer:
        wire["all_gather"] += sent(8 * len(trainable) * num_chunks)
    return Forecast(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=sum(optimizer_bytes.values()) - optimizer_bytes[Tier.NVME],
        wire_bytes=wire if num_chunks > 1 else {},
    )


def gathered_by_units(calls: Sequence[Sequence[Bucket]], keep_bytes: int, weigh: Callable[[Bucket], int]) -> int:
    """Σ of a weight over the gathers of one forward and its backward; calls must not nest buckets."""
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
                total += weigh(bucket)
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
    return total + sum(weigh(b) for b in set(sequence) if b not in kept)
