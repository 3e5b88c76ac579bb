"""From the section of a configuration to transforms on a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from zoo.compression.attach import attach, class_of, detach
from zoo.compression.config import ROOT, CompressionConfig, TechniqueSection
from zoo.compression.patterns import matches, nothing_matches
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


def usable_by(technique: AnyTechnique, model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have something for a technique, by their names in the whole model."""
    inside = inner_weights(model)
    found = {name: module for name, module in model.named_modules() if id(module) not in inside}
    usable = {logical_name(model, name) if name else "": m for name, m in found.items() if technique.sites(m)}
    for pattern in technique.excluded:
        if not any(matches(pattern, name) for name in usable):
            raise nothing_matches(f"{ROOT}.{technique.name}.shared_parameters.excluded_modules", pattern, usable)
    return {name: m for name, m in usable.items() if not any(matches(p, name) for p in technique.excluded)}


def compress(
    model: nn.Module, techniques: Mapping[str, AnyTechnique], elsewhere: Mapping[str, Iterable[str]] | None = None
) -> list[Transform]:  # fmt: skip
    """Attach what techniques make for their groups: all of it or, after an error, nothing.

    A weight that several modules share is changed in all of them, whichever the patterns mean.

    Args:
        elsewhere: technique → names of modules that it can change on other stages of a pipeline.

    Raises:
        ValueError: a pattern without modules, a module in two groups, options that do not fit, two transforms that
            contradict each other.
    """
    holders = holders_of(model)
    there = elsewhere or {}
    made: list[tuple[nn.Module, Transform]] = []
    for name, technique in techniques.items():
        these = _made(technique, model, there.get(name, ()))
        these += technique.related(model, [transform for _, transform in these])
        asked = asked_of(technique.section)
        for _, transform in these:
            transform.asked = asked
        made += these
    try:
        for module, transform in made:
            site = transform.site
            attach(module, site.where, site.parameter, transform)
            weight = parameter_of(module, site.parameter) if site.where == "weight" else None
            for partner, parameter in holders.get(id(weight), ()):
                if (partner, parameter) != (module, site.parameter):
                    attach(partner, "weight", parameter, transform)
    except BaseException:
        detach(model, [transform for _, transform in made])
        raise
    return [transform for _, transform in made]


Holders = Mapping[int, list[tuple[nn.Module, str]]]


def holders_of(model: nn.Module) -> Holders:
    """id of a parameter → the modules in whose forward it is used, and its name there."""
    inside = inner_weights(model)
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        if id(module) not in inside:
            for name in {**module._parameters, **dict.fromkeys(weights_of(module))}:
                weight = parameter_of(module, name)
                if weight is not None:
                    found.setdefault(id(weight), []).append((module, name))
    return found


def _made(
    technique: AnyTechnique, model: nn.Module, elsewhere: Iterable[str]
) -> list[tuple[nn.Module, Transform]]:  # fmt: skip
    """The transforms of one technique, and the modules of their sites."""
    usable = usable_by(technique, model)
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
                _check_whole(site, weight)
                if weight is None or before is None:
                    made.append((module, technique.transform(site, group, module)))
            group_of[path] = name
    return made


def _check_whole(site: Site, weight: nn.Parameter | None) -> None:
    """Raise NotImplementedError for a weight of which there is more on other ranks than data-parallel copies."""
    split = split_of(weight)
    why = ""
    if split.axes and split.shape is not None:
        why = f"is split along the mesh axes {', '.join(split.axes)}, and what is made of parts is not part of a whole"
    elif split.tied:
        why = f"is one with a weight of another stage ({split.tied!r}), whose layer may use it in another way"
    if why:
        raise NotImplementedError(f"{site.group}: {site.name} {why}. Let the patterns leave the module out.")
