"""Where the elements of parameters lie in the flat partitions of DeepSpeed's ZeRO optimizers.

Stages 1 and 2 lay the parameters of a group one after the other, each followed by its alignment padding, pad the end,
and cut this vector into as many partitions of P elements as the group has data-parallel ranks: rank r has
[r P, (r + 1) P). Masters are written without the padding at the end, states of the optimizer usually with it.

Stage 3 splits every parameter for itself: rank r of W has its elements [r ⌈n/W⌉, (r + 1) ⌈n/W⌉), and lays these parts
one after the other in the flat tensors of its sub-groups. Frozen parameters are split in the same way.

Parameters of experts belong to groups with fewer partitions than there are ranks: of W ranks and c partitions, W / c
expert-parallel ranks have different experts; rank r is number r mod (W / c) of them, and has partition r // (W / c).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.deepspeed_files import need_dict, need_list, need_number
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint, Run
from zoo.checkpointing.foreign.regions import MAX_DIMS, StoredTensor, is_size

_EXPERTS = re.compile(r"(.*deepspeed_experts\.)(\d{1,6})(\..*)")
Shapes = list[dict[str, tuple[int, ...]]]


def shapes_of(value: Any, what: str) -> Shapes:
    """Name → shape of the parameters of each group, in the order in which they lie."""
    found: Shapes = []
    for group in need_list(value, what):
        found.append({})
        for name, shape in need_dict(group, what).items():
            right = isinstance(name, str) and isinstance(shape, (tuple, list)) and len(shape) <= MAX_DIMS
            if not right or not all(map(is_size, shape)) or math.prod(shape) >= 2**48:
                raise CheckpointError(f"{what} has a parameter {str(name)[:80]!r} without a shape")
            found[-1][name] = tuple(shape)
    return found


@dataclass
class GroupState:
    """What one rank has of one group (stage 3: sub-group): flat tensors by role, and single numbers."""

    tensors: dict[str, StoredTensor]
    numbers: dict[str, float]


def group_states(state: Mapping[Any, Any], masters: list[Any], base: Any, what: str) -> list[GroupState]:
    """The groups of one rank, from its optimizer's ``state_dict``.

    Args:
        masters: the fp32 partitions, one for each group.
        base: the state of the optimizer inside: a ``state_dict`` of torch, whose states may be a list, one for each
            partition; or (elastic checkpoints) such a list.
    """
    found = []
    entries: list[Any] = []
    options: list[Any] = [{}] * len(masters)
    if isinstance(base, (list, tuple)):
        entries = list(base)
    elif isinstance(base, dict) and isinstance(base.get("state"), (list, tuple)):
        entries = list(base["state"])
    elif base is not None:
        inner = need_dict(base, what)
        states = need_dict(inner.get("state", {}), what)
        groups = [need_dict(group, what) for group in need_list(inner.get("param_groups", []), what)]
        members = [(number, group) for group in groups for number in need_list(group.get("params", []), what)]
        entries = [states.get(number, {}) if type(number) is int else {} for number, _ in members]
        options = [group for _, group in members] or options
    if entries and len(entries) != len(masters):
        raise CheckpointError(f"{what} has {len(masters)} partitions of parameters and {len(entries)} of states")
    for number, master in enumerate(masters):
        tensors = {"parameter": _flat(master, what)}
        numbers: dict[str, float] = {}
        for source in (options[number], entries[number] if entries else {}):
            for role, value in need_dict(source, what).items():
                if role == "step" or (isinstance(role, str) and source is not options[number]):
                    _keep(role, value, tensors, numbers, what)
        if type(state.get("base_optimizer_state_step")) is int:
            numbers.setdefault("step", float(state["base_optimizer_state_step"]))
        found.append(GroupState(tensors, numbers))
    return found


def _keep(role: str, value: Any, tensors: dict[str, StoredTensor], numbers: dict[str, float], what: str) -> None:
    if isinstance(value, StoredTensor):
        if value.numel == 1 and not value.shape:
            numbers[role] = float(value.tensor())
        elif role != "parameter" and len(value.shape) == 1:
            tensors[role] = value
    elif type(value) in (int, float) and abs(value) < 2**53:
        numbers[role] = float(value)


def _flat(value: Any, what: str) -> StoredTensor:
    if not isinstance(value, StoredTensor) or len(value.shape) != 1:
        raise CheckpointError(f"{what} has a partition that is no flat tensor")
    return value


def add_partitioned(
    found: ForeignCheckpoint, shapes: Shapes, ranks: list[list[GroupState]], paddings: Any, counts: Any, what: str
) -> None:
    """Stages 1 and 2: the groups of all data-parallel ranks, into logical tensors.

    Args:
        shapes: of each group.
        ranks: of each rank, its groups.
        paddings: after each parameter of each group, None if there are none.
        counts: the number of partitions, of each group or of all.
    """
    for number, group in enumerate(shapes):
        states = [rank[number] if number < len(rank) else None for rank in ranks]
        if any(state is None for state in states):
            raise CheckpointError(f"{what} describes {len(shapes)} groups of parameters; some rank has fewer")
        own = [state for state in states if state is not None]
        count = counts[number] if isinstance(counts, list) and number < len(counts) else counts
        count = (
            len(own) if count is None or isinstance(count, list) else need_number(count, f"partition_count of {what}")
        )
        if not 0 < count <= len(own) or len(own) % count:
            raise CheckpointError(f"{what} has {len(own)} ranks and {count} partitions of group {number}")
        pads = need_list(paddings, what)[number : number + 1] if paddings is not None else []
        after = [need_number(p, what) for p in need_list(pads[0], what)] if pads else [0] * len(group)
        if len(after) != len(group):
            raise CheckpointError(f"{what} has {len(group)} parameters and {len(after)} paddings in group {number}")
        width = len(own) // count
        for expert_rank in range(width):
            names = _global_names(group, expert_rank, width)
            _add_group(found, group, names, own[expert_rank::width], after, what)


def _global_names(group: Mapping[str, Any], expert_rank: int, width: int) -> dict[str, str]:
    """A rank's name of a parameter → its name in the whole model: experts are numbered from 0 on every rank."""
    if width == 1:
        return {name: name for name in group}
    local = {int(match[2]) for match in map(_EXPERTS.fullmatch, group) if match}
    found = {}
    for name in group:
        match = _EXPERTS.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{name!r} is in a group of experts and is none of 'deepspeed_experts'")
        found[name] = f"{match[1]}{expert_rank * (max(local) + 1) + int(match[2])}{match[3]}"
    return found


def _add_group(
    found: ForeignCheckpoint, group: Mapping[str, tuple[int, ...]], names: Mapping[str, str], ranks: list[GroupState],
    after: list[int], what: str,
) -> None:  # fmt: skip
    roles = _same_roles(ranks, what)
    size = max((tensor.numel for state in ranks for tensor in state.tensors.values()), default=0)
    at = 0
    for (name, shape), padding in zip(group.items(), after, strict=True):
        numel = math.prod(shape)
        known = "tied_modules." in name and "parameter" in found.roles.get(names[name], {})  # of an earlier stage
        for role in roles if not known else ():
            runs = []
            for rank, state in enumerate(ranks):
                low, high = max(at, rank * size), min(at + numel, (rank + 1) * size)
                if low < high:
                    runs.append(Run(low - at, high - low, state.tensors[role], low - rank * size))
            found.add(names[name], role, shape, runs)
        _add_numbers(found, names[name], ranks, what)
        at += numel + padding
    align = 2 * len(ranks)
    if at > size * len(ranks) or size * len(ranks) - at > max(align, size * len(ranks) // 2 + align):
        raise CheckpointError(f"{what} has {size * len(ranks)} elements in a group whose parameters need {at}")


def _same_roles(ranks: list[GroupState], what: str) -> list[str]:
    roles = list(ranks[0].tensors)
    if any(set(state.tensors) != set(roles) for state in ranks):
        raise CheckpointError(f"{what} has other optimizer states on some ranks than on others")
    return roles


def _add_numbers(found: ForeignCheckpoint, name: str, ranks: list[GroupState], what: str) -> None:
    for role in ranks[0].numbers:
        values = {state.numbers.get(role) for state in ranks}
        if len(values) > 1:
            raise CheckpointError(f"{what} has several values of {role!r} for {name!r}: {sorted(map(str, values))}")
        found.scalars[f"{role}/{name}"] = ranks[0].numbers[role]


def add_split(found: ForeignCheckpoint, shapes: Shapes, ranks: list[list[GroupState]], what: str) -> None:
    """Stage 3: the sub-groups of all ranks, into logical tensors."""
    if len(shapes) != len(ranks[0]):  # older ones describe groups and have sub-groups: only the order counts
        shapes = _regrouped(shapes, [group.tensors["parameter"].numel for group in ranks[0]], len(ranks), what)
    for number, group in enumerate(shapes):
        states = [rank[number] for rank in ranks if number < len(rank)]
        if len(states) != len(ranks):
            raise CheckpointError(f"{what} has sub-groups that some rank has not")
        roles = _same_roles(states, what)
        at = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            part = -(-numel // len(ranks))
            for role in roles:
                found.add(name, role, shape, split_runs([s.tensors[role] for s in states], numel, at))
            _add_numbers(found, name, states, what)
            at += part
        if any(state.tensors["parameter"].numel != at for state in states):
            raise CheckpointError(f"{what} has sub-group {number} of another size than its parameters: {at} elements")


def split_runs(parts: list[StoredTensor], numel: int, at: int = 0) -> list[Run]:
    """Runs of a parameter of ``numel`` elements of which each rank has an equal part from element ``at`` on."""
    part = -(-numel // len(parts))
    cuts = [(rank * part, min(part, numel - rank * part), source) for rank, source in enumerate(parts)]
    return [Run(start, length, source, at) for start, length, source in cuts if length > 0]


def _regrouped(shapes: Shapes, sizes: list[int], ranks: int, what: str) -> Shapes:
    items = [item for group in shapes for item in group.items()]
    found: Shapes = []
    for size in sizes:
        found.append({})
        filled = 0
        while filled < size:
            if not items:
                raise CheckpointError(f"{what} has more elements in its sub-groups than its parameters have")
            name, shape = items.pop(0)
            found[-1][name] = shape
            filled += -(-math.prod(shape) // ranks)
        if filled != size:
            raise CheckpointError(f"{what} has sub-groups that end inside of a parameter")
    if any(math.prod(shape) for _, shape in items):
        raise CheckpointError(f"{what} has fewer elements in its sub-groups than its parameters have")
    return found
