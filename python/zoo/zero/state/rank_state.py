"""``state_dict`` of a ZeRO optimizer: what one rank holds, to be loaded by the same rank of the same layout.

A state that does not fit is refused on all ranks before anything changes: half of one would be a state of no run.
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
from zoo.zero.state.logical import Reader, Run, StateSlice, runs_of, split_name
from zoo.zero.state.same_state import refuse_others, told_of
from zoo.zero.update.probe import Keeps
from zoo.zero.update.segments import Segment

if TYPE_CHECKING:
    from zoo.zero.optimizer import ZeroOptimizer

_OF_RANKS = ("feedback.", "owed", "apart.")
_DCP = ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint.state_dict_loader")
_PARTS = {"slices": Mapping, "scalars": Mapping, "param_groups": list, "rank": int, "world_size": int}


def rank_state(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """See :meth:`zoo.zero.ZeroOptimizer.state_dict`."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    if called_by(*_DCP):  # each rank's own state under names that other ranks have too would be lost
        return states_by_name(optimizer)
    slices = _joined(
        (f"{s.role}|{s.name}", start, part) for s in optimizer.held_slices(owned=False) for start, part in _rows(s)
    )
    ends = list(itertools.accumulate(len(g["params"]) for g in optimizer.param_groups))
    groups = [
        {**g, "params": list(range(end - len(g["params"]), end))}
        for g, end in zip(optimizer.param_groups, ends, strict=True)
    ]  # fmt: skip
    state: dict[str, Any] = {
        "slices": slices, "scalars": optimizer.held_scalars(), "param_groups": groups, "rank": optimizer.comm.rank,
        "world_size": optimizer.comm.size, "num_updates": optimizer.num_updates,
    }  # fmt: skip
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return RankState(state, optimizer)


def load_rank_state(optimizer: ZeroOptimizer, given: Any) -> None:
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
        slices = _rejoined(state["slices"])
        refuse_others(optimizer, _told(state, slices), state.get("num_updates"))
        optimizer.num_updates = max(optimizer.num_updates, state.get("num_updates") or 0)
        _load(optimizer, _options(state), _reader(optimizer, slices), state["scalars"])
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _by_parameter_anywhere(optimizer: ZeroOptimizer, state: Any) -> bool:
    """Whether the state is one by parameter, as that of other ranks. Collective."""
    kinds = optimizer.sharded.everyone.all_gather_object(is_by_parameter(state))
    if len(set(kinds)) > 1:
        raise ValueError(
            f"loading a state_dict failed: ranks {[r for r, kind in enumerate(kinds) if kind]} were given states by "
            "parameter, as torch's optimizers have them, and the others something else. Nothing was loaded."
        )
    return bool(kinds[0])


def _told(state: Mapping[str, Any], slices: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What :func:`~zoo.zero.state.same_state.refuse_others` compares of a checked state."""
    scalars = state["scalars"]
    # What ranks compress for each other is their own; where they step apart all of it is.
    apart = bool(scalars.get("zero/apart"))
    told = {} if apart else {_called(k): told_of(v) for k, v in slices.items() if not k.startswith(_OF_RANKS)}
    told |= {key: told_of(value) for key, value in scalars.items()}
    groups = _options(state)
    return told | {f"{k} of group {i}": described(v) for i, group in enumerate(groups) for k, v in group.items()}


def _called(entry: str) -> str:
    role, _, rest = entry.partition("|")
    name, _, start = rest.rpartition("|")
    return f"{role} of {name!r} from element {start} on"


def _reader(optimizer: ZeroOptimizer, slices: Mapping[str, torch.Tensor]) -> Reader:
    starts = _starts(slices)
    # Of all of each bucket: what reductions owe is of elements of other ranks too.
    shapes = {run.name: run.shape for bucket in optimizer.buckets for run in runs_of(bucket, bucket.layout.slices())}

    def read(name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
        if isinstance(start, Box):
            return torch.cat([read(name, role, *run) for run in start.runs_in(shapes[name])])
        tensor = f"{role}|{name}"
        first = _run_of(starts, tensor, start)
        found: torch.Tensor = slices[f"{tensor}|{first}"][start - first : start - first + length]
        return found

    return read


def _load(optimizer: ZeroOptimizer, options: list[dict[str, Any]], read: Reader, scalars: Mapping[str, float]) -> None:
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


def _runs(optimizer: ZeroOptimizer) -> Iterator[Run]:
    """What this rank needs of parameters."""
    for segment in optimizer.updater.segments:
        yield from runs_of(segment.bucket, segment.slices())
    for bucket in optimizer.buckets:
        if not bucket.spec.trainable:
            yield from runs_of(bucket, bucket.layout.slices(*bucket.kept_range()))


def _rows(item: StateSlice) -> Iterator[tuple[int, torch.Tensor]]:
    """A slice as runs: then nothing depends on how segments are cut."""
    tensor = item.tensor
    for run in Run(item.name, item.shape, item.start, item.length, 0, item.box).rows():
        yield run.start, tensor[run.offset : run.offset + run.length]


# The entries: runs of elements of logical tensors, by "<role>|<name>|<start>" -----------------------------------------


def _joined(parts: Iterable[tuple[str, int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of (tensor, start, elements). Neighbours are one run, so that nothing depends on how segments are cut."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for tensor, start, elements in parts:
        found.setdefault(tensor, {})[start] = elements
    joined = {}
    while found:  # what was read from NVMe is freed tensor by tensor
        tensor, at = found.popitem()
        for run in _neighbours({start: elements.numel() for start, elements in at.items()}):
            joined[f"{tensor}|{run[0]}"] = torch.cat([at[start] for start in run])
    return joined


def _rejoined(slices: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The same of what was saved with neighbours apart, and has been checked."""
    starts = _starts(slices)
    if len(_lengths({t: {at: slices[f"{t}|{at}"].numel() for at in of} for t, of in starts.items()})) == len(slices):
        return slices
    return _joined((tensor, start, slices[f"{tensor}|{start}"]) for tensor, of in starts.items() for start in of)


def _lengths(parts: Mapping[str, Mapping[int, int]]) -> dict[str, int]:
    """The length of each run, by ``"<tensor>|<start>"``, of parts given as tensor → start → length."""
    return {
        f"{tensor}|{run[0]}": run[-1] + of[run[-1]] - run[0]
        for tensor, of in parts.items()
        for run in _neighbours(of)
    }  # fmt: skip


def _neighbours(lengths: Mapping[int, int]) -> list[list[int]]:
    """Starts in lists of such as follow one upon another."""
    runs: list[list[int]] = []
    end = -1
    for start in sorted(lengths):
        if start != end:
            runs.append([])
        runs[-1].append(start)
        end = start + lengths[start]
    return runs


def _starts(entries: Iterable[str]) -> dict[str, list[int]]:
    """By tensor where its runs start, in order."""
    found: dict[str, list[int]] = {}
    for entry in entries:
        tensor, _, start = entry.rpartition("|")
        if start.isdecimal() and start == str(int(start)):
            found.setdefault(tensor, []).append(int(start))
    return {tensor: sorted(starts) for tensor, starts in found.items()}


def _run_of(starts: Mapping[str, list[int]], tensor: str, start: int) -> int:
    """Where the run begins that has element ``start``. Raises KeyError if there is none."""
    at = bisect_right(starts[tensor], start)
    if not at:
        raise KeyError(tensor)
    return starts[tensor][at - 1]


def _options(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]


# The check -----------------------------------------------------------------------------------------------------------


def _check(optimizer: ZeroOptimizer, state: Any) -> None:
    """Raise ValueError unless a state of this rank fits this optimizer."""
    _check_parts(state)
    comm, where = optimizer.comm, (state["rank"], state["world_size"])
    if where != (comm.rank, comm.size):
        raise ValueError(
            f"this state_dict is of rank {where[0]} of {where[1]}; this is rank {comm.rank} of {comm.size} at stage "
            f"{optimizer.config.stage}. load_state() with the slices of all ranks reads any placement into any other."
        )
    lengths, others = _without_others(_saved_lengths(state["slices"]))
    wanted = _wanted(optimizer)
    _check_layout(wanted, lengths)
    check_options(optimizer, _options(state))
    _check_states(optimizer, wanted, _roles_of(lengths, state["scalars"]), others, _options(state))


def _without_others(lengths: Mapping[str, int]) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """The entries with as many elements as parameters; and by parameter the length of states of other shapes."""
    plain, others = dict[str, int](), dict[str, dict[str, int]]()
    for entry, length in lengths.items():
        role, _, rest = entry.partition("|")
        whole = split_name(rest.rpartition("|")[0], role)
        if whole is None:
            plain[entry] = length
        else:
            others.setdefault(whole, {})[role] = length
    return plain, others


def _saved_lengths(slices: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Of what the optimizer keeps; an entry that is none of ours is there as it is, and will not be found wanted."""
    kept = {key: value.numel() for key, value in slices.items() if not key.startswith(_OF_RANKS)}
    starts = _starts(kept)
    ours = {f"{tensor}|{start}" for tensor, of in starts.items() for start in of}
    parts = {tensor: {start: kept[f"{tensor}|{start}"] for start in of} for tensor, of in starts.items()}
    return _lengths(parts) | {key: length for key, length in kept.items() if key not in ours}


def _check_parts(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"load_state_dict() got a {type(state).__name__}; it takes what state_dict() returned.")
    wrong = [key for key, kind in _PARTS.items() if not isinstance(state.get(key), kind)]
    if wrong:
        raise ValueError(
            f"the state_dict has {', '.join(map(repr, state)) or 'nothing'}, and no {', '.join(map(repr, wrong))} of "
            f"the right kind: it is not what state_dict() of a ZeRO optimizer returned. Nothing was loaded. A "
            "state by parameter has 'state' and 'param_groups', as torch's optimizers have it."
        )


def _check_layout(wanted: Mapping[str, int], lengths: Mapping[str, int]) -> None:
    wrong = [key for key, length in wanted.items() if lengths.get(f"parameter|{key}") != length]
    expected = 0
    for role in {key.split("|")[0] for key in lengths}:
        there = [key for key in wanted if f"{role}|{key}" in lengths]
        wrong += [key for key in there if lengths[f"{role}|{key}"] != wanted[key]]
        expected += len(there)
    if wrong or len(lengths) != expected:
        which = f" ({wrong[0].split('|')[0]!r})" if wrong else ""
        raise ValueError(
            f"the state_dict is of another model, or of buckets laid out otherwise{which}: it holds the elements that "
            "one rank had under one reduce_bucket_size, stage and set of options. Nothing was loaded. load_state() "
            "with the slices of all ranks reads any layout into any other."
        )


def _check_states(
    optimizer: ZeroOptimizer, runs: Iterable[str], roles_of: Mapping[str, set[str]],
    others: Mapping[str, Mapping[str, int]], groups: list[dict[str, Any]],
) -> None:  # fmt: skip
    """All states that the optimizer keeps with the saved options are there, and no other ones; or none at all."""
    if not optimizer.updater.expected.known:
        return
    keeps_of: dict[tuple[Any, ...], Keeps] = {}
    starts = _starts(runs)
    optimizer.updater.check_places(groups)
    empty: list[str] = []
    full: list[str] = []
    for segment in optimizer.updater.segments:
        kind = optimizer.updater.expected.kind_of(segment)
        if kind not in keeps_of:
            keeps_of[kind] = optimizer.updater.expected.with_options(segment, groups[segment.group])
        wanted = keeps_of[kind].names
        for key, name in _keys_of(segment, starts):
            found = roles_of.get(key, set()) | roles_of.get(name, set()) | others.get(name, {}).keys()
            check_kept(optimizer, name, found, wanted)
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


def _roles_of(lengths: Mapping[str, int], scalars: Mapping[str, Any]) -> dict[str, set[str]]:
    """The states that are there: by ``"<name>|<start>"`` the tensors, by name the numbers."""
    found: dict[str, set[str]] = {}
    for entry in lengths:
        role, _, key = entry.partition("|")
        if role != "parameter":
            found.setdefault(key, set()).add(role)
    for entry in scalars:
        role, _, name = entry.partition("/")
        found.setdefault(name, set()).add(role)
    return found


def _keys_of(segment: Segment, starts: Mapping[str, list[int]]) -> list[tuple[str, str]]:
    runs = (row for run in runs_of(segment.bucket, segment.slices()) for row in run.rows())
    return [(f"{p.name}|{_run_of(starts, p.name, p.start)}", p.name) for p in runs]


def _wanted(optimizer: ZeroOptimizer) -> dict[str, int]:
    """The length of each run of a parameter that this rank needs, by ``"<name>|<start>"``."""
    found: dict[str, dict[int, int]] = {}
    for run in _runs(optimizer):
        for p in run.rows():
            found.setdefault(p.name, {})[p.start] = p.length
    return _lengths(found)
