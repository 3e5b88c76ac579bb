"""The engine part ``activation_checkpointing``: configures the functions, and checkpoints blocks of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from zoo.activation_checkpointing import state
from zoo.activation_checkpointing.config import ActivationCheckpointingConfig
from zoo.activation_checkpointing.recomputing import ActivationCheckpointing
from zoo.comm import Communicator
from zoo.nn.blocks import Blocks, find_blocks
from zoo.parts import Environment

__all__ = ["ActivationCheckpointingPart"]

_WHO = "activation_checkpointing"
_AXIS = "tensor"
_log = logging.getLogger("zoo.activation_checkpointing")


class ActivationCheckpointingPart:
    """Carries the section out: what ``configure`` does for scripts, with the mesh axis "tensor", and ``blocks``.

    Args:
        section: ``activation_checkpointing``.
        environment: of the engine.
    """

    before = ("data_efficiency", "progressive_layer_drop")  # they decide whether a block runs, and on what

    def __init__(self, section: ActivationCheckpointingConfig, environment: Environment) -> None:
        configured = state.current().checkpointing
        if section.number_checkpoints is None and configured is not None:
            section = section.model_copy(update={"number_checkpoints": configured.config.number_checkpoints})
        self.section = section
        mesh = environment.mesh
        group = None
        if mesh is not None and _AXIS in (mesh.mesh_dim_names or ()) and mesh[_AXIS].size() > 1:
            group = Communicator(mesh.get_group(_AXIS))
        self.checkpointing = ActivationCheckpointing(section, group, aio=environment.config.aio)
        self._blocks: Blocks | None = None
        state.own().enter(self.checkpointing, 0 if group is None else group.rank)

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Stand before the blocks, outside of their hooks: a repeated call gathers sharded parameters again."""
        if self.section.blocks is not None:
            names = None if self.section.blocks == "auto" else self.section.blocks
            blocks = find_blocks(module, names, _WHO)
            self._blocks = Blocks(blocks, self._route, _WHO)

    def _route(self, number: int, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.checkpointing.checkpoint(block, *args, **kwargs)

    def close(self) -> None:
        """Blocks are called as before, and the functions work as before this engine."""
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
        state.own().leave(self.checkpointing)
        self.checkpointing.reset()
