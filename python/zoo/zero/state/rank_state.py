"""``state_dict`` of a ZeRO optimizer: what one rank holds, to be loaded by the same rank of the same layout.

A state that does not fit is refused on all ranks before anything changes: half of one would be a state of no run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import together
from zoo.zero.state.logical import runs_of

if TYPE_CHECKING:
    from zoo.zero.optimizer import ZeroOptimizer

_OF_REDUCTIONS = ("feedback.", "owed")


def rank_state(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """See :meth:`zoo.zero.ZeroOptimizer.state_dict`."""
    slices = {f"{s.role}|{s.name}|{s.start}": s.tensor.clone() for s in optimizer.held_slices(owned=False)}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {
        "slices": slices, "scalars": optimizer.state_scalars(), "param_groups": groups, "rank": optimizer.comm.rank,
        "world_size": optimizer.comm.size,
    }  # fmt: skip


def load_rank_state(optimizer: ZeroOptimizer, state: Mapping[str, Any]) -> None:
    """See :meth:`zoo.zero.ZeroOptimizer.load_state_dict`."""
    comm = optimizer.comm
    together(
        comm, "loading a state_dict", lambda: _check(optimizer, state),
        error=lambda text, ranks: ValueError(text), plain=ValueError,
    )  # fmt: skip
    slices = state["slices"]

    def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
        found: torch.Tensor = slices[f"{role}|{name}|{start}"]
        return found

    optimizer.load_state(read, state["scalars"])
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(saved)


def _check(optimizer: ZeroOptimizer, state: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state of this rank fits this optimizer."""
    comm, where = optimizer.comm, (state.get("rank"), state.get("world_size"))
    if where != (comm.rank, comm.size):
        raise ValueError(
            f"this state_dict is of rank {where[0]} of {where[1]}; this is rank {comm.rank} of {comm.size} at stage "
            f"{optimizer.config.stage}. load_state() with the slices of all ranks reads any placement into any other."
        )
    wanted = _wanted(optimizer)
    lengths = {
        key: value.numel() for key, value in state["slices"].items() if not key.startswith(_OF_REDUCTIONS)
    }  # fmt: skip
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
    if len(state["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state_dict has {len(state['param_groups'])} parameter groups; this optimizer has "
            f"{len(optimizer.param_groups)}. Nothing was loaded."
        )


def _wanted(optimizer: ZeroOptimizer) -> dict[str, int]:
    """The length of each run of a parameter that this rank needs, by ``"<name>|<start>"``."""
    found = {}
    for segment in optimizer.updater.segments:
        found.update({f"{p.name}|{p.start}": p.length for p in runs_of(segment.bucket, segment.slices())})
    for bucket in optimizer.buckets:
        if not bucket.spec.trainable:
            pieces = bucket.layout.slices(*bucket.kept_range())
            found.update({f"{p.name}|{p.start}": p.length for p in runs_of(bucket, pieces)})
    return found
