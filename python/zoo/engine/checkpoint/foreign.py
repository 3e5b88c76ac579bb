"""DeepSpeed's checkpoints in an engine: which kind a folder holds, and which options go on with which group."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo import checkpointing
from zoo.checkpointing import foreign
from zoo.engine.checkpoint.contents import AnyCheckpoint
from zoo.layout import logical_name

if TYPE_CHECKING:
    from zoo.engine.checkpoint.partial_load import Wanted
    from zoo.shard import ShardedModel
    from zoo.zero import ZeroOptimizer

_log = logging.getLogger("zoo.engine")
_HOW_IT_RUNS = {
    "params", "names", "param_names", "step", "foreach", "fused", "capturable", "differentiable"
}  # fmt: skip
"""Of a group's options: what is no setting of the training, but how one machine computes it."""


def open_checkpoint(
    module: nn.Module, sharded: ShardedModel, optimizer: ZeroOptimizer | None, directory: str | os.PathLike[str],
    tag: str | None, wanted: Wanted, *, universal: bool,
) -> AnyCheckpoint:  # fmt: skip
    """One of zoo's, or one that DeepSpeed wrote, by what is in the directory. A collective.

    Args:
        universal: of DeepSpeed's, universal ones come first.

    Raises:
        CheckpointError: on all ranks alike: what is wrong with it, or checkpoints of both where no tag says which.
    """
    everyone = sharded.everyone
    what = f"loading the checkpoint {tag or 'latest'!r} of {str(directory)!r}"
    theirs = everyone.broadcast_object(
        checkpointing.alike(everyone, what, lambda: _is_deepspeeds(directory, tag) if everyone.rank == 0 else None)
    )
    if not theirs:
        return checkpointing.load(directory, tag, everyone)
    states = wanted.optimizer and optimizer is not None
    # Stages of a pipeline know only their own layers, which may be others than those of a stage there.
    shared = getattr(module, "foreign_names", {}) if getattr(module, "engine_runner", None) == "pipeline" else {}
    named = optimizer if states and sharded.layers is None and not shared else None
    found = foreign.load_deepspeed(
        directory, tag, everyone, groups=None if named is None else _their_names(module, named),
        optimizer_states=states, universal=universal, shared=shared,
    )  # fmt: skip
    found.meta = checkpointing.alike(everyone, what, lambda: _told(module, found))
    return found


def _told(module: nn.Module, found: foreign.ForeignCheckpoint) -> dict[str, Any]:
    """What it says of the training. What is in a layer whose ``foreign_names`` say how it is called elsewhere, {"begin
    of a name there": "begin of the name here"}, has the names of here then."""
    starts = _starts(module)
    taken = set(found.shapes)
    for name in sorted(found.shapes):
        own = _begun_otherwise(name, starts)
        if own != name and own in taken:
            found.remove(name)  # of another layer that shares the module
        taken.add(own)
    if starts:
        found.rename(lambda name: _begun_otherwise(name, starts))
    return foreign.training_meta(found)


def _starts(module: nn.Module) -> dict[str, str]:
    """Begin of a name in DeepSpeed's checkpoints → begin of the name here."""
    starts: dict[str, str] = {}
    for place, layer in module.named_modules():
        prefix = f"{place}." if place else ""
        starts |= {f"{prefix}{theirs}": f"{prefix}{own}" for theirs, own in getattr(layer, "foreign_names", {}).items()}
    return starts


def _their_names(module: nn.Module, optimizer: ZeroOptimizer) -> list[list[str]]:
    """The names that the parameters of each group have in DeepSpeed's checkpoints."""
    starts = {own: theirs for theirs, own in _starts(module).items()}
    return [[_begun_otherwise(name, starts) for name in group] for group in _group_names(module, optimizer)]


def _begun_otherwise(name: str, starts: Mapping[str, str]) -> str:
    for theirs, own in starts.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def _is_deepspeeds(directory: str | os.PathLike[str], tag: str | None) -> bool:
    from zoo.checkpointing.format.disk import LOCAL, place_of
    from zoo.checkpointing.format.names import tags_of

    disk, root = place_of(directory)
    if disk is not LOCAL:
        return False  # DeepSpeed's are read from this machine's file systems alone
    ours, theirs = tags_of(disk, root), foreign.deepspeed_tags(root)
    if tag is not None and tag in ours and tag in theirs:
        raise checkpointing.CheckpointError(
            f"{str(root / tag)!r} has files of a checkpoint of zoo and of one of DeepSpeed; move one of the two away"
        )
    if tag is None and ours and theirs:
        raise checkpointing.CheckpointError(
            f"{str(root)!r} has checkpoints of zoo ({', '.join(ours[:3])}) and of DeepSpeed ({', '.join(theirs[:3])}); "
            "give the tag of the one that is meant"
        )
    return tag in theirs if tag is not None else bool(theirs)


def _group_names(module: nn.Module, optimizer: ZeroOptimizer) -> list[list[str]]:
    """The names in the whole model of the parameters of each group of the optimizer, in its order."""
    name_of = {id(p): logical_name(module, name) for name, p in module.named_parameters()}
    return [[name_of[id(p)] for p in g["params"] if id(p) in name_of] for g in optimizer.param_groups]


def options_of_groups(
    module: nn.Module, optimizer: ZeroOptimizer, saved: list[dict[str, Any]], found: AnyCheckpoint
) -> list[dict[str, Any]]:
    """Of a checkpoint that another system wrote: the options that each group of the optimizer goes on with.

    Groups are found by the names of their parameters; where the checkpoint has no names, by their order.

    Raises:
        CheckpointError: parameters of one group had different options there, or there are other groups.
    """
    groups = optimizer.param_groups
    if not any(map(_names, saved)):
        while len(saved) > len(groups) and not saved[-1]:
            saved = saved[:-1]
        if len(saved) != len(groups):
            raise checkpointing.CheckpointError(
                f"checkpoint {found.tag!r} has {len(saved)} parameter groups without names, the optimizer {len(groups)}"
            )
        return [_options(own, theirs, found) for own, theirs in zip(groups, saved, strict=True)]
    chosen = []
    for number, (own, names) in enumerate(zip(groups, _group_names(module, optimizer), strict=True)):
        theirs = [_options(own, group, found) for group in saved if _names(group) & set(names)]
        one = theirs[0] if theirs else {}
        odd = [key for key in one if any(other.get(key) != one[key] for other in theirs)]
        if odd:
            values = ", ".join(sorted({str(other.get(odd[0])) for other in theirs}))
            raise checkpointing.CheckpointError(
                f"parameters of group {number} of the optimizer had different {odd[0]} in checkpoint {found.tag!r} "
                f"({values}); give initialize model_parameters in the groups of then, or load with "
                "load_optimizer_states=False"
            )
        chosen.append(one)
    return chosen


def _names(group: Mapping[str, Any]) -> set[str]:
    names = group.get("names")
    return {name for name in names if isinstance(name, str)} if isinstance(names, (list, tuple)) else set()


def _options(own: Mapping[str, Any], theirs: Mapping[str, Any], found: AnyCheckpoint) -> dict[str, Any]:
    """What of a group's options is a setting that this optimizer has too."""
    taken = {}
    for key, mine in own.items():
        value = theirs.get(key)
        if key in _HOW_IT_RUNS or key not in theirs or isinstance(mine, (str, type(None))):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(mine, tuple) and isinstance(value, list):
            value = tuple(value)
        if not _is_like(mine, value):
            raise checkpointing.CheckpointError(
                f"checkpoint {found.tag!r} has {key} = {str(value)[:40]!r} among the options of a parameter group; the "
                f"optimizer has {mine!r} there. Load it with load_optimizer_states=False."
            )
        taken[key] = value
    return taken


def _is_like(mine: Any, value: Any) -> bool:
    """Whether a value can be in the place of another: true or false, a number, or so many numbers."""
    if isinstance(mine, tuple):
        return isinstance(value, tuple) and len(value) == len(mine) and all(map(_is_like, mine, value))
    if isinstance(mine, bool) or isinstance(value, bool):
        return isinstance(mine, bool) and isinstance(value, bool)
    return type(value) in (int, float) and math.isfinite(value)


def tell_what_is_missing(found: AnyCheckpoint, steps: int, *, first: bool) -> None:
    """Say once, on the ``first`` rank, what another system's checkpoint does not have, or has and is not taken over."""
    if not first:
        return
    _log.warning(
        "checkpoint %r was written by another system: it has no position in the data and no states of random number "
        "generators that could be used, so both begin anew, at step %d of training.", found.tag, steps,
    )  # fmt: skip
    said = found.meta.get("imported", {}).get("deepspeed", {})
    for key in ("data_sampler", "random_ltd"):
        if said.get(key):
            _log.warning("the state %r of checkpoint %r is not taken over.", key, found.tag)
