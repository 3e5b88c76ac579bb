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

    def read(name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
        if isinstance(start, Box):
            return torch.cat([read(name, role, *run) for run in start.runs_in(shapes[name])])
        tensor = f"{role}|{name}"
        first = _run_of(starts[tensor], start)
        found: torch.Tensor = slices[tensor][first][start - first : start - first + length]
        return found

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
    lengths, others = _without_others(saved)
    wanted = _wanted(optimizer)
    _check_layout(wanted, lengths)
    check_options(optimizer, _options(state))
    roles, late = _roles_of(lengths, state["scalars"]), late_roles(state["scalars"])
    _check_states(optimizer, wanted, roles, others, _options(state), late)


def _without_others(saved: _Runs[int]) -> tuple[_Runs[int], dict[str, dict[str, int]]]:
    """The entries with as many elements as parameters; and by parameter the length of states of other shapes."""
    plain, others = _Runs[int](), dict[str, dict[str, int]]()
    for tensor, of in saved.items():
        role, _, name = tensor.partition("|")
        whole = split_name(name, role)
        if whole is None:
            plain[tensor] = of
        else:
            others.setdefault(whole, {})[role] = sum(of.values())
    return plain, others


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


def _check_layout(wanted: _Runs[int], lengths: _Runs[int]) -> None:
    wrong = [name for name, of in wanted.items() if lengths.get(f"parameter|{name}") != of]
    for tensor, of in lengths.items():
        name = tensor.partition("|")[2]
        if not of.items() <= wanted.get(name, {}).items():
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"the state_dict is of another model, or of buckets laid out otherwise ({wrong[0]!r}): it holds the "
            "elements that one rank had under one reduce_bucket_size, stage and set of options. Nothing was loaded. "
            "load_state() with the slices of all ranks reads any layout into any other."
        )


def _check_states(
    optimizer: SavedState, runs: _Runs[int], roles_of: Mapping[tuple[str, int], set[str]],
    others: Mapping[str, Mapping[str, int]], groups: list[dict[str, Any]], late: Set[str],
) -> None:  # fmt: skip
    """All states that the optimizer keeps with the saved options are there, and no other ones but the ``late`` ones,
    which it makes after its first step; or none at all."""
    if not optimizer.updater.expected.known:
        return
    keeps_of: dict[tuple[Any, ...], Keeps] = {}
    starts = {name: list(of) for name, of in runs.items()}
    optimizer.updater.check_places(groups)
    empty: list[str] = []
    full: list[str] = []
    for segment in optimizer.updater.segments:
        kind = optimizer.updater.expected.kind_of(segment)
        if kind not in keeps_of:
            keeps_of[kind] = optimizer.updater.expected.with_options(segment, groups[segment.group])
        wanted = keeps_of[kind].names
        for row in (row for run in runs_of(segment.bucket, segment.slices()) for row in run.rows()):
            name, at = row.name, _run_of(starts[row.name], row.start)
            found = roles_of.get((name, at), set()) | roles_of.get((name, -1), set()) | others.get(name, {}).keys()
            check_kept(optimizer, name, found - (late - wanted), wanted)
            for role, length in others.get(name, {}).items():
                if length != keeps_of[kind].others.get(role):
                    who = type(optimizer.inner).__name__
                    raise ValueError(
                        f"the state_dict has {length} elements of {role!r} of {name!r}, and {who} keeps "
                        f"{keeps_of[kind].others.get(role)}. Nothing was loaded. Load a state_dict of the same model."
                    )
            if wanted:
                (full if found else empty).append(name)
    check_all_or_none(optimizer, full, empty)


def _roles_of(lengths: _Runs[int], scalars: Iterable[str]) -> dict[tuple[str, int], set[str]]:
    """The states that are there of each run of a parameter, by its name and start; numbers are at -1."""
    found: dict[tuple[str, int], set[str]] = {}
    for tensor, of in lengths.items():
        role, _, name = tensor.partition("|")
        for start in of if role != "parameter" else ():
            found.setdefault((name, start), set()).add(role)
    for entry in scalars:
        role, _, name = entry.partition("/")
        found.setdefault((name, -1), set()).add(role)
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
