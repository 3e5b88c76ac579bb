"""What offloading will hold and move, from the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from zoo.shard.buckets import Bucket
from zoo.shard.offload.tiers import Tier

if TYPE_CHECKING:
    from zoo.zero.update.updater import Updater

Gathered = Callable[[Callable[[Bucket], int]], int]
"""Σ of a weight over the gathers of a step."""


def tier_bytes(buckets: Iterable[Bucket], states: dict[Tier, int]) -> dict[str, int]:
    """Model states of one rank between steps, by tier; gradients are those that the update takes."""
    found = dict(states)
    for bucket in buckets:
        found[bucket.placements.parameters.tier] += bucket.shard_bytes() + bucket.original_bytes()
        found[bucket.placements.gradients.tier] += bucket.gradient_bytes()
    return {tier.value: num_bytes for tier, num_bytes in found.items()}


def nvme_traffic(buckets: Sequence[Bucket], updater: Updater, gathered: Gathered) -> tuple[int, int]:
    """Bytes that one rank reads from and writes to NVMe in one backward and one step, once states exist."""
    read, written = updater.nvme_traffic()
    for bucket in buckets:
        if bucket.gradients_on_nvme:
            written += bucket.num_gradient_bytes // bucket.num_chunks
    return read + gathered(lambda b: b.shard_bytes() if b.parameters_on_nvme else 0), written
