"""What a checkpoint has, whoever wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from zoo import checkpointing
from zoo.zero.state.logical import split_name

if TYPE_CHECKING:
    from zoo.checkpointing import foreign

AnyCheckpoint: TypeAlias = "checkpointing.Checkpoint | foreign.ForeignCheckpoint"
"""What an engine loads: one of zoo's, or one of another system that is read like it."""

PARAMETER, BUFFER = "parameter", "buffer"
_OF_RANKS = ("feedback.", "owed", "apart.")


def meta_of(found: AnyCheckpoint) -> dict[str, Any]:
    """What the engine that wrote it says of itself."""
    meta = found.meta.get("engine")
    if not isinstance(meta, dict):
        raise checkpointing.CheckpointError(
            f"checkpoint {found.tag!r} was not written by an engine: it has weights, and does not say how training "
            "goes on. Load it with load_module_only=True."
        )
    return meta


def states_of(found: AnyCheckpoint) -> dict[str, set[str]]:
    """By parameter, the states of an optimizer that a checkpoint has."""
    states: dict[str, set[str]] = {}
    for name, roles in found.roles.items():
        states[name] = {role for role in roles if role not in (PARAMETER, BUFFER)}
        states[name] -= {role for role in states[name] if role.startswith(_OF_RANKS)}
    for name in list(states):
        for role in states[name]:
            if (whole := split_name(name, role)) in states:
                states[whole].add(role)
    for key in found.scalars:
        role, _, name = key.partition("/")
        if role != "zero" and name in states:
            states[name].add(role)
    return states
