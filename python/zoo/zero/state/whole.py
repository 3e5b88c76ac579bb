"""Whole parameters one bucket after the other, for what reads all of them without room for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from zoo.zero.sharding.buckets import Bucket


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
                parameters.release()
            elif hidden:
                parameters.hide()
