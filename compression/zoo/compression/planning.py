"""From the section of a configuration to transforms on a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from zoo.compression.attach import attach, class_of, detach
from zoo.compression.config import ROOT, CompressionConfig, TechniqueSection
from zoo.compression.patterns import matches, nothing_matches
from zoo.compression.place import Place
from zoo.compression.pruning.modules import out_dim_of
from zoo.compression.technique import Site, Technique, Transform, inner_weights, parameter_of, weights_of
from zoo.layout import logical_name, split_of
from zoo.registry import DEFAULT, Registry

KIND = "compression_technique"
AnyTechnique = Technique[Any, Any]


def techniques_of(config: CompressionConfig, *, seed: int = 0, registry: Registry = DEFAULT) -> dict[str, AnyTechnique]:
    """The techniques that a section asks for, by name.

    Raises:
        NotImplementedError: nobody has registered one of them.
    """
    known = registry.names(KIND)
    found: dict[str, AnyTechnique] = {}
    for name, section in config.techniques.items():
        if name not in known:
            raise NotImplementedError(
                f"{ROOT}.{name}: asked for, and there is no technique of this name; there are "
                f"{', '.join(sorted(known)) or 'none'}. Leave the section out, or register one as {KIND}.{name}."
            )
        found[name] = registry.get(KIND, name)(section, seed=seed)
    return found


def asked_of(section: TechniqueSection) -> dict[str, Any]:
    """What the section of a technique asks for, as plain values; what is only said in the log is left out."""
    found = section.model_dump(mode="json")
    found["shared_parameters"].pop("quantize_verbose", None)
    return found


def chosen(
    model: nn.Module, patterns: Iterable[str], where: str, usable: Mapping[str, nn.Module],
    elsewhere: Iterable[str] = (),
) -> dict[str, nn.Module]:  # fmt: skip
    """The modules of ``usable`` (name → module) that patterns mean, in the order of the model.

    Args:
        elsewhere: names of such modules on other stages of a pipeline, which a pattern may mean too.

    Raises:
        ValueError: a pattern that means none of them.
    """
    found: set[str] = set()
    for pattern in patterns:
        these = {name for name in usable if matches(pattern, name)}
        if not these and not any(matches(pattern, name) for name in elsewhere):
            others = [m for name, m in model.named_modules() if name and matches(pattern, name)]
            kinds = ", ".join(sorted({class_of(m).__name__ for m in others}))
            why = f"matches only what cannot be compressed so ({kinds})" if others else ""
            raise nothing_matches(where, pattern, {*usable, *elsewhere}, why)
        found |= these
    return {name: module for name, module in usable.items() if name in found}


def named_for(technique: AnyTechnique, model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have something for a technique, by their names in the whole model."""
    inside = inner_weights(model)
    found = {name: m for name, m in model.named_modules() if id(m) not in inside and not _only_holds(m)}
    return {logical_name(model, name) if name else "": m for name, m in found.items() if technique.sites(m)}


def _only_holds(module: nn.Module) -> bool:
    """Whether it is never called, and has what others use: so a stage of a pipeline has weights of other stages."""
    return class_of(module).forward is nn.Module.forward


def usable_by(technique: AnyTechnique, model: nn.Module, elsewhere: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Of :func:`named_for` those that are not excluded.

    Args:
        elsewhere: names of such modules on other ranks.

    Raises:
        ValueError: a pattern excludes nothing.
    """
    usable = named_for(technique, model)
    for pattern in technique.excluded:
        if not any(matches(pattern, name) for name in (*usable, *elsewhere)):
            raise nothing_matches(
                f"{ROOT}.{technique.name}.shared_parameters.excluded_modules", pattern, {*usable, *elsewhere}
            )
    return {name: m for name, m in usable.items() if not _is_excluded(technique, name)}


def _is_excluded(technique: AnyTechnique, name: str) -> bool:
    return any(matches(pattern, name) for pattern in technique.excluded)


def compress(
    model: nn.Module, techniques: Mapping[str, AnyTechnique], elsewhere: Mapping[str, Iterable[str]] | None = None
) -> list[Transform]:  # fmt: skip
    """Attach what techniques make for their groups: all of it or, after an error, nothing.

    A weight that several modules share is changed in all of them, whichever the patterns mean.

    Args:
        elsewhere: technique → names of modules that it can change on other ranks.

    Raises:
        ValueError: a pattern without modules, a module in two groups, options that do not fit, two transforms that
            contradict each other.
    """
    return attach_all(model, made_by(model, techniques, elsewhere))


Made = list[tuple[nn.Module, Transform]]
"""Transforms, and the modules of their sites."""


def made_by(
    model: nn.Module, techniques: Mapping[str, AnyTechnique], elsewhere: Mapping[str, Iterable[str]] | None = None
) -> Made:  # fmt: skip
    """What :func:`compress` attaches."""
    there = elsewhere or {}
    made: Made = []
    for name, technique in techniques.items():
        these = _made(technique, model, there.get(name, ()))
        these += technique.related(model, [transform for _, transform in these])
        asked = asked_of(technique.section)
        for _, transform in these:
            transform.asked = asked
        made += these
    for module, transform in made:
        transform.place = place_of(module, transform.site)
    return made


def attach_all(model: nn.Module, made: Made) -> list[Transform]:
    """Attach transforms to the modules of their sites, and to all that have the same weight."""
    holders = holders_of(model)
    try:
        for module, transform in made:
            site = transform.site
            weight = parameter_of(module, site.parameter) if site.where == "weight" else None
            at = holders.get(id(weight), ())
            for partner, parameter in at or [(module, site.parameter)]:
                attach(partner, site.where, parameter, transform)
    except BaseException:
        detach(model, [transform for _, transform in made])
        raise
    return [transform for _, transform in made]


def place_of(module: nn.Module, site: Site) -> Place:
    """Where the tensor of a site is."""
    if site.where == "weight":
        split = split_of(parameter_of(module, site.parameter))
        return Place(
            apart=split.axes, along=split.axes if split.shape is not None else (), shape=split.shape, box=split.box,
            partial=split.partial,
        )  # fmt: skip
    apart: dict[str, None] = {}
    along: tuple[str, ...] = ()
    for name in weights_of(module):
        split = split_of(parameter_of(module, name))
        if split.shape is None or split.box is None:
            apart |= dict.fromkeys(split.axes)
        elif site.where == "input" and name == "weight":
            inputs = 1 - out_dim_of(module)
            along = split.axes if split.box.sizes[inputs] != split.shape[inputs] else ()
    return Place(apart=tuple(apart), along=along)


Holders = Mapping[int, list[tuple[nn.Module, str]]]


def holders_of(model: nn.Module) -> Holders:
    """id of a parameter → the modules in whose forward it is used, and its name there."""
    inside = inner_weights(model)
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        if id(module) not in inside and not _only_holds(module):
            for name in {**module._parameters, **dict.fromkeys(weights_of(module))}:
                weight = parameter_of(module, name)
                if weight is not None:
                    found.setdefault(id(weight), []).append((module, name))
    return found


def _made(
    technique: AnyTechnique, model: nn.Module, elsewhere: Iterable[str]
) -> list[tuple[nn.Module, Transform]]:  # fmt: skip
    """The transforms of one technique, and the modules of their sites."""
    usable = usable_by(technique, model, elsewhere)
    elsewhere = [name for name in elsewhere if not _is_excluded(technique, name)]
    group_of: dict[str, str] = {}
    known: dict[int, tuple[str, str]] = {}  # weights that have a transform → their group and name
    made: list[tuple[nn.Module, Transform]] = []
    for name, group in technique.groups().items():
        where = technique.place(name)
        for path, module in chosen(model, group.modules, f"{where}.modules", usable, elsewhere).items():
            for tensor, parameter in technique.sites(module):
                site = Site(module=path, where=tensor, parameter=parameter, technique=technique.name, group=where)
                weight = parameter_of(module, parameter) if tensor == "weight" else None
                before = (group_of.get(path), site.name) if weight is None else known.get(id(weight))
                if before is not None and before[0] not in (None, name):
                    raise ValueError(
                        f"{where}.modules: {site.name!r} belongs to the group {before[0]!r} too"
                        f"{f' as {before[1]!r}' if before[1] != site.name else ''}; a tensor is in one group of a "
                        "technique. Make the patterns of one of them narrower."
                    )
                if weight is not None and before is None:
                    known[id(weight)] = (name, site.name)
                _check_ours(site, weight)
                if weight is None or before is None:
                    made.append((module, technique.transform(site, group, module)))
            group_of[path] = name
    return made


def _check_ours(site: Site, weight: nn.Parameter | None) -> None:
    """Raise NotImplementedError for a weight that computes in a way that transforms cannot follow."""
    if weight is not None and hasattr(weight, "device_mesh"):
        raise NotImplementedError(
            f"{site.group}: {site.name} is a DTensor, which its module sees through a property that a transform cannot "
            "change. Declare ordinary parameters as parts (zoo.layout.declare_split), or let the patterns leave the "
            "module out."
        )
