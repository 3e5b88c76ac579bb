"""``state_dict`` of a ZeRO optimizer: what one rank holds, to be loaded by the same rank of the same layout.

A state that does not fit is refused on all ranks before anything changes: half of one would be a state of no run.
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from zoo.comm import together
from zoo.layout import Box
from zoo.shard.agreement import described
from zoo.shard.call_stack import called_by
from zoo.zero.state.by_parameter import (
    Given,
    RankState,
    check_all_or_none,
    check_given,
    check_kept,
    check_options,
    is_by_parameter,
    states_by_name,
)
from zoo.zero.state.logical import Reader, Run, StateSlice, late_roles, runs_of, split_name
from zoo.zero.state.same_state import refuse_others, told_of
from zoo.zero.update.expected import Keeps

if TYPE_CHECKING:
    from zoo.zero.state.saved import SavedState

_OF_RANKS = ("feedback.", "owed", "apart.")
_DCP = ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint.state_dict_loader")
_PARTS = {"slices": Mapping, "scalars": Mapping, "param_groups": list, "rank": int, "world_size": int}


def rank_state(optimizer: SavedState) -> dict[str, Any]:
    """See :meth:`zoo.zero.ZeroOptimizer.state_dict`."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    if called_by(*_DCP):  # each rank's own state under names that other ranks have too would be lost
        return states_by_name(optimizer)
    ends = list(itertools.accumulate(len(g["params"]) for g in optimizer.param_groups))
    groups = [
        {**g, "params": list(range(end - len(g["params"]), end))}
        for g, end in zip(optimizer.param_groups, ends, strict=True)
    ]  # fmt: skip
    state: dict[str, Any] = {
        "slices": _joined(optimizer.held_slices(owned=False)), "scalars": optimizer.held_scalars(),
        "param_groups": groups, "rank": optimizer.comm.rank, "world_size": optimizer.comm.size,
        "num_updates": optimizer.num_updates,
    }  # fmt: skip
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return RankState(state, optimizer)


def load_rank_state(optimizer: SavedState, given: Any) -> None:
    """See :meth:`zoo.zero.ZeroOptimizer.load_state_dict`."""
    state = dict(given) if isinstance(given, Mapping) else given
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, state)
        state = state if changed is None else changed
    optimizer.sharded.settle()
    if _by_parameter_anywhere(optimizer, state):
        check_given(optimizer, state)
        found = Given(optimizer, state)
        refuse_others(optimizer, found.told)
        _load(optimizer, _options(state), found.read, found.scalars)
    else:
        together(
            optimizer.sharded.everyone, "loading a state_dict", lambda: _check(optimizer, state),
            error=lambda text, ranks: ValueError(text), plain=ValueError,
        )  # fmt: skip
        slices = _rejoined(_saved(state["slices"]))
        refuse_others(optimizer, _told(state, slices), state.get("num_updates"))
        optimizer.num_updates = max(optimizer.num_updates, state.get("num_updates") or 0)
        _load(optimizer, _options(state), _reader(optimizer, slices), state["scalars"])
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _by_parameter_anywhere(optimizer: SavedState, state: Any) -> bool:
    """Whether the state is one by parameter, as that of other ranks. Collective."""
    kinds = optimizer.sharded.everyone.all_gather_object(is_by_parameter(state))
    if len(set(kinds)) > 1:
        raise ValueError(
            f"loading a state_dict failed: ranks {[r for r, kind in enumerate(kinds) if kind]} were given states by "
            "parameter, as torch's optimizers have them, and the others something else. Nothing was loaded."
        )
    return bool(kinds[0])


def _told(state: Mapping[str, Any], slices: _Runs[torch.Tensor]) -> dict[str, str]:
    """What :func:`~zoo.zero.state.same_state.refuse_others` compares of a checked state."""
    scalars = state["scalars"]
    # What ranks compress for each other is their own; where they step apart all of it is.
    told = {key: told_of(value) for key, value in scalars.items()}
    for tensor, of in slices.items() if not scalars.get("zero/apart") else ():
        role, _, name = tensor.partition("|")
        if not tensor.startswith(_OF_RANKS):
            told |= {f"{role} of {name!r} from element {start} on": told_of(value) for start, value in of.items()}
    groups = _options(state)
    return told | {f"{k} of group {i}": described(v) for i, group in enumerate(groups) for k, v in group.items()}


def _reader(optimizer: SavedState, slices: _Runs[torch.Tensor]) -> Reader:
    starts = {tensor: list(of) for tensor, of in slices.items()}
    # Of all of each bucket: what reductions owe is of elements of other ranks too.
    shapes = {run.name: run.shape for bucket in optimizer.buckets for run in runs_of(bucket, bucket.layout.slices())}

    def run(name: str, role: str, start: int, length: int) -> torch.Tensor:
        tensor = f"{role}|{name}"
        first = _run_of(starts[tensor], start)
        found: torch.Tensor = slices[tensor][first][start - first : start - first + length]
        return found

    def read(name: str, role: str, start: int | Box, length: int) -> torch.Tensor:  # calls not itself: no circle
        if isinstance(start, Box):
            return torch.cat([run(name, role, *one) for one in start.runs_in(shapes[name])])
        return run(name, role, start, length)

    return read


def _load(optimizer: SavedState, options: list[dict[str, Any]], read: Reader, scalars: Mapping[str, float]) -> None:
    was = [dict(group) for group in optimizer.param_groups]
    # The options come first: they say which states there are. Copied, as torch does.
    for group, saved in zip(optimizer.param_groups, copy.deepcopy(options), strict=True):
        group.update(saved)
    try:
        optimizer.load_state(read, scalars)
    except BaseException:
        for group, old in zip(optimizer.param_groups, was, strict=True):
            group.clear()
            group.update(old)
        raise


# The entries: runs of elements, by "<role>|<name>|<start>" -----------------------------------------------------------

_Element = TypeVar("_Element")
_Runs: TypeAlias = dict[str, dict[int, _Element]]
"""By ``"<role>|<name>"``, and where a run starts, its elements or their number; in order."""


def _joined(slices: Iterable[StateSlice]) -> dict[str, torch.Tensor]:
    """Copies. Neighbours are one run, so that nothing depends on how segments are cut."""
    found: _Runs[torch.Tensor] = {}
    for s in slices:
        tensor = s.tensor
        for run in Run(s.name, s.shape, s.start, s.length, 0, s.box).rows():
            part = tensor[run.offset : run.offset + run.length]
            found.setdefault(f"{s.role}|{s.name}", {})[run.start] = part
    joined = {}
    while found:  # what was read from NVMe is freed tensor by tensor
        name, at = found.popitem()
        for starts in _neighbours(at):
            joined[f"{name}|{starts[0]}"] = torch.cat([at[start] for start in starts])
    return joined


def _saved(slices: Mapping[str, torch.Tensor]) -> _Runs[torch.Tensor]:
    """What :func:`_joined` made, or had left apart; an entry that is none of ours is there whole."""
    found: _Runs[torch.Tensor] = {}
    for entry, elements in slices.items():
        tensor, _, start = entry.rpartition("|")
        plain = start.isdecimal() and start == str(int(start))
        found.setdefault(tensor if plain else entry, {})[int(start) if plain else 0] = elements
    return found


def _rejoined(slices: _Runs[torch.Tensor]) -> _Runs[torch.Tensor]:
    """The same with neighbours as one run; it has been checked."""
    return {
        tensor: {run[0]: at[run[0]] if len(run) == 1 else torch.cat([at[s] for s in run]) for run in _neighbours(at)}
        for tensor, at in slices.items()
    }  # fmt: skip


def _lengths(parts: Mapping[int, Any]) -> dict[int, int]:
    """The length of each run of one tensor, neighbours as one."""
    return {run[0]: run[-1] + _numel(parts[run[-1]]) - run[0] for run in _neighbours(parts)}


def _neighbours(parts: Mapping[int, Any]) -> list[list[int]]:
    """Starts in lists of such as follow one upon another."""
    runs: list[list[int]] = []
    end = -1
    for start in sorted(parts):
        if start != end:
            runs.append([])
        runs[-1].append(start)
        end = start + _numel(parts[start])
    return runs


def _numel(part: torch.Tensor | int) -> int:
    return part if isinstance(part, int) else part.numel()


def _run_of(starts: Sequence[int], start: int) -> int:
    """Where the run begins that has element ``start``. Raises KeyError if there is none."""
    at = bisect_right(starts, start)
    if not at:
        raise KeyError(start)
    return starts[at - 1]


def _options(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]


# The check -----------------------------------------------------------------------------------------------------------


def _check(optimizer: SavedState, state: Any) -> None:
    """Raise ValueError unless a state of this rank fits this optimizer."""
    _check_parts(state)
    comm, where = optimizer.comm, (state["rank"], state["world_size"])
    if where != (comm.rank, comm.size):
        raise ValueError(
            f"this state_dict is of rank {where[0]} of {where[1]}; this is rank {comm.rank} of {comm.size} at stage "
            f"{optimizer.config.stage}. load_state() with the slices of all ranks reads any placement into any other."
        )
    saved = {t: _lengths(of) for t, of in _saved(state["slices"]).items() if not t.startswith(_OF_RANKS)}
    _check_layout(_wanted(optimizer), saved)
    check_options(optimizer, _options(state))
    _check_states(optimizer, _roles_of(saved, state["scalars"]), _options(state), late_roles(state["scalars"]))


def _check_parts(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"load_state_dict() got a {type(state).__name__}; it takes what state_dict() returned.")
    wrong = [key for key, kind in _PARTS.items() if not isinstance(state.get(key), kind)]
    if not wrong and not all(isinstance(group, Mapping) for group in state["param_groups"]):
        wrong = ["param_groups"]
    if wrong:
        raise ValueError(
            f"the state_dict has {', '.join(map(repr, state)) or 'nothing'}, and no {', '.join(map(repr, wrong))} of "
            f"the right kind: it is not what state_dict() of a ZeRO optimizer returned. Nothing was loaded. A "
            "state by parameter has 'state' and 'param_groups', as torch's optimizers have it."
        )


def _check_layout(wanted: _Runs[int], saved: _Runs[int]) -> None:
    wrong = [name for name, of in wanted.items() if saved.get(f"parameter|{name}") != of]
    for tensor, of in saved.items():
        role, _, name = tensor.partition("|")
        if split_name(name, role) is None and of != wanted.get(name):
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"the state_dict is of another model, or of buckets laid out otherwise ({wrong[0]!r}): it holds the "
            "elements that one rank had under one reduce_bucket_size, stage and set of options. Nothing was loaded. "
            "load_state() with the slices of all ranks reads any layout into any other."
        )


def _check_states(
    optimizer: SavedState, roles_of: Mapping[str, Mapping[str, int]], groups: list[dict[str, Any]], late: Set[str]
) -> None:
    """All states that the optimizer keeps with the saved options are there, and no other ones but the ``late`` ones,
    which it makes after its first step; or none at all."""
    if not optimizer.updater.expected.known:
        return
    keeps_of: dict[tuple[Any, ...], Keeps] = {}
    optimizer.updater.check_places(groups)
    empty: list[str] = []
    full: list[str] = []
    for segment in optimizer.updater.segments:
        kind = optimizer.updater.expected.kind_of(segment)
        if kind not in keeps_of:
            keeps_of[kind] = optimizer.updater.expected.with_options(segment, groups[segment.group])
        kept = keeps_of[kind]
        for name in dict.fromkeys(run.name for run in runs_of(segment.bucket, segment.slices())):
            found = roles_of.get(name, {})
            check_kept(optimizer, name, found.keys() - (late - kept.names), kept.names)
            for role, length in kept.others.items():
                if found.get(role, length) != length:
                    raise ValueError(
                        f"the state_dict has {found[role]} elements of {role!r} of {name!r}, and "
                        f"{type(optimizer.inner).__name__} keeps {length}. Nothing was loaded. Load a state_dict of "
                        "the same model."
                    )
            if kept.names:
                (full if found else empty).append(name)
    check_all_or_none(optimizer, full, empty)


def _roles_of(saved: _Runs[int], scalars: Iterable[str]) -> dict[str, dict[str, int]]:
    """By name of a parameter the states that are there, and how many elements of each; of numbers 0."""
    found: dict[str, dict[str, int]] = {}
    for tensor, of in saved.items():
        role, _, name = tensor.partition("|")
        if role != "parameter":
            found.setdefault(split_name(name, role) or name, {})[role] = sum(of.values())
    for entry in scalars:
        role, _, name = entry.partition("/")
        found.setdefault(name, {})[role] = 0
    return found


def _wanted(optimizer: SavedState) -> _Runs[int]:
    """By name of a parameter the length of each run that this rank needs."""
    found: _Runs[int] = {}
    needed = [(segment.bucket, segment.slices()) for segment in optimizer.updater.segments]
    needed += [(b, b.layout.slices(*b.kept_range)) for b in optimizer.buckets if not b.spec.trainable]
    for bucket, slices in needed:
        for p in (row for run in runs_of(bucket, slices) for row in run.rows()):
            found.setdefault(p.name, {})[p.start] = p.length
    return {name: _lengths(of) for name, of in found.items()}
