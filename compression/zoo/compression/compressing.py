"""``init_compression`` and ``redundancy_clean``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from zoo.compression.attach import attached_to, detach, transforms_of
from zoo.compression.config import ROOT, CompressionConfig
from zoo.compression.layer_reduction import begin_as_teacher
from zoo.compression.moq.periods import moq_of
from zoo.compression.moq.sections import MOQ
from zoo.compression.planning import AnyTechnique, asked_of, compress, techniques_of
from zoo.compression.technique import POST_TRAINING, Transform, applied, parameter_of
from zoo.config import Config, read, read_section
from zoo.registry import DEFAULT, Registry

ModelT = TypeVar("ModelT")
Source = str | Path | Mapping[str, Any] | Config


def init_compression(
    model: ModelT, config: Source, teacher_model: nn.Module | None = None, mpu: Any = None, *,
    registry: Registry = DEFAULT,
) -> ModelT:  # fmt: skip
    """Compress a model as ``compression_training`` and ``quantize_training`` say, before it is trained.

    Its modules get transforms (:mod:`zoo.compression.attach`), which begin at their steps; an engine that is made with
    the same configuration takes them over. Call it on every rank, before anything is sharded.

    Args:
        model: itself changed; what is wrapped (with an attribute ``module``) is compressed inside.
        config: path of a document, the document, or what ``zoo.config.load`` returned.
        teacher_model: what layer_reduction takes layers from; it may be the same class with more layers.
        mpu: None. What DeepSpeed asks here (which ranks are tensor-parallel) is said by the mesh.

    Returns:
        the model.

    Raises:
        ValueError: what is wrong in the section, with the group, the pattern or the module.
        NotImplementedError: a technique that is not there.
    """
    _check_mpu(mpu)
    section, techniques = asked_for(config, registry)
    inner = inner_of(model)
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise ValueError(
                f"{ROOT}.layer_reduction: enabled, and there is no teacher; call init_compression(model, config, "
                "teacher_model=...) with the model whose layers the student begins with."
            )
        begin_as_teacher(inner, inner_of(teacher_model), section.layer_reduction)
    compress(inner, techniques)
    return model


def redundancy_clean(
    model: ModelT, config: Source, mpu: Any = None, *, registry: Registry = DEFAULT
) -> ModelT:  # fmt: skip
    """Make what was trained with transforms a model without them: each weight becomes what its transforms make of it
    at the end of their schedule, and what is zero goes away where a technique can take it away.

    Transforms of inputs and outputs stay, because no weight can stand for them; ``detach`` of ``zoo.compression`` takes
    them off. Call ``engine.destroy()`` first where parameters are partitioned (stage 3) or training goes on.

    Args:
        model: with transforms, of ``init_compression`` or of an engine, or that engine; itself changed.
        config: as it was compressed with.
        mpu: None.

    Raises:
        ValueError: the model has no transforms, or others than the configuration says, or no values.
    """
    _check_mpu(mpu)
    _, techniques = asked_for(config, registry)
    inner = inner_of(model)
    check_same(inner, techniques)
    found = [t for t in transforms_of(inner) if t.site.where == "weight"]
    empty = [name for name, p in inner.named_parameters() if p.is_meta]
    if empty:
        raise ValueError(f'{empty[0]} is on "meta" and has no values to clean; load the model first.')
    with torch.no_grad():
        fixed = _fixed(inner)
        for weight, value in fixed:
            weight.data.copy_(value)
    detach(inner, found)
    for technique in techniques.values():
        technique.shrink(inner, [t for t in found if t.site.technique == technique.name])
    return model


def _fixed(model: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Each weight with what it becomes."""
    try:
        return [
            (weight, applied(module, transforms, weight, lambda transform, value: transform.fixed(value)))
            for module, weight, transforms in _by_weight(model)
        ]
    except RuntimeError as error:
        from zoo.shard import PartitionedAccessError

        if not isinstance(error, PartitionedAccessError):
            raise
        raise ValueError(
            "redundancy_clean() got a model whose parameters are partitioned (ZeRO stage 3), so that no rank has the "
            "weights to prune; call engine.destroy() first: it gives the model back whole."
        ) from error


def asked_for(
    config: Source, registry: Registry = DEFAULT
) -> tuple[CompressionConfig, dict[str, AnyTechnique]]:  # fmt: skip
    """``compression_training`` of a configuration, and the techniques that it and ``quantize_training`` ask for."""
    if isinstance(config, Config):
        section, moq, eigenvalue = getattr(config, ROOT), getattr(config, MOQ), config.eigenvalue
        seed = int(config.seed)
    else:
        section, moq, eigenvalue = (read_section(name, config, registry=registry) for name in (ROOT, MOQ, "eigenvalue"))
        given = read(config, registry=registry).values.get("seed")
        seed = int(given) if isinstance(given, int) else int(Config.model_fields["seed"].default)
        problems = [*section.problems(), *moq.problems(section), *eigenvalue.problems(moq)]
        if problems:
            raise ValueError("; ".join(problems))
    return section, {**techniques_of(section, seed=seed, registry=registry), **moq_of(moq, eigenvalue, seed=seed)}


def inner_of(model: Any) -> nn.Module:
    """What a wrapper (an engine, DistributedDataParallel) has inside."""
    inner = getattr(model, "module", None)
    wraps = isinstance(inner, nn.Module) and (not isinstance(model, nn.Module) or len(list(model.children())) == 1)
    if not wraps and not isinstance(model, nn.Module):
        raise ValueError(f"got a {type(model).__name__}; it takes a torch.nn.Module, or an engine that has one.")
    return inner_of(inner) if wraps else model


def check_same(model: nn.Module, techniques: Mapping[str, AnyTechnique]) -> None:
    """Raise ValueError unless the model has transforms of just the groups and options that techniques have."""
    there = [t for t in transforms_of(model) if t.site.technique != POST_TRAINING]
    asked = {technique.place(group) for technique in techniques.values() for group in technique.groups()}
    lacking = sorted(asked - {t.site.group for t in there})
    strange = sorted({t.site.group or t.site.technique for t in there if t.site.technique not in techniques})
    if lacking or strange:
        both = [f"lacks {', '.join(lacking)}"] * bool(lacking) + [f"has {', '.join(strange)} besides"] * bool(strange)
        raise ValueError(
            f"the model is not compressed as the configuration says: it {' and '.join(both)}. Give the configuration "
            "that it was compressed with, or call init_compression(model, config) first."
        )
    for transform in there:
        name = transform.site.technique
        if transform.asked is None:
            continue
        for where, before, now in _unlike(f"{ROOT}.{name}", transform.asked, asked_of(techniques[name].section)):
            raise ValueError(
                f"the model was compressed with {where} = {before!r}, and the configuration says {now!r}. Give the "
                "configuration that it was compressed with, or call init_compression on the model as it was before."
            )


def _unlike(where: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two documents differ, and what each has there."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _unlike(f"{where}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield where, before, now


def _by_weight(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter, Sequence[Transform]]]:
    found: dict[int, tuple[nn.Module, nn.Parameter, Sequence[Transform]]] = {}
    for module in model.modules():
        for (where, path), transforms in attached_to(module).items():
            weight = parameter_of(module, path) if where == "weight" else None
            if weight is not None:
                found[id(weight)] = (module, weight, transforms)
    return list(found.values())


def _check_mpu(mpu: Any) -> None:
    if mpu is not None:
        raise ValueError(
            f"mpu = {type(mpu).__name__}: the section mesh of the configuration names the ranks along a tensor axis. "
            "Leave mpu out."
        )
