"""What an optimizer keeps of buckets: the values that it updates, and its states, by role.

The tensors are its own, among its parameters and in its ``state``, and stay the same objects: these roles are adopted.
A bucket asks here (``bucket.states``) for what it does not hold itself. What leaves the device for a while, so that
something else has its memory, is away (:class:`StatesAway`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zoo.shard.buckets import Bucket
from zoo.shard.offload.tiers import Tier
from zoo.shard.roles import GRADIENT, ORIGINAL, PARAMETER
from zoo.zero.update.segments import Segment, original_of

if TYPE_CHECKING:
    from zoo.zero.inspection import Inspection
    from zoo.zero.update.updater import Updater


class OptimizerStates:
    """Of all buckets that ``optimizer`` trains; it does not keep the optimizer."""

    def __init__(self, optimizer: Inspection) -> None:
        self._optimizer = weakref.ref(optimizer)
        _take_originals(optimizer)
        for bucket in optimizer.buckets:
            bucket.states = self

    @property
    def optimizer(self) -> Inspection:
        """Whose they are.

        Raises:
            ValueError: it is gone.
        """
        found = self._optimizer()
        if found is None:
            raise ValueError(
                "the optimizer of this model does not exist any more: the model runs, and keeps the values that it "
                "has. Keep the optimizer as long as its model, or close() it before it goes."
            )
        return found

    @property
    def are_whole(self) -> bool:
        """They exist, and are all of one step."""
        found = self._optimizer()
        return found is not None and found.updater.broken is None

    def _pieces(self, buckets: Collection[Bucket]) -> Iterator[int]:
        """The numbers of the pieces that have something of ``buckets``; what the latest step wrote is there."""
        updater = self.optimizer.updater
        updater.settle()
        return (i for i, piece in enumerate(updater.pieces()) if any(s.bucket in buckets for s in piece))

    def segments(self, bucket: Bucket) -> Iterator[Segment]:
        """Each segment of a bucket, while what is kept of it is in memory, to be read.

        Go to the end: what came from NVMe is put away afterwards.
        """
        for index in self._pieces([bucket]):
            with self.optimizer.updater.in_memory(index, write=False) as piece:
                yield from (segment for segment in piece if segment.bucket is bucket)

    def read(self, bucket: Bucket) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """By role what this rank has of a bucket, piece by piece: where it begins in the flat buffer, and elements.

        "parameter" is the value that the optimizer updates, exact.
        """
        for segment in self.segments(bucket):
            yield segment.first, segment.roles()

    def edit(
        self, buckets: Collection[Bucket], change: Callable[[Segment, dict[str, torch.Tensor]], None], *,
        precise: bool = False,
    ) -> None:  # fmt: skip
        """Let ``change`` write to the roles of each segment of ``buckets``, as :meth:`read` gives them.

        Args:
            precise: values may have more bits than the parameters: an optimizer that makes its masters in the first
                step gets them now.
        """
        updater = self.optimizer.updater
        for index in self._pieces(buckets):
            with updater.in_memory(index, write=True) as piece:
                for segment in piece:
                    if segment.bucket in buckets:
                        if precise:
                            _make_master(updater, segment)
                        segment.lay_flat()
                        change(segment, segment.roles())
                    segment.round_parameters()  # all of a piece: what is on NVMe is written back whole

    @property
    def that_follow(self) -> Collection[str]:
        """The roles that take new values of the parameters too."""
        found: Collection[str] = getattr(self.optimizer.inner, "follows", ())
        return found

    def look(self, parameter: Any) -> tuple[list[str], dict[str, float]]:
        """The names of a parameter's states, and the numbers among them that this rank knows: 0 before the first step.
        Nothing is communicated, read or made."""
        optimizer = self.optimizer
        optimizer.check_open()
        bucket, slot = parameter._zoo_bucket, parameter._zoo_slot
        group, name = bucket.spec.groups[slot], bucket.spec.names[slot]
        kept = optimizer.updater.keeps_of(bucket, slot, optimizer.param_groups[group])
        numbers = {} if optimizer.inner.state else dict.fromkeys(kept.numbers, 0.0)
        for segment in optimizer.updater.segments:
            if segment.bucket is bucket and segment.group == group and any(s.name == name for s in segment.slices()):
                numbers |= segment.numbers()
                break
        return sorted(kept.numbers | kept.states.keys() | kept.others.keys()), numbers

    def check_writable(self) -> None:
        """Raise RuntimeError where each rank has parameters of its own now."""
        meetings = self.optimizer.updater.meetings
        if meetings is not None:
            meetings.check_writable()

    def refuse_writes(self, why: str) -> None:
        """Raise RuntimeError as :meth:`check_writable`; every step is refused then until a state is loaded."""
        try:
            self.check_writable()
        except RuntimeError:
            self.optimizer.updater.give_up(why)
            raise


def _make_master(updater: Updater, segment: Segment) -> None:
    dtype = updater.expected.of(segment).states.get("master")
    if dtype is not None and "master" not in segment.entries:
        updater.inner.state[segment.tensor]["master"] = segment.tensor.detach().to(dtype, copy=True)


def _take_originals(optimizer: Inspection) -> None:
    """The values that parameters came with become those of the masters, wherever these live; nothing else keeps them
    any more."""
    updater, sharded = optimizer.updater, optimizer.sharded
    for index, piece in enumerate(updater.pieces()):
        kept = [s for s in piece if ORIGINAL in s.bucket.roles and s.bucket.device.type != "meta"]
        on_nvme = any(s.bucket.placements.states.tier is Tier.NVME for s in kept)
        with updater.in_memory(index, write=True) if on_nvme else contextlib.nullcontext():
            for segment in kept:
                _take_original(updater, segment)
    files: Mapping[int, Any] = {id(f): f for b in sharded.trainable if (f := b.stores.get(ORIGINAL)) is not None}
    for bucket in updater.buckets:
        if ORIGINAL in bucket.roles:
            bucket.roles.pop(ORIGINAL).drop()
    for file in files.values():
        if sharded.scratch is not None:
            sharded.scratch.drop(file)


def _take_original(updater: Updater, segment: Segment) -> None:
    bucket = segment.bucket
    found = original_of(bucket, segment.chunk, segment.start, segment.stop)
    if found is None:
        found = bucket.roles[ORIGINAL].read(segment.start, segment.stop - segment.start)
    if segment.tensor.dtype is not bucket.spec.dtype:
        values = segment.values()
        if values.data_ptr() != found.data_ptr():
            values.copy_(found)
    elif (dtype := updater.expected.of(segment).states.get("master")) is not None:
        updater.inner.state[segment.tensor]["master"] = found.to(segment.tensor.device, dtype)


STATES = ("optim_states", "hp_params", "lp_params", "lp_grads")
"""Optimizer states; fp32 masters, and what frozen parameters came with; this rank's shards of the parameters (an fp32
one is its own master); reduced gradients."""


def tensors_of(optimizer: Inspection, include: Collection[str]) -> Iterator[torch.Tensor]:
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

    def __init__(self, optimizer: Inspection) -> None:
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
