"""Reading a checkpoint on many ranks, of which one may find it damaged while the others go on."""

from __future__ import annotations

import math
from typing import Any

import torch

from zoo import checkpointing
from zoo.comm import Communicator
from zoo.engine.checkpoint.contents import PARAMETER, AnyCheckpoint
from zoo.layout import Box
from zoo.zero.state.logical import taking_out


class Reads:
    """A checkpoint whose damage is kept for :meth:`agree`.

    Loading a state issues collectives on the way. A rank that stopped at a damaged file would let the others wait, so
    it goes on with zeros, and tells at the end.
    """

    def __init__(self, found: AnyCheckpoint) -> None:
        self._found, self._error = found, None
        self.tag, self.shapes, self.roles = found.tag, found.shapes, found.roles
        self._read = taking_out(found.read)

    _error: Exception | None

    def read(
        self, name: str, role: str, start: int | Box, length: int, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        """As :meth:`zoo.checkpointing.Checkpoint.read`, or zeros."""
        if self._error is None:
            try:
                return self._read(name, role, start, length, out=out)
            except checkpointing.MissingStateError:
                raise
            except Exception as error:  # damage, or what this machine cannot do: the others must hear of both
                self._error = error
        from zoo.checkpointing.format.exact import dtype_named

        return torch.zeros(length, dtype=dtype_named(self._found.roles[name][role]))

    def tensor(self, name: str, role: str = PARAMETER) -> torch.Tensor:
        """As :meth:`zoo.checkpointing.Checkpoint.tensor`, or zeros."""
        shape = self.shapes.get(name, ())
        return self.read(name, role, 0, math.prod(shape)).view(shape)

    def rank_state(self, rank: int) -> dict[str, torch.Tensor]:
        """As :meth:`zoo.checkpointing.Checkpoint.rank_state`, or nothing."""
        try:
            return self._found.rank_state(rank)
        except Exception as error:
            self._error = error
            return {}

    def client_state(self, rank: int) -> dict[str, Any]:
        """What a rank has kept (:mod:`zoo.checkpointing.client_state`), or nothing."""
        try:
            from zoo.checkpointing.client_state import client_state_of

            return client_state_of(self._found, rank)
        except Exception as error:
            self._error = error
            return {}

    def agree(self, comm: Communicator, what: str) -> None:
        """Raise on all ranks if one could not read: DamageError where that was damage, and only that. Collective."""

        def tell() -> None:
            if self._error is not None:
                raise self._error

        try:
            checkpointing.alike(comm, what, tell)
        except ValueError as error:
            damage = self._error is None or isinstance(self._error, checkpointing.DamageError)
            kind = checkpointing.DamageError if all(comm.all_gather_object(damage)) else checkpointing.CheckpointError
            raise kind(str(error), everywhere=True) from None
