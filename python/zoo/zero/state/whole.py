"""Whole parameters one bucket after the other, for what reads all of them without room for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from zoo.zero.sharding.buckets import Bucket
from zoo.zero.sharding.originals import Pieces, whole_originals

if TYPE_CHECKING:
    from zoo.zero.optimizer import ZeroOptimizer


def whole_parameters(buckets: Iterable[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole value) of every parameter of these buckets, as the ranks keep it, one bucket gathered at a time.

    Collective: every rank has to go to the end. A tensor is the parameter's memory and valid until the next one is
    asked for. What was gathered before stays so.
    """
    for bucket in buckets:
        parameters = bucket.parameters
        stays = parameters.live and not (parameters.rounds and not bucket.active)
        hidden = parameters.hidden
        parameters.wait(exact=True)
        try:
            yield from zip(bucket.spec.names, bucket.views(parameters.full), strict=True)
        finally:
            if not stays:
                parameters.reshard()
            elif hidden:
                parameters.hide()


def whole_values(bucket: Bucket, optimizer: ZeroOptimizer | None, *, trains: bool) -> torch.Tensor:
    """(P,) what a bucket's parameters are when the model is given back; they are whole now. Collective.

    In the dtype in which they came, and as exact as they are kept: from the masters of ``optimizer``, or from what
    frozen parameters came with. Where nothing was trained they stay in the dtype that computes.
    """
    full, spec = bucket.parameters.full, bucket.spec
    if not trains or spec.original is spec.dtype:
        return full
    return whole_originals(bucket, _exact(bucket, optimizer)) if spec.keeps_originals else full.to(spec.original)


def _exact(bucket: Bucket, optimizer: ZeroOptimizer | None) -> Pieces:
    """This rank's elements of what is more exact than the parameters."""
    if bucket.parameters.originals is not None:
        yield bucket.kept_range()[0], bucket.parameters.originals.whole()
    elif optimizer is not None and optimizer.updater.broken is None:  # else what a failed step left is of no one step
        for segment in optimizer.updater.visit([bucket]):
            base = segment.chunk * (bucket.layout.size // bucket.num_chunks) + segment.start
            yield base, segment.value(optimizer.inner.state.get(segment.tensor, {}))
