"""Loading a part of a checkpoint: what is not wanted of it, or not in it, stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from zoo.checkpointing import Checkpoint, StateSlice
from zoo.checkpointing.exact import dtype_named
from zoo.engine.reads import Reads
from zoo.layout import Box

PARAMETER = "parameter"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a checkpoint is loaded; the documented arguments of ``load_checkpoint``."""

    module_strict: bool = True
    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False

    @property
    def optimizer(self) -> bool:
        """States and options of the optimizer."""
        return self.optimizer_states and not self.module_only

    @property
    def all_of_it(self) -> bool:
        """Nothing stays as it is."""
        return self.module_strict and self.optimizer

    def is_fitting(self, found: Checkpoint, item: StateSlice) -> bool:
        """Whether a parameter that the checkpoint does not have is no mistake."""
        return not self.module_strict and PARAMETER not in found.roles.get(item.name, {})


class Kept:
    """Reads a checkpoint, and what is not wanted of it from what is here. Parameters that it does not have begin with
    moments of zero, and the step counts of the others.

    Args:
        live: the slices that this rank holds. Copies are made of those that stay.
    """

    def __init__(self, reads: Reads, found: Checkpoint, wanted: Wanted, live: Iterable[StateSlice]) -> None:
        self._reads, self._found, self._wanted = reads, found, wanted
        self._live: dict[tuple[str, str, int, int], torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for item in live:
            if self._stays(item.name, item.role):
                self._live[item.name, item.role, item.start, item.length] = item.tensor.detach().clone()
                self._shapes[item.name] = tuple(item.shape)

    def _stays(self, name: str, role: str) -> bool:
        if role != PARAMETER:
            return not self._wanted.optimizer
        return PARAMETER not in self._found.roles.get(name, {})

    def read(self, name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
        """As :meth:`zoo.checkpointing.Checkpoint.read`; KeyError for a state that is neither there nor here."""
        if self._stays(name, role):
            first = Box.whole(self._shapes[name]).number_of(start.offsets) if isinstance(start, Box) else start
            return self._live[name, role, first, length]
        if self._stays(name, PARAMETER):
            return torch.zeros(length, dtype=dtype_named(self._dtype_of(role)))
        return self._reads.read(name, role, start, length)

    def _dtype_of(self, role: str) -> str:
        found = next((roles[role] for roles in self._found.roles.values() if role in roles), None)
        if found is None:
            raise KeyError(role)
        return found

    def scalars(self, own: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers that go with the states; ``own`` are those of now."""
        if not self._wanted.optimizer:
            return own
        numbers = dict(self._found.scalars)
        new = {name for name, role, _, _ in self._live if role == PARAMETER}
        for key, value in self._found.scalars.items() if new else ():
            role, _, _ = key.partition("/")
            if role != "zero":
                numbers |= {f"{role}/{name}": max(value, numbers.get(f"{role}/{name}", value)) for name in new}
        return numbers
