"""The norm of the whole mean gradient, with the same bits at every stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zoo.comm import Communicator
from zoo.zero.placement.axes import Axes
from zoo.zero.sharding.gradients import BucketGradients


def global_norm(gradients: Sequence[BucketGradients], layers: Communicator | None = None) -> float:
    """sqrt(Σ g²), family by family, chunk by chunk and bucket by bucket in an order that no stage changes. Collective.

    Each element counts once: chunks are added over the ranks that split a bucket, and parts along other mesh axes over
    the ranks that have them; ranks that repeat something do not add it. What ``layers``, the ranks with other layers,
    have is added at the end, in their order, so that all of them have the same bits.
    """
    families = dict.fromkeys(g.bucket.routes.axes for g in sorted(gradients, key=lambda g: g.bucket.spec.axes))
    squares = torch.stack([_squares(gradients, axes) for axes in families]).sum()
    if layers is not None:
        squares = _of_all(layers, squares.reshape(1)).sum()
    return float(squares.sqrt())


def _squares(gradients: Sequence[BucketGradients], axes: Axes) -> torch.Tensor:
    """Σ g² over the parameters of one family."""
    mine = [g for g in gradients if g.bucket.routes.axes is axes]
    chunks = [torch.stack([g.reduced_norm(c) for g in mine]) for c in mine[0].bucket.updated_chunks()]
    norms = torch.cat(chunks)
    if len(chunks) < axes.shard.size:
        norms = _of_all(axes.shard, norms)
    squares = norms.square().sum()
    return squares if axes.parts is None else _of_all(axes.parts, squares.reshape(1)).sum()


def _of_all(comm: Communicator, mine: torch.Tensor) -> torch.Tensor:
    """(N k,) this (k,) of every rank."""
    everyone = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(everyone, mine, label="norms of gradients").wait()
    return everyone
