"""The values that parameters came with, where the model computes in a dtype that rounds them (``param_dtype``).

Legend: see ``buckets.py``.

Of a trainable bucket they are what the masters start from: the optimizer takes them over, as the very memory of its
masters where it can, and from then on the masters are the values. Of a frozen bucket they are the values, and stay: in
checkpoints, in what reads values, and when the model is given back. Each rank keeps the elements whose optimizer states
it has, or would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from zoo.zero.offload.tiers import Tier

if TYPE_CHECKING:
    from zoo.zero.sharding.buckets import Bucket

Pieces = Iterable[tuple[int, torch.Tensor]]
"""Elements that this rank has: where they begin in the bucket's flat buffer, and their values."""


def originals_tier(bucket: Bucket) -> Tier:
    """Where they live: those that masters start from where the masters will, the others where the parameters do."""
    placements = bucket.placements
    return placements.states.tier if bucket.spec.trainable else placements.parameters.tier


def whole_originals(bucket: Bucket, pieces: Pieces) -> torch.Tensor:
    """(P,) the values of a bucket whose parameters are whole, in the dtype in which they came. Collective.

    Args:
        pieces: this rank's, of what is more exact than the parameters. They count where they round to what the
            parameters are: anything else was written there by somebody, and counts itself.
    """
    full, original = bucket.parameters.full, bucket.spec.original
    out = full.to(original)
    low, high = bucket.kept_range()
    for base, values in pieces:
        start, stop = max(base, low), min(base + values.numel(), high)
        if start < stop:
            exact = values[start - base : stop - base].to(out.device)
            same = exact.to(full.dtype) == full[start:stop]
            out[start:stop] = torch.where(same, exact, full[start:stop].to(exact.dtype)).to(original)
    if bucket.placements.states.is_split:
        bucket.shard_group.all_gather(out, out[low:high], label=f"original values of {bucket.label}").wait()
    return out
