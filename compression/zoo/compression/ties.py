"""Weights that several stages of a pipeline have: one transform for all of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from zoo.compression.planning import AnyTechnique, Made, holders_of
from zoo.compression.technique import Site, Transform, parameter_of
from zoo.layout import split_of

TieKey = tuple[str, int]
Ties = dict[TieKey, list[Transform]]
"""Transforms of this rank, by the weight."""


def ties_of(model: nn.Module, made: Made) -> Ties:
    """What a rank has made for weights that other stages have too; nothing for those that have none yet."""
    keys = _keys(model)
    found: Ties = {}
    for module, transform in made:
        site = transform.site
        weight = parameter_of(module, site.parameter) if site.where == "weight" else None
        if id(weight) in keys:
            found.setdefault(keys[id(weight)], []).append(transform)
    return found


def with_ties(
    model: nn.Module, made: Made, everywhere: Sequence[Ties], techniques: Mapping[str, AnyTechnique]
) -> Made:  # fmt: skip
    """What a rank has made, and for each tied weight what the first rank that has made something has.

    Args:
        everywhere: what :func:`ties_of` gave, rank by rank.

    Raises:
        NotImplementedError: two ranks have made different transforms of one technique for a weight.
    """
    keys, holders, found, here = _keys(model), holders_of(model), list(made), ties_of(model, made)
    for weight_id, key in keys.items():
        mine = {transform.site.technique: transform for transform in here.get(key, ())}
        first: dict[str, Transform] = {}
        for there in everywhere:
            for transform in there.get(key, ()):
                known = first.setdefault(transform.site.technique, transform)
                if _kind(known) != _kind(transform):
                    raise NotImplementedError(
                        f"{transform.site.group}: {transform.site.name} is one with {known.site.name} of another stage "
                        f"({key[0]!r}), and the two modules would have it changed in different ways. Let the patterns "
                        "mean only one of them."
                    )
        for name, transform in first.items():
            if name in mine:
                mine[name].site = replace(transform.site, parameter=mine[name].site.parameter)
                continue
            module, parameter = holders[weight_id][0]
            own = techniques[name].adopt(copy.deepcopy(transform), module, parameter)
            own.site = replace(transform.site, parameter=parameter)
            found.append((module, own))
    return found


def _keys(model: nn.Module) -> dict[int, TieKey]:
    """id of each parameter that other stages have too → what it is called on all of them."""
    found: dict[int, TieKey] = {}
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        tied = split_of(parameter).tied
        if tied:
            found[id(parameter)] = (tied, counts.get(tied, 0))
            counts[tied] = counts.get(tied, 0) + 1
    return found


def _kind(transform: Transform) -> tuple[type, dict[str, Any]]:
    """What a transform does, whatever its site is."""
    plain = (bool, int, float, str, tuple, type(None))
    values = {k: v for k, v in vars(transform).items() if isinstance(v, plain) and not isinstance(v, Site | Tensor)}
    return type(transform), values
