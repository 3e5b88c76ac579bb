"""What the constructor of a ZeRO optimizer was given, checked."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from zoo.config.fates import fates_of, of_today
from zoo.config.section import fields_by_key
from zoo.registry import ByKeywords, config_class, known_keys, make_config, near
from zoo.shard.config import ZeroConfig
from zoo.shard.sharded import ShardedModel
from zoo.zero.options.keywords import OptimizerArguments
from zoo.zero.update import instances
from zoo.zero.update.probe import Tried, Wrapped
from zoo.zero.update.tensor_collectives import cannot_be_whole

_log = logging.getLogger("zoo.zero")

KEYS = frozenset(fields_by_key(ZeroConfig)) | frozenset(fates_of(ZeroConfig))
"""Every name of an option of ``zero_optimization`` itself."""


def resolve_config(
    config: ZeroConfig | Mapping[str, Any] | None, stage: int | None, options: dict[str, Any]
) -> ZeroConfig:  # fmt: skip
    """Take the ZeRO options out of ``options``, by any of their documented names, and put them over ``config``."""
    given = {key: options.pop(key) for key in list(options) if key in KEYS}
    if config is not None and not isinstance(config, (ZeroConfig, Mapping)):
        raise ValueError(
            f"config={config!r} is a {type(config).__name__}; allowed are a zoo.zero.ZeroConfig or a mapping of its "
            "options, as the section zero_optimization of a document has."
        )
    base = config.model_dump() if isinstance(config, ZeroConfig) else _of_today(config or {}, "config=")
    given = _of_today(given, "the keywords")
    if stage is not None:
        given["stage"] = stage
    made: ZeroConfig = make_config("the ZeRO options", ZeroConfig, {**base, **given})
    return made


def _of_today(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options by the names of ``ZeroConfig``; what has no effect is said."""
    names = fields_by_key(ZeroConfig)
    spelled: dict[str, str] = {}
    for key in options:
        name = names.get(key, key)
        if spelled.setdefault(name, key) != key:
            raise ValueError(f"{where} have {spelled[name]} and {key}, which are one option; leave one out.")
    found, sentences = of_today(ZeroConfig, options, where)
    for sentence in sentences:
        _log.warning("%s", sentence)
    return {names.get(key, key): value for key, value in found.items()}


def resolve_optimizer(
    optimizer: Any, options: dict[str, Any], clip_norm: float, *, owner: type
) -> tuple[Any, dict[str, Any], float]:  # fmt: skip
    """What to wrap, its arguments, and the norm to clip to, where a name was given that means something else.

    A name is looked up in the registry (kind "optimizer"). A component with ``stands_for(config)`` is a way to write
    down another one: that gives the class to wrap, its arguments, and a norm that gradients are clipped to, of which
    and ``clip_norm`` the smaller counts.

    Raises:
        ValueError: no such name, or a value that is not allowed. TypeError: an option that is not known.
    """
    if isinstance(optimizer, str):
        from zoo import registry

        optimizer = registry.get("optimizer", optimizer)
    schema = config_class(optimizer)
    if schema is None or not hasattr(optimizer, "stands_for"):
        return optimizer, options, clip_norm
    _check_options(ByKeywords(optimizer, "params"), options, owner)
    made, given, own_norm = optimizer.stands_for(make_config(f"optimizer={optimizer.__name__}", schema, options))
    if own_norm and isinstance(clip_norm, Real):
        clip_norm = min(clip_norm, own_norm) if clip_norm else own_norm
    return made, given, clip_norm


def tell_of_gradients(model: nn.Module) -> None:
    """Say that gradients which are there before construction take part in no step."""
    dropped = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    if dropped:
        _log.warning(
            "%d parameter(s) have gradients from before construction, such as %r: they are dropped, and the first step "
            "does without them. Construct the optimizer before the first backward.", len(dropped), dropped[0],
        )  # fmt: skip


def find_optimizer(
    model: nn.Module, optimizer: Any, params: Iterable[Any] | None, options: Mapping[str, Any], *, owner: type
) -> Wrapped:
    """What to wrap, from a class or an instance; ``owner`` is what will wrap it, whose arguments are meant too.

    Raises:
        ValueError: it is neither, an instance that cannot be taken over, or groups that do not fit the model.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        instances.check(optimizer, params, options)
        groups = optimizer.param_groups
        param_groups_of(model, groups, source="optimizer=")
        try:
            make, arguments = instances.another_like(optimizer)
        except instances.CannotRebuildError as error:
            return Wrapped(
                make=type(optimizer), groups=groups, options={}, instance=optimizer, cannot_rebuild=str(error)
            )
        return Wrapped(make=make, groups=groups, options=arguments, instance=optimizer)
    if not callable(optimizer):
        raise ValueError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass a class (optimizer=torch.optim.AdamW) and "
            "its arguments (lr=3e-4), an instance of one, or its name in the registry."
        )
    if config_class(optimizer) is not None:
        optimizer = ByKeywords(optimizer, "params")
    _check_options(optimizer, options, owner)
    return Wrapped(make=optimizer, groups=param_groups_of(model, params), options=dict(options))


def cannot_train(wrapped: Wrapped, tried: Tried, sharded: ShardedModel, *, scaled: bool) -> Exception | None:
    """What keeps the wrapped optimizer from training a model that is split already; None for nothing.

    ``scaled``: there is a loss scale.
    """
    buckets, make, early = sharded.trainable, wrapped.make, sharded.config.update_in_backward
    found: Exception | None = _cannot_scale(make, sharded) if scaled else None
    found = found or cannot_be_whole(make, buckets)
    if found is None and sharded.switch is not None:
        from zoo.zero.update.synced import cannot_be_sent

        found = cannot_be_sent(buckets, make)
    if found is None and tried.why_whole is not None:
        from zoo.zero.update.unsplit import cannot_be_unsplit

        found = cannot_be_unsplit(tried, wrapped, buckets, in_backward=early)
    return found


def _cannot_scale(make: Any, sharded: ShardedModel) -> ValueError | None:
    if not any(b.routes.feedback is not None and b.routes.feedback.has_loss_scale for b in sharded.trainable):
        return None
    what = "quantized_gradients_feedback=True"
    if sharded.switch is not None:
        what = f"{make.__name__}, whose states are split over all ranks,"
    return ValueError(
        f"{what} with a loss scale: errors are in units of the scale, which changes. Train in bf16, or leave "
        "one of the two out (at stage 0 and among groups of mics_shard_size ranks errors are in another unit)."
    )


def _check_options(optimizer: Any, options: Mapping[str, Any], owner: type) -> None:
    """Raise TypeError for options that are neither of ZeRO nor of the optimizer, with those that are near."""
    known = _keys_of(optimizer)
    if known is None:
        return
    for key in options:
        if key not in known:
            ours = set(inspect.signature(owner).parameters) - set(OptimizerArguments.__annotations__)
            close = near(key, known | KEYS | ours)
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
            raise TypeError(
                f"{key}={options[key]!r} is an option neither of ZeRO nor of {optimizer.__name__}, which takes "
                f"{', '.join(sorted(known))}.{meant}"
            )


def _keys_of(optimizer: Any) -> set[str] | None:
    """The options that it takes; None where that cannot be told."""
    if isinstance(optimizer, ByKeywords):
        schema = config_class(optimizer)
        keys = None if schema is None else known_keys(schema)
        return None if keys is None else set(keys)
    try:
        taken = instances.signature_of(optimizer) if isinstance(optimizer, type) else None
    except ValueError:  # a class without a signature
        return None
    if taken is None or any(p.kind is p.VAR_KEYWORD for p in taken):
        return None
    return {p.name for p in taken}


def param_groups_of(model: nn.Module, params: Iterable[Any] | None, *, source: str = "params=") -> list[dict[str, Any]]:
    """Parameter groups as lists of dicts, each trainable parameter of the model in exactly one; frozen ones in none.

    Args:
        params: tensors, or (name, tensor) pairs, or dicts with either under "params". Names are kept as "param_names".
        source: for messages: which argument they are from.
    """
    trainable = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train.")
    if params is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"{source}{params!r} is a {type(params).__name__}; give parameters, (name, parameter) pairs or groups of "
            "them, as for torch.optim."
        )
    given = list(params)
    groups = [dict(g) for g in given] if given and isinstance(given[0], dict) else [{"params": given}]
    for i, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(
                f"group {i} of {source} has {', '.join(map(repr, group)) or 'nothing'}, and no 'params': the "
                "parameters that these options are for."
            )
        if not isinstance(group["params"], Iterable):
            given_here = f"params={group['params']!r:.60} ({type(group['params']).__name__})"
            raise ValueError(f"group {i} of {source} has {given_here}; it takes parameters, or pairs with names.")
    seen: set[int] = set()
    for i, group in enumerate(groups):
        _split_names(group, f"group {i} of {source}")
        for p in group["params"]:
            if id(p) not in trainable:
                raise ValueError(
                    f"group {i} of {source} holds a tensor of shape {tuple(p.shape)} that is not in the model."
                )
            if id(p) in seen:
                raise ValueError(f"{source} holds {trainable[id(p)]!r} more than once.")
            seen.add(id(p))
    _check_names(groups, source)
    missing = [name for key, name in trainable.items() if key not in seen]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameter(s) are in no group of {source}: {', '.join(missing[:5])}. Add them to "
            "a group, or freeze them (requires_grad=False)."
        )
    return groups


def _split_names(group: dict[str, Any], where: str) -> None:
    """Leave the trainable tensors as ``group["params"]``, and their names, if they have any, as "param_names"."""
    members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    names = list(group.get("param_names", []))
    pairs = [m for m in members if isinstance(m, tuple) and len(m) == 2 and isinstance(m[0], str)]
    if pairs:
        if len(pairs) < len(members):
            raise ValueError(
                f"{len(pairs)} of {len(members)} parameters in {where} come with a name; give all of them as (name, "
                "parameter), or none."
            )
        names, members = [name for name, _ in pairs], [parameter for _, parameter in pairs]
    for member in members:
        if not isinstance(member, torch.Tensor):
            raise ValueError(
                f"a member of {where} is a {type(member).__name__}; allowed are parameters, or pairs of a name and a "
                "parameter."
            )
    kept = [i for i, parameter in enumerate(members) if parameter.requires_grad]
    group["params"] = [members[i] for i in kept]
    if names:
        if len(names) != len(members):
            raise ValueError(f"{where} has {len(names)} param_names for {len(members)} parameters; they must match.")
        group["param_names"] = [names[i] for i in kept]


def _check_names(groups: Sequence[Mapping[str, Any]], source: str) -> None:
    named = [i for i, group in enumerate(groups) if "param_names" in group]
    if named and len(named) < len(groups):
        others = [i for i in range(len(groups)) if i not in named]
        raise ValueError(
            f"groups {', '.join(map(str, named))} of {source} come with names of parameters, "
            f"{', '.join(map(str, others))} come without. Name the parameters of all groups, or of none."
        )
