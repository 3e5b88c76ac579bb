"""States as torch's own checkpoint functions know them: by parameter, each in the parameter's shape.

``torch.distributed.checkpoint.state_dict`` takes ``optimizer.state_dict()["state"]``: position of a parameter in the
groups → name of a state → tensor. Here a state that is split is a DTensor, Shard(0) on the ranks that split it: each
has some rows, so that the functions of torch gather it, copy it to the CPU or write this rank's rows, as their options
say. Numbers ("step") are tensors without dims. ``master`` is the fp32 value of a 16-bit parameter.

Legend: p ranks of a shard group; a tensor of n rows, of which rank r has [r·k, (r+1)·k), k = ceil(n / p).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import together
from zoo.shard.agreement import described, short_digest
from zoo.shard.buckets import Bucket
from zoo.shard.dtensors import is_dtensor, rows_of
from zoo.shard.roles import PARAMETER
from zoo.zero.state.logical import gone_of, runs_of
from zoo.zero.update.expected import MASTER, Keeps

if TYPE_CHECKING:
    from zoo.zero.state.saved import SavedState

OF_SCHEDULES = "initial_lr"  # which any group may have


class RankState(dict[str, Any]):
    """What :meth:`zoo.zero.ZeroOptimizer.state_dict` returns: this rank's state, and on demand that of torch.

    ``state_dict["state"]``, which no key is shown for, is made when it is first asked for: a collective. A pickle and a
    copy have what is shown.
    """

    def __init__(self, shown: Mapping[str, Any], optimizer: SavedState) -> None:
        super().__init__(shown)
        self._optimizer = weakref.ref(optimizer)  # whoever keeps a state does not keep the model with it
        self._updates = optimizer.runtime.contexts.updates
        self._made: dict[int, dict[str, Any]] | None = None

    def __missing__(self, key: str) -> dict[int, dict[str, Any]]:
        if key != "state":
            raise KeyError(key)
        if self._made is None:
            optimizer = self._optimizer()
            if optimizer is None or self._updates != optimizer.runtime.contexts.updates:
                what = "the optimizer is gone" if optimizer is None else "parameters have changed"
                raise ValueError(
                    f"state_dict()['state'] is made when it is asked for, and {what} since state_dict() was called. "
                    "Ask for it before the next step."
                )
            self._made = states_by_position(optimizer)
        return self._made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())


def is_by_parameter(state: Any) -> bool:
    """Whether it is a state_dict as torch's optimizers have it."""
    return isinstance(state, Mapping) and "slices" not in state and isinstance(state.get("state"), Mapping)


# What is handed out ---------------------------------------------------------------------------------------------------


def members(optimizer: SavedState) -> Iterator[tuple[int, Any, Bucket, int]]:
    """(index of the group, parameter, its bucket, its slot there) of every parameter in the groups, in order."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield index, parameter, parameter._zoo_bucket, parameter._zoo_slot


def _refuse_others(optimizer: SavedState) -> None:
    if optimizer._feedback:
        raise NotImplementedError(
            "states by parameter of an optimizer with errors that are fed back, which belong to ranks "
            "(quantized_gradients_feedback=True, or an optimizer that compresses what ranks tell each other). "
            "Save state_slices() and state_scalars(), as zoo's checkpoints do."
        )
    for bucket in optimizer.updater.buckets:
        if bucket.spec.axes:
            raise NotImplementedError(
                f"states by parameter of {bucket.called(0)!r}, which is a part along the mesh axes "
                f"{bucket.spec.axes}. Save state_slices() and state_scalars(), as zoo's checkpoints do."
            )


def _refuse_other_shapes(name: str, kept: Keeps) -> None:
    if kept.others:
        raise NotImplementedError(
            f"states by parameter of {name!r}, of which the optimizer keeps {', '.join(map(repr, kept.others))} in "
            "other shapes than the parameter's. Save state_slices() and state_scalars(), as zoo's checkpoints do, or "
            "state_dict() as it is."
        )


@torch.no_grad()
def states_by_position(optimizer: SavedState) -> dict[int, dict[str, Any]]:
    """Position of a trainable parameter in the groups → its states. Collective.

    One state of one bucket is whole at a time. Before the first step tensors are zeros, and numbers 0.

    Raises:
        NotImplementedError: errors that are fed back, parts along other mesh axes, or states made in a later step.
    """
    _refuse_others(optimizer)
    late = optimizer.updater.expected.made_later(optimizer.updater.segments, optimizer.param_groups)
    if late:
        raise NotImplementedError(
            f"states by parameter of {type(optimizer.inner).__name__}, which keeps "
            f"{', '.join(map(repr, sorted(late)))} since a step after its first. Save state_slices() "
            "and state_scalars(), as zoo's checkpoints do, or state_dict() as it is."
        )
    optimizer.check_groups()
    optimizer.sharded.settle()
    optimizer.sharded.members.check()
    optimizer.sharded.writes.take()
    keeps: dict[Bucket, dict[int, Keeps]] = {}
    positions: dict[tuple[Bucket, int], int] = {}
    for position, (group, _, bucket, slot) in enumerate(members(optimizer)):
        if bucket.spec.trainable:
            kept = optimizer.updater.keeps_of(bucket, slot, optimizer.param_groups[group])
            keeps.setdefault(bucket, {})[slot] = kept
            _refuse_other_shapes(bucket.spec.names[slot], kept)
            positions[bucket, slot] = position
    numbers: dict[str, float] = {}
    for theirs in optimizer.comm.all_gather_object(optimizer.held_scalars()):
        numbers |= theirs
    found: dict[int, dict[str, Any]] = {}
    for bucket in optimizer.updater.buckets:
        of = keeps.get(bucket, {})
        roles = {role: dtype for kept in of.values() for role, dtype in kept.states.items()}
        own, device = _own_states(optimizer, bucket, roles)
        for slot, kept in of.items():
            name = bucket.logical(bucket.spec.names[slot])[0]
            found[positions[bucket, slot]] = {
                role: torch.tensor(numbers.get(f"{role}/{name}", 0.0)) for role in sorted(kept.numbers)
            }
        for role in sorted(roles):
            whole = _whole(bucket, own.pop(role))
            comm = bucket.shard_group if bucket.placements.states.is_split else None
            views = bucket.views(whole)
            for slot, kept in of.items():
                if role in kept.states:
                    found[positions[bucket, slot]][role] = rows_of(views[slot], comm, device)
    return {position: found[position] for position in sorted(found)}


def _own_states(
    optimizer: SavedState, bucket: Bucket, roles: Mapping[str, torch.dtype]
) -> tuple[dict[str, torch.Tensor], torch.device]:
    """By role what this rank updates of a bucket, flat and on the bucket's device; and where the states live."""
    low, high = bucket.kept_range
    own = {role: torch.zeros(high - low, dtype=dtype, device=bucket.device) for role, dtype in roles.items()}
    device = bucket.device
    for first, found in optimizer.states.read(bucket):
        device = found[PARAMETER].device
        for role, value in {**found, MASTER: found[PARAMETER]}.items():
            if role in own:
                own[role][first - low : first - low + value.numel()].copy_(value)
    return own, device


def _whole(bucket: Bucket, own: torch.Tensor) -> torch.Tensor:
    if own.numel() == bucket.layout.size:
        return own
    whole = own.new_empty(bucket.layout.size)
    bucket.shard_group.all_gather(whole, own, label=f"states of {bucket.label}").wait()
    return whole


# What is taken --------------------------------------------------------------------------------------------------------


class Given:
    """A checked state_dict by parameter, as :meth:`zoo.zero.ZeroOptimizer.load_state` reads it.

    Of tensors that are split this rank keeps copies of its own elements; one at a time is whole. Parameters stay what
    they are but where a master is given. Collective.

    Attributes:
        told: see :func:`~zoo.zero.state.same_state.refuse_others`.
    """

    def __init__(self, optimizer: SavedState, state: Mapping[str, Any]) -> None:
        from zoo.zero.state.same_state import told_of

        self._runs: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
        self.told: dict[str, str] = {
            f"{key} of group {index}": described(value)
            for index, group in enumerate(state["param_groups"]) for key, value in group.items() if key != "params"
        }  # fmt: skip
        scalars = {k: v for k, v in optimizer.state_scalars().items() if k.startswith("zero/")}
        ours: dict[str, list[tuple[int, int]]] = {}
        for segment in optimizer.updater.segments:
            for run in runs_of(segment.bucket, segment.slices()):
                ours.setdefault(run.name, []).append((run.start, run.start + run.length))
        self._own = {
            (s.name, s.start if s.box is None else s.box, s.length): s.tensor.detach().clone()
            for s in optimizer.held_slices(owned=False) if s.role == "parameter"
        }  # fmt: skip
        begun = False
        for bucket, slot, entry, kept in _entries(optimizer, state):
            name = bucket.logical(bucket.spec.names[slot])[0]
            for role in sorted(entry):
                if role in kept.numbers:
                    scalars[f"{role}/{name}"] = float(entry[role])
                    self.told[f"{role} of {name!r}"] = repr(float(entry[role]))
                    begun = begun or bool(entry[role] != 0)
                    continue
                flat, copied = _flat(entry[role])
                if not copied or any(of.is_replicate() for of in entry[role].placements):  # else ranks made it together
                    self.told[f"{role} of {name!r}"] = told_of(flat)
                begun = begun or (role != MASTER and bool(flat.any()))
                parts = [(low, flat[low:high]) for low, high in ours.get(name, ())]
                self._runs[name, "parameter" if role == MASTER else role] = [
                    (low, part.clone() if copied else part) for low, part in parts
                ]
        if not begun:  # zeros alone are what is got before the first step, whatever the states begin with
            self._runs = {key: parts for key, parts in self._runs.items() if key[1] == "parameter"}
            scalars = {key: value for key, value in scalars.items() if key.startswith("zero/")}
        self.scalars = scalars

    def read(self, name: str, role: str, start: Any, length: int) -> torch.Tensor:
        """See :data:`zoo.zero.state.logical.Reader`; a box is of a frozen parameter."""
        for low, part in self._runs.get((name, role), ()):
            if low <= start and start + length <= low + part.numel():
                return part[start - low : start - low + length]
        if role == "parameter":
            return self._own[name, start, length]
        raise KeyError(f"{role} of {name!r}")


def _flat(value: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """All elements in one dim, and whether the memory is only for now."""
    split = is_dtensor(value)
    whole: torch.Tensor = value.full_tensor() if split else value  # type: ignore[attr-defined]
    return whole.detach().reshape(-1), split


def _entries(optimizer: SavedState, state: Mapping[str, Any]) -> Iterator[tuple[Bucket, int, dict[str, Any], Keeps]]:
    """(bucket, slot, states that are there, what is kept with the saved options) of every trainable parameter.

    The groups give parameters their keys, by place.
    """
    for group, (index, here) in zip(state["param_groups"], enumerate(optimizer.param_groups), strict=True):
        known: dict[tuple[int, torch.dtype], Keeps] = {}
        for key, parameter in zip(group["params"], here["params"], strict=True):
            bucket, slot = parameter._zoo_bucket, parameter._zoo_slot
            if not bucket.spec.trainable:
                continue
            kind = (index, bucket.spec.dtype)
            if kind not in known:
                known[kind] = optimizer.updater.keeps_of(bucket, slot, group)
                _refuse_other_shapes(bucket.spec.names[slot], known[kind])
            given = state["state"].get(key) or {}
            # torch has None, and its flattened states {}, for what is not there.
            there = {k: v for k, v in given.items() if v is not None and not isinstance(v, Mapping)}
            yield bucket, slot, there, known[kind]


def states_by_name(optimizer: SavedState) -> dict[str, Any]:
    """``{"state": …, "param_groups": …}`` with names in the place of positions: what DCP writes. Collective."""
    groups, states = optimizer.named_groups(), states_by_position(optimizer)
    names = [bucket.logical(bucket.spec.names[slot])[0] for _, _, bucket, slot in members(optimizer)]
    gone = gone_of(optimizer.buckets)
    found = {names[position]: of for position, of in states.items() if names[position] not in gone}
    return {"state": found, "param_groups": groups}


def check_given(optimizer: SavedState, state: Mapping[str, Any]) -> None:
    """Raise ValueError, on all ranks, unless the states fit the parameters. Collective."""
    said = together(
        optimizer.comm, "loading a state_dict", lambda: _check(optimizer, state),
        error=lambda text, ranks: ValueError(text), plain=(ValueError, NotImplementedError),
    )  # fmt: skip
    if len(set(said)) > 1:
        others = [rank for rank, text in enumerate(said) if text != said[0]]
        raise ValueError(
            f"loading a state_dict failed: ranks {others} were given other tensors, or in other forms (whole or as "
            "DTensors), than rank 0. Nothing was loaded. Give the same on all ranks; what only rank 0 has goes in with "
            "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)."
        )


def _check(optimizer: SavedState, state: Mapping[str, Any]) -> str:
    """A digest of what is there."""
    _refuse_others(optimizer)
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError("the state_dict has no list of 'param_groups'. Nothing was loaded.")
    check_options(optimizer, [{k: v for k, v in group.items() if k != "params"} for group in groups])
    for index, (group, here) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        given, own = len(group.get("params", ())), len(here["params"])
        if given != own:
            raise ValueError(
                f"the state_dict has {given} parameters in param_groups[{index}]; this optimizer has {own}. "
                "Nothing was loaded. Load it into an optimizer with the same groups."
            )
    known = {key for group in groups for key in group["params"]}
    foreign = [key for key in state["state"] if key not in known]
    if foreign:
        raise ValueError(
            f"the state_dict has states of {foreign[0]!r}, which is in none of its groups. Nothing was loaded. Load a "
            "state_dict as it was saved."
        )
    optimizer.updater.check_places(groups)
    told: list[list[Any]] = []
    empty: list[str] = []
    full: list[str] = []
    for bucket, slot, entry, kept in _entries(optimizer, state):
        told.append(_check_entry(optimizer, bucket, slot, entry, kept))
        if (kept.states.keys() | kept.numbers) - {MASTER}:
            (full if entry.keys() - {MASTER} else empty).append(bucket.called(slot))
    check_all_or_none(optimizer, full, empty)
    return short_digest(told)


def check_options(optimizer: SavedState, groups: list[dict[str, Any]]) -> None:
    """Raise ValueError if the groups of a state_dict cannot be those of this optimizer."""
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the state_dict has {len(groups)} parameter groups; this optimizer has {len(optimizer.param_groups)}. "
            "Nothing was loaded."
        )
    for here, saved in zip(optimizer.param_groups, groups, strict=True):
        lacking = sorted(set(optimizer.defaults) - set(saved))
        foreign = sorted(set(saved) - set(here) - {OF_SCHEDULES})
        # An older version of the same optimizer had fewer options, and the user may add some; both is another one.
        if lacking and foreign:
            raise ValueError(
                f"the state_dict is of another optimizer: its options are {', '.join(foreign)} and not "
                f"{', '.join(lacking)}, which {type(optimizer.inner).__name__} has. Nothing was loaded. Wrap the "
                "optimizer that the state is of."
            )


def check_kept(optimizer: SavedState, name: str, found: Set[str], wanted: Set[str]) -> None:
    """Raise ValueError unless all states that are kept of a parameter were found and no other ones, or none at all."""
    foreign, lacking = found - wanted, wanted - found if found else set()
    if foreign or lacking:
        which, who = ", ".join(map(repr, sorted(foreign or lacking))), type(optimizer.inner).__name__
        raise ValueError(
            f"the state_dict {'has' if foreign else 'lacks'} {which} of {name!r}, which {who} "
            f"{'does not keep' if foreign else 'keeps'} with the options of the state_dict"
            f"{': it is of another optimizer' if foreign else ''}. Nothing was loaded. Load a state_dict as it was "
            "saved."
        )


def check_all_or_none(optimizer: SavedState, full: Sequence[str], empty: Sequence[str]) -> None:
    """Raise ValueError where the states of some parameters were found, and none of others."""
    if empty and full:
        raise ValueError(
            f"the state_dict has states of {full[0]!r}, and none of {empty[0]!r}, which "
            f"{type(optimizer.inner).__name__} keeps too. Nothing was loaded. Load a state_dict as it was "
            "saved; with torch's optimizers a parameter without a gradient has no states, here its gradient is zero."
        )


def _check_entry(
    optimizer: SavedState, bucket: Bucket, slot: int, entry: Mapping[str, Any], kept: Keeps
) -> list[Any]:  # fmt: skip
    name = bucket.called(slot)
    check_kept(optimizer, name, entry.keys() - {MASTER}, (kept.states.keys() | kept.numbers) - {MASTER})
    shape, told = bucket.layout.tensors[slot].shape, []
    for role, value in sorted(entry.items()):
        whole = role in kept.states or role == MASTER
        if whole and not (isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape)):
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"the state_dict has {role!r} of {name!r} as {given}, and the parameter has the shape {tuple(shape)}. "
                "Nothing was loaded. Load it into the same model."
            )
        number = isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not whole and not number:
            raise ValueError(f"the state_dict has {role!r} of {name!r}, and it is no number. Nothing was loaded.")
        told.append((name, role, is_dtensor(value)))
    return told
