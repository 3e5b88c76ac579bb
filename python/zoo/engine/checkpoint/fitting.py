"""Whether a checkpoint fits an engine: asked before anything has changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo import checkpointing, lr_schedules
from zoo.checkpointing import foreign
from zoo.comm import gather_object
from zoo.engine.checkpoint.contents import BUFFER, PARAMETER, AnyCheckpoint, meta_of, states_of
from zoo.engine.checkpoint.module_state import persistent_buffers, tied_names
from zoo.zero.state.logical import parameters_of, runs_of

if TYPE_CHECKING:
    from zoo.engine.checkpoint.partial_load import Wanted
    from zoo.engine.checkpoint.training_state import TrainingState
    from zoo.shard import ShardedModel
    from zoo.zero import ZeroOptimizer

_log = logging.getLogger("zoo.engine")


# The model -----------------------------------------------------------------------------------------------------------


def check_model(found: AnyCheckpoint, module: nn.Module, sharded: ShardedModel, wanted: Wanted) -> None:
    """Raise CheckpointError unless parameters and buffers are in the checkpoint, as such, with the same shapes; those
    that it does not have may stay as they are, if that is wanted."""
    sharded.members.check()
    for item in parameters_of(sharded.buckets):
        if not wanted.may_lack(found, item):
            _check_fits(found, item.name, item.shape, PARAMETER)
            _check_complex(found, item.name, PARAMETER)
    for name, buffer in persistent_buffers(module).items():
        if not wanted.custom and (wanted.module_strict or name in found.shapes):
            _check_fits(found, name, tuple(buffer.shape), BUFFER)
            _check_complex(found, name, BUFFER, buffer.dtype)


def _check_fits(found: AnyCheckpoint, name: str, shape: tuple[int, ...], role: str) -> None:
    if found.shapes.get(name) != shape:
        raise checkpointing.CheckpointError(
            f"the model's {'buffer ' if role == BUFFER else ''}{name!r} has shape {shape}; checkpoint {found.tag!r} "
            f"has {found.shapes.get(name, 'no such tensor')}: build the model as it was when the checkpoint was "
            "written"
        )
    roles = found.roles[name]
    # Formats of weights alone do not tell buffers from parameters.
    if role not in roles and not (role == BUFFER and isinstance(found, foreign.ForeignCheckpoint)):
        raise checkpointing.CheckpointError(
            f"{name!r} is a {role} of the model, and a {BUFFER if BUFFER in roles else PARAMETER} of checkpoint "
            f"{found.tag!r}: build the model as it was when the checkpoint was written"
        )


def _check_complex(found: AnyCheckpoint, name: str, role: str, mine: torch.dtype | None = None) -> None:
    """torch would write the real part alone. ``mine``: None: one that is real."""
    there = {dtype for its_role, dtype in found.roles[name].items() if its_role in (BUFFER, PARAMETER)}
    if any(dtype.startswith("complex") for dtype in there) and not (mine is not None and mine.is_complex):
        raise checkpointing.CheckpointError(
            f"the model's {role} {name!r} is {mine or 'real'}; checkpoint {found.tag!r} has complex numbers there: "
            "build the model as it was when the checkpoint was written"
        )


def check_names(found: AnyCheckpoint, module: nn.Module, sharded: ShardedModel, wanted: Wanted) -> None:
    """Compare the names of the whole model with those of the checkpoint. A collective where ranks have other parts.

    With ``module_strict`` a tensor that the model does not have is refused; without it, a checkpoint of which no
    parameter fits; what stays as it is, and what is not taken, is logged.

    Raises:
        CheckpointError: on all ranks.
    """
    if wanted.custom:
        return
    mine = {name for bucket in sharded.buckets for name in bucket.in_model()}
    own, tied = mine | set(persistent_buffers(module)), _tied_names(found, module)
    if sharded.layers is not None or any(bucket.spec.axes for bucket in sharded.buckets):
        theirs = gather_object(sharded.everyone, (mine, own, tied))
        whole = None if theirs is None else tuple(set().union(*(sets[k] for sets in theirs)) for k in range(3))
        mine, own, tied = sharded.everyone.broadcast_object(whole)
    names = {name for name, roles in found.roles.items() if {PARAMETER, BUFFER} & set(roles)}
    names -= tied
    surplus, lacking = sorted(names - own), sorted(mine - names)
    if wanted.module_strict:
        if surplus:
            raise checkpointing.CheckpointError(
                f"checkpoint {found.tag!r} has {_listed(surplus)}, which the model does not have: build the model as "
                "it was when the checkpoint was written, or load with load_module_strict=False",
                everywhere=True,
            )
        return
    if mine and len(lacking) == len(mine):
        raise checkpointing.CheckpointError(
            f"checkpoint {found.tag!r} has not one of the model's parameters, such as {lacking[0]!r}; it has "
            f"{_listed(surplus)}: give the parameters the names that they had then",
            everywhere=True,
        )
    if sharded.everyone.rank == 0 and (surplus or lacking):
        _log.warning(
            "of checkpoint %r %d of the model's %d parameters are loaded; not in it, and as they were: %s; not in the "
            "model: %s.", found.tag, len(mine) - len(lacking), len(mine), _listed(lacking), _listed(surplus),
        )  # fmt: skip


def _tied_names(found: AnyCheckpoint, module: nn.Module) -> set[str]:
    """Other names of what the model has under its first one."""
    # A file of weights may have a tied tensor under each name. One of zoo's that has it twice was not tied.
    if not isinstance(found, foreign.ForeignCheckpoint):
        return set()
    named = (module.named_parameters, module.named_buffers)
    return {name for each in named for name in tied_names(module, each(remove_duplicate=False))}


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3])) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# The training --------------------------------------------------------------------------------------------------------


def check_training(training: TrainingState, found: AnyCheckpoint, wanted: Wanted) -> None:
    """Raise before anything has changed what loading would refuse later.

    Raises:
        CheckpointError: it is of no engine or another optimizer, or has another number of groups, or another kind of
            schedule.
        ValueError: it is of another data set.
    """
    if wanted.module_only:
        return
    meta, groups = meta_of(found), training.optimizer.param_groups
    if wanted.optimizer and not meta.get("imported"):
        if len(meta["param_groups"]) != len(groups):
            raise checkpointing.CheckpointError(
                f"checkpoint {found.tag!r} has {len(meta['param_groups'])} parameter groups, the optimizer "
                f"{len(groups)}"
            )
        _check_states(training, found)
    elif wanted.optimizer:
        training.options_of(found)
    check_loader = getattr(training.batches.loader, "check_state", None)
    if check_loader is not None and meta["loader"] is not None:
        check_loader(meta["loader"])
    schedule = training.records.schedule
    if wanted.lr_scheduler_states and schedule is not None and meta["lr_scheduler"] is not None:
        _check_schedule(schedule, meta["lr_scheduler"], found)


def _check_schedule(schedule: Any, saved: Mapping[str, Any], found: AnyCheckpoint) -> None:
    """Of attributes that it does not have, torch's schedules make some, and go on from their beginning."""
    mine = set(schedule.state_dict())
    if set(saved) == {"last_batch_iteration"} and isinstance(schedule, lr_schedules.Schedule):
        return  # the field's name of where a schedule stands
    if mine and saved and not mine & set(saved):
        raise checkpointing.CheckpointError(
            f"checkpoint {found.tag!r} has the state of another kind of learning-rate schedule than "
            f"{type(schedule).__name__}: {', '.join(sorted(map(str, saved)))}, and not {', '.join(sorted(mine))}. "
            "Continue with a schedule of that kind."
        )


def _check_states(training: TrainingState, found: AnyCheckpoint) -> None:
    """Each parameter has the states in the checkpoint that the optimizer keeps with the options that it goes on with,
    or none: then it begins. The number of steps is told from the training's where it has none."""
    optimizer = training.optimizer
    saved = training.options_of(found)
    options = [{**group, **theirs} for group, theirs in zip(optimizer.param_groups, saved, strict=True)]
    optimizer.updater.check_places(options)
    kept: dict[Any, set[str]] = {}
    states = states_of(found)
    for segment in optimizer.updater.segments:
        if not optimizer.updater.expected.known:
            break
        kind = optimizer.updater.expected.kind_of(segment)
        if kind not in kept:
            plain = {key: value for key, value in options[segment.group].items() if key != "params"}
            try:
                kept[kind] = optimizer.updater.expected.with_options(segment, plain).names
            except Exception as error:
                raise checkpointing.CheckpointError(
                    f"checkpoint {found.tag!r} was written by {meta_of(found).get('optimizer', 'another optimizer')}; "
                    f"with its options {type(optimizer.inner).__name__} makes no step ({type(error).__name__}: "
                    f"{error}). Continue with that optimizer, or load with load_optimizer_states=False"
                ) from error
        for run in runs_of(segment.bucket, segment.slices()):
            there = states.get(run.name, set())
            if there and (there ^ kept[kind]) - {"step"}:  # which Kept knows
                raise checkpointing.CheckpointError(
                    f"checkpoint {found.tag!r} has {_listed(sorted(there))} of {run.name!r}, written by "
                    f"{meta_of(found).get('optimizer', 'another optimizer')}; {type(optimizer.inner).__name__} keeps "
                    f"{_listed(sorted(kept[kind]))} with these options. Continue with that optimizer, or load with "
                    "load_optimizer_states=False"
                )


def beginning(optimizer: ZeroOptimizer, found: AnyCheckpoint) -> set[str]:
    """Parameters of this rank whose states begin: it was frozen when the checkpoint was written, which has states of
    others."""
    states = states_of(found)
    names = {run.name for segment in optimizer.updater.segments for run in runs_of(segment.bucket, segment.slices())}
    without = {name for name in names if PARAMETER in found.roles.get(name, {}) and not states[name]}
    return without if any(states.values()) else set()
