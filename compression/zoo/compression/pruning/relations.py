"""Which modules lose something with a module that is pruned: ``related_modules``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from zoo.compression.attach import class_of
from zoo.compression.config import RelatedGroupSection
from zoo.compression.patterns import matches, nothing_matches
from zoo.layout import logical_name


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A module that is pruned, and those that go with it."""

    name: str
    """Of the module in the whole model."""
    related: tuple[str, ...]
    """Names of the others; empty: what is pruned keeps its place."""
    where: str
    """The group: "compression_training.row_pruning.different_groups.rp1"."""


def relations_of(
    model: nn.Module, usable: Mapping[str, nn.Module], group: RelatedGroupSection, where: str,
    can: Callable[[nn.Module], bool],
) -> list[Relation]:  # fmt: skip
    """The modules of a group, each with those that are related to it.

    A pattern of ``modules`` that means n modules has a list of patterns in ``related_modules``, of which each means n
    modules, or a multiple: the first share of them goes with the first module, and so on, in the order of the model.

    Args:
        usable: modules that can be pruned, by name.
        can: whether a module may be related.

    Raises:
        ValueError: a pattern without modules, or numbers that cannot be shared out.
    """
    others = {name: module for name, module in modules_of(model).items() if name and can(module)}
    found: dict[str, list[str]] = {}
    for i, pattern in enumerate(group.modules):
        names = [name for name in usable if matches(pattern, name)]
        for name in names:
            found.setdefault(name, [])
        if not names:
            continue  # they are on another stage of a pipeline
        for theirs in group.related_modules[i] if group.related_modules is not None else ():
            these = [name for name in others if matches(theirs, name)]
            place = f"{where}.related_modules[{i}]"
            if not these:
                raise nothing_matches(place, theirs, others)
            if len(these) % len(names):
                raise ValueError(
                    f"{place}: the pattern {theirs!r} means {len(these)} modules ({', '.join(these[:4])}"
                    f"{', ...' if len(these) > 4 else ''}), and {pattern!r} of modules means {len(names)}; each of "
                    "them is related to as many. Make one of the patterns narrower or wider."
                )
            share = len(these) // len(names)
            for j, name in enumerate(names):
                found[name] += [n for n in these[j * share : (j + 1) * share] if n not in found[name]]
    return [Relation(name=name, related=tuple(related), where=where) for name, related in found.items()]


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """All modules by their names in the whole model, without those of wrappers."""
    return {logical_name(model, name) if name else "": module for name, module in model.named_modules()}


def described(module: nn.Module, name: str) -> str:
    """ "'fc1' (Linear)" """
    return f"{name!r} ({class_of(module).__name__})"
