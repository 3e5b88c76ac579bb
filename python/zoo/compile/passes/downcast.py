"""What could travel in fewer bytes: parameters that a graph casts before anything reads them.

In which dtype a bucket travels is decided when the model is split, alike on all ranks (``Precision.gather``); no rank
changes it by compiling. So this pass changes nothing. It says of each bucket what its graph shows, and warns where
something reads values that were rounded on their way.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import torch
from torch import fx

from zoo.compile.capture import CASTS, alias_of
from zoo.compile.ops import EVENTS
from zoo.compile.plan import GraphPlan
from zoo.shard.buckets import Bucket
from zoo.shard.placement.precision import COMPUTES, rounds

_log = logging.getLogger("zoo.compile")


def downcast(graph: fx.GraphModule, plan: GraphPlan) -> fx.GraphModule:
    """See above."""
    if plan.backward:
        return graph
    found: dict[Bucket, dict[str, frozenset[torch.dtype]]] = defaultdict(dict)
    for place, (bucket, slot) in plan.parameters(graph.graph).items():
        if bucket.partitioned:
            found[bucket][bucket.called(slot)] = _uses(place, bucket.spec.dtype)
    for bucket, uses in found.items():
        if said := _told(bucket, uses):
            plan.say("downcast", said)
    return graph


def _uses(place: fx.Node, own: torch.dtype) -> frozenset[torch.dtype]:
    """The dtypes in which a parameter, or a view of it, is read."""
    found: set[torch.dtype] = set()
    for user in place.users:
        if user.target in CASTS and isinstance(user.meta.get("val"), torch.Tensor):
            dtype = user.meta["val"].dtype
            found.add(dtype if dtype in COMPUTES else own)
        elif alias_of(user):
            found |= _uses(user, own)
        elif user.op != "output" and user.target not in EVENTS:
            found.add(own)
    return frozenset(found)


def _told(bucket: Bucket, uses: dict[str, frozenset[torch.dtype]]) -> str:
    own, travels = bucket.spec.dtype, bucket.spec.gather or bucket.spec.dtype
    kinds = {dtype for found in uses.values() for dtype in found}
    lossy = rounds(own, travels)
    wide = [(name, dtype) for name, found in uses.items() for dtype in found if lossy and rounds(dtype, travels)]
    if wide:
        read = ", ".join(f"{name} is read as {'it is' if dtype is own else dtype}" for name, dtype in wide)
        said = f"{bucket.label} travels as {travels}, and {read}"
        _log.warning("%s: rounded. Leave it out of Precision(gather=...).", said)
        return said
    if travels is not own:
        return f"{bucket.label} travels as {travels}: {bucket.layout.size * travels.itemsize:,} bytes"
    if len(kinds) > 1:
        named = "; ".join(
            f"{', '.join(n for n, found in uses.items() if dtype in found)} as {dtype}"
            for dtype in sorted(kinds, key=str)
        )
        return f"{bucket.label} has mixed uses, and travels as {own}: {named}"
    if kinds and (dtype := next(iter(kinds))).itemsize < own.itemsize:
        return f"{bucket.label} is used as {dtype} alone, and travels as {own}: see use_dtypes"
    return ""
