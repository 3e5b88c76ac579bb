"""Training state that leaves the device for a while, so that something else has its memory, and comes back."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from zoo.shard.roles import GRADIENT, ORIGINAL, PARAMETER

if TYPE_CHECKING:
    from zoo.zero.optimizer import ZeroOptimizer

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads")
"""Optimizer states; fp32 masters, and what frozen parameters came with; this rank's shards of the parameters (an fp32
one is its own master); reduced gradients."""


def tensors_of(optimizer: ZeroOptimizer, include: Collection[str]) -> Iterator[torch.Tensor]:
    """The tensors on the device that ``include`` names; what lives in another tier is elsewhere already."""
    for segment in optimizer.updater.segments:
        for name, tensor in segment.in_memory().items():
            if tensor.dim() and ("hp_params" if name in ("", "master") else "optim_states") in include:
                yield tensor
    for bucket in optimizer.buckets:
        named = {PARAMETER: "lp_params", ORIGINAL: "hp_params", GRADIENT: "lp_grads"}
        for name, role in bucket.roles.items():
            if named[name] in include and role.values is not None and (name != PARAMETER or bucket.partitioned):
                if name == PARAMETER:
                    bucket.executor.reshard(bucket)
                yield role.values


def leaves(tensor: torch.Tensor) -> bool:
    """Whether a tensor goes to other memory: what is on the CPU is there already."""
    return tensor.device.type != "cpu"


def states_named(include: Iterable[str] | None, stage: int) -> tuple[str, ...]:
    """The names that ``include`` gives; for None all that can leave at a stage.

    Raises:
        ValueError: it is no list of names, some are not among :data:`STATES`, or parameters below stage 3.
    """
    if include is None:
        return tuple(name for name in STATES if stage == 3 or name != "lp_params")
    allowed = f"allowed are {', '.join(map(repr, STATES))}, in a list, or None for all."
    if isinstance(include, str) or not isinstance(include, Iterable):
        raise ValueError(f"include={include!r} is a {type(include).__name__}; {allowed}")
    named = tuple(dict.fromkeys(include))
    unknown = [name for name in named if name not in STATES]
    if unknown:
        raise ValueError(f"include has {', '.join(map(repr, unknown))}; {allowed}")
    if "lp_params" in named and stage != 3:
        raise ValueError(
            f"include has 'lp_params' at stage {stage}, where every rank has the parameters whole, and the model's "
            "parameters are views of them: they leave at stage 3. Name others of " + ", ".join(map(repr, STATES)) + "."
        )
    return named


class StatesAway:
    """What :meth:`ZeroOptimizer.offload_states` took away, and where it belongs."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.include: tuple[str, ...] = ()
        self._away: list[tuple[torch.Tensor, torch.device]] = []
        self._optimizer, self._left = weakref.ref(optimizer), False

    def take(self, include: Collection[str], *, pin_memory: bool, non_blocking: bool) -> None:
        """Take these too, but for what is away already."""
        named = tuple(name for name in include if name not in self.include)
        optimizer = self._optimizer()
        if optimizer is None:
            raise AssertionError("states of an optimizer that does not exist any more.")
        self.include += named
        for tensor in tensors_of(optimizer, named):
            self._away.append((tensor, tensor.device))
            if leaves(tensor):
                self._left = True
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)
                tensor.data = host.copy_(tensor.detach(), non_blocking=non_blocking)
        if non_blocking and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._follow()

    def num_bytes(self) -> int:
        """Of everything that is away."""
        return sum(tensor.nbytes for tensor, _ in self._away)

    def back(self, *, non_blocking: bool) -> None:
        """To where it was."""
        for tensor, device in self._away:
            if leaves(tensor) or tensor.device != device:
                tensor.data = tensor.detach().to(device, non_blocking=non_blocking, copy=True)
        self._away.clear()
        self._follow()

    def _follow(self) -> None:
        """What the optimizer updates are views of the shards: they go where these went."""
        optimizer = self._optimizer()
        if optimizer is None or not self._left:
            return
        for segment in optimizer.updater.segments:
            values = segment.bucket.parameters.chunk(segment.chunk)
            if values is None or not segment.bucket.partitioned:
                continue
            segment.moved_to(values[segment.start : segment.stop])
