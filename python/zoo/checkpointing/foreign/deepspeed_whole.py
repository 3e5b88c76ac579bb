"""DeepSpeed without ZeRO: the optimizer's state is torch's, by the numbers of parameters in its groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.deepspeed_files import need_dict, need_list
from zoo.checkpointing.foreign.deepspeed_stages import Shapes
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint, Run
from zoo.checkpointing.foreign.regions import StoredTensor


def add_whole_states(
    found: ForeignCheckpoint, model: dict[Any, Any], names: Sequence[Sequence[str]] | None, states: bool, what: str
) -> Shapes:
    """Masters and states of stage 0, by names; returns name → shape of each group's parameters.

    Raises:
        CheckpointError: they cannot be told apart, or do not fit the model's parameters.
    """
    optimizer = model.get("optimizer")
    module = need_dict(model.get("module") or {}, what)
    if not states or not isinstance(optimizer, dict):
        return []
    inner = need_dict(optimizer.get("optimizer_state_dict", optimizer), what)
    groups = [need_dict(group, what) for group in need_list(inner.get("param_groups"), what)]
    entries = need_dict(inner.get("state", {}), what)
    tensors = {n: v for n, v in module.items() if isinstance(n, str) and isinstance(v, StoredTensor)}
    chosen = _names(names, tensors, model, groups, what)
    shapes: Shapes = []
    masters = optimizer.get("fp32_groups", optimizer.get("fp32_groups_flat"))
    for number, (group, own) in enumerate(zip(groups, chosen, strict=True)):
        members = need_list(group.get("params"), what)
        missing = [name for name in own if name not in tensors]
        if missing:
            raise CheckpointError(f"{what} has no parameter {missing[0]!r}; groups must hold the model's own names")
        shapes.append({name: tensors[name].shape for name in own})
        held = need_list(masters, what)[number : number + 1] if masters is not None else []
        if len(members) == 1 and len(own) > 1:  # a fused fp16 optimizer: one flat tensor for the group
            _add_flat(found, shapes[-1], held, need_dict(entries.get(members[0], {}), what), what)
            continue
        if len(members) != len(own):
            raise CheckpointError(
                f"group {number} of {what} has {len(members)} parameters; {len(own)} names were given"
            )
        copies = need_list(held[0], what) if held else [tensors[name] for name in own]
        of_members = [need_dict(entries.get(m, {}) if type(m) is int else {}, what) for m in members]
        for at, (name, state) in enumerate(zip(own, _with_steps(of_members), strict=True)):
            _add_one(found, name, copies[at] if at < len(copies) else None, state, shapes[-1][name], what)
    return shapes


def _with_steps(states: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """DeepSpeed's fused Adam counts the steps of a group in the state of its last parameter, and leaves 0 in the
    others: the largest one is that of all."""
    latest = max((s["step"] for s in states if type(s.get("step")) is int), default=0)
    return [{**s, "step": latest} if type(s.get("step")) is int and not s["step"] else s for s in states]


def _names(
    names: Sequence[Sequence[str]] | None, tensors: dict[str, StoredTensor], model: dict[Any, Any], groups: list[Any],
    what: str,
) -> list[list[str]]:  # fmt: skip
    if names is not None:
        if len(names) != len(groups):
            raise CheckpointError(f"{what} has {len(groups)} groups of parameters; groups= names {len(names)}")
        return [list(group) for group in names]
    buffers = set(map(str, need_list(model.get("buffer_names") or [], what)))
    places: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if name not in buffers:  # a tied parameter lies in one place under two names
            places.setdefault((tensor.data.start, tensor.offset, tensor.shape, tensor.numel or name), name)
    order = list(places.values())
    if len(groups) != 1 or len(need_list(groups[0].get("params"), what)) not in (len(order), 1):
        raise CheckpointError(
            f"{what} was written without ZeRO: its optimizer has its states by numbers, of {len(groups)} groups. Give "
            "groups=[[names of the parameters of the first group, in its order], …], or optimizer_states=False; an "
            "engine that cannot know the names, as that of a pipeline, takes load_optimizer_states=False"
        )
    return [order]


def _add_one(
    found: ForeignCheckpoint, name: str, master: Any, state: dict[Any, Any], shape: tuple[int, ...], what: str
) -> None:
    values = {"parameter": master, **state}
    for role, value in values.items():
        if isinstance(value, StoredTensor) and value.shape == shape and (shape or role != "step"):
            found.add_whole(name, str(role), value)
        elif isinstance(value, StoredTensor) and value.numel == 1:
            found.scalars[f"{role}/{name}"] = float(value.tensor())
        elif type(value) in (int, float) and abs(value) < 2**53:
            found.scalars[f"{role}/{name}"] = value
        elif isinstance(value, StoredTensor) or role == "parameter":
            raise CheckpointError(
                f"{what} has a {role} of {name!r} that does not have its shape {shape}; are groups= right?"
            )


def _add_flat(
    found: ForeignCheckpoint, shapes: dict[str, tuple[int, ...]], held: list[Any], state: dict[Any, Any], what: str
) -> None:
    values = {"parameter": held[0] if held else None, **state}
    for role, value in values.items():
        at = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            if isinstance(value, StoredTensor) and len(value.shape) == 1 and value.numel >= at + numel:
                found.add(name, str(role), shape, [Run(0, numel, value, at)])
            elif isinstance(value, StoredTensor) and not value.shape:
                found.scalars[f"{role}/{name}"] = float(value.tensor())
            elif type(value) in (int, float) and abs(value) < 2**53:
                found.scalars[f"{role}/{name}"] = value
            elif role == "parameter" or isinstance(value, StoredTensor):
                raise CheckpointError(f"{what} has a flat {role} that is too short for its group")
            at += numel
