"""Loading a part of a checkpoint: what is not wanted of it, or not in it, stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from zoo import checkpointing
from zoo.engine.checkpoint.agreed_reader import Reads
from zoo.engine.checkpoint.contents import PARAMETER, AnyCheckpoint, meta_of, states_of
from zoo.layout import Box
from zoo.zero.state.logical import APART, Run


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a checkpoint is loaded; the documented arguments of ``load_checkpoint``."""

    module_strict: bool = True
    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False
    custom: bool = False
    """Parameters and buffers are what a function of the user has written."""
    given: bool = False
    """It is a state_dict of the user's: 16-bit values that masters round to leave these as they are."""

    @property
    def optimizer(self) -> bool:
        """States and options of the optimizer."""
        return self.optimizer_states and not self.module_only

    @property
    def all_of_it(self) -> bool:
        """Nothing stays as it is."""
        return self.module_strict and self.optimizer and not self.custom

    def has(self, found: AnyCheckpoint, item: checkpointing.StateSlice | Run) -> bool:
        """Whether the checkpoint has a parameter; of a custom load: with the same shape."""
        there = PARAMETER in found.roles.get(item.name, {})
        return there and (not self.custom or found.shapes[item.name] == tuple(item.shape))

    def may_lack(self, found: AnyCheckpoint, item: Run) -> bool:
        """Whether a parameter that the checkpoint does not have is no mistake."""
        return (self.custom or not self.module_strict) and not self.has(found, item)


class Kept:
    """Reads a checkpoint, and what is not wanted of it from what is here. Parameters that it does not have begin with
    moments of zero, and the step counts of the others.

    Args:
        live: the slices that this rank holds. Copies are made of those that stay.
        dtypes: what parameters compute in, by name.
        beginning: parameters that it has, without states, which others have.
        follow: states that begin as the parameter's value.
    """

    def __init__(
        self, reads: Reads, found: AnyCheckpoint, wanted: Wanted, live: Iterable[checkpointing.StateSlice],
        dtypes: Mapping[str, torch.dtype], *, beginning: Collection[str] = (), follow: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._reads, self._found, self._wanted, self._dtypes = reads, found, wanted, dtypes
        held, self._beginning, self._follow = list(live), set(beginning), set(follow)
        self._lacking = {item.name for item in held if item.role == PARAMETER and not wanted.has(found, item)}
        self._live: dict[tuple[str, str, int, int], torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for item in held:
            if self._stays(item.name, item.role) or (wanted.given and item.role == PARAMETER):
                self._live[item.name, item.role, item.start, item.length] = item.tensor.detach().clone()
                self._shapes[item.name] = tuple(item.shape)

    def _stays(self, name: str, role: str) -> bool:
        if role != PARAMETER:
            return not self._wanted.optimizer
        return self._wanted.custom or name in self._lacking

    def read(
        self, name: str, role: str, start: int | Box, length: int, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        """As :meth:`zoo.checkpointing.Checkpoint.read`; KeyError for a state that is neither there nor here."""
        if role == PARAMETER and name not in self._lacking and (self._wanted.custom or self._wanted.given):
            return self._as_exact_as_known(name, start, length)
        if self._stays(name, role):
            return self._held(name, role, start, length)
        if name in self._lacking or (name in self._beginning and role != PARAMETER):
            from zoo.checkpointing.format.exact import dtype_named

            if role.startswith(APART):
                raise KeyError(role)  # no rank has any of its own
            if role in self._follow:
                return self.read(name, PARAMETER, start, length, out=out)
            return torch.zeros(length, dtype=dtype_named(self._dtype_of(role)))
        return self._reads.read(name, role, start, length, out=out)

    def _held(self, name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
        first = Box.whole(self._shapes[name]).number_of(start.offsets) if isinstance(start, Box) else start
        return self._live[name, role, first, length]

    def _as_exact_as_known(self, name: str, start: int | Box, length: int) -> torch.Tensor:
        """What was written in 16 bits, with the precision that it has elsewhere: in the checkpoint, of what a function
        has written into the model; here, of what a state_dict has."""
        live = self._held(name, PARAMETER, start, length)
        there = self._reads.read(name, PARAMETER, start, length).to(live.device)
        written, known = (live, there) if self._wanted.custom else (there, live)
        dtype = self._dtypes[name]
        if dtype.itemsize > 2 or (self._wanted.given and there.dtype.itemsize > 2):
            return written
        wide = torch.promote_types(written.dtype, known.dtype)
        return torch.where(written.to(dtype) == known.to(dtype), known.to(wide), written.to(wide))

    def _dtype_of(self, role: str) -> str:
        found = next((roles[role] for roles in self._found.roles.values() if role in roles), None)
        if found is None:
            raise KeyError(role)
        return found

    def scalars(self, own: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers that go with the states; ``own`` are those of now."""
        if not self._wanted.optimizer:
            return own
        numbers = {**self._steps(), **self._found.scalars}
        begins = self._lacking | self._beginning
        for key, value in self._found.scalars.items() if begins else ():
            role, _, _ = key.partition("/")
            if role != "zero":
                mine = (f"{role}/{name}" for name in begins)
                numbers |= {place: max(value, numbers.get(place, value)) for place in mine}
        return numbers

    def _steps(self) -> dict[str, float]:
        """Of optimizers that keep no number of steps, as torch's SGD: the steps of the training that were not skipped,
        for those that do."""
        meta = meta_of(self._found)
        taken = int(meta["global_steps"]) - int(meta["skipped_steps"])
        names = {name for name, states in states_of(self._found).items() if states}
        names |= self._lacking | self._beginning if names else set()
        return {f"step/{name}": float(taken) for name in names} if taken > 0 else {}
