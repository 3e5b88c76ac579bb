"""``GatheredParameters``: parameters whole for a while, to be read or to be changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zoo.comm import Communicator, RankFailedError
from zoo.shard.agreement import short_digest
from zoo.shard.buckets import Bucket
from zoo.shard.guard import ShardedParameter
from zoo.shard.runtime.external import register_external_parameter

_COPIES: WeakKeyDictionary[Bucket, list[dict[int, torch.Tensor]]] = WeakKeyDictionary()
"""Of whole parameters, what each context around puts back after an exception: what an inner one stored stays."""


class Owner(Protocol):
    """Whose buckets they are: a ``ShardedModel``, or what ``zoo.zero.Init`` has partitioned. Every rank calls it alike.

    ``comm`` has all of its ranks; ``writes`` holds its buckets.
    """

    comm: Communicator
    writes: Holder

    def settle(self) -> None:
        """Before the ranks agree on what comes."""


class Holder(Protocol):
    """Keeps buckets whole and takes new values for them; every rank calls it alike."""

    def failed_anywhere(self, error: BaseException | None) -> str:
        """What ended the ``with`` on some rank, by rank; empty if nothing did. Collective but after an interrupt."""

    def hold(self, bucket: Any, *, writes: bool) -> Any:
        """Make a bucket whole and keep it so; ``writes``: what is written to it will be published. Collective."""

    def let_go(self, bucket: Any, held: Any, *, forget: bool) -> None:
        """End a hold, which returned ``held``; with ``forget`` what is whole is not used any more."""

    def noted(self, bucket: Any) -> list[int]:
        """The versions of a held bucket's parameters from which on a change is the user's, and not published yet."""

    def publish(self, slots: Mapping[Any, Sequence[int]], rank: int, seen: Mapping[Any, Sequence[int]]) -> None:
        """The values that ``rank`` has of these parameters of held buckets become everybody's. Collective.

        ``seen``: their versions at the begin, as autograd counts them.
        """


class GatheredParameters:
    """Makes parameters whole on every rank inside of a ``with``. Collective: all ranks give the same parameters.

    ::

        with GatheredParameters(model.embed.weight, modifier_rank=0):
            if rank == 0:
                model.embed.weight.data[5:] = 0.0

    For parameters that ``zoo.zero.Init`` partitioned and for those of a ``ZeroOptimizer`` at every stage; others pass
    through. Contexts may be nested.

    Args:
        params: a parameter, or an iterable of them.
        modifier_rank: None for reading. A rank of the data-parallel group for writing: at the end its values become
            everybody's, wherever they live: shards, whole copies, host memory or NVMe, and the fp32 values that the
            optimizer updates (those that round to the value at the end keep their precision). What other ranks wrote is
            overwritten. Of parameters that are parts along other mesh axes it is a rank of those with the same part.
            After an exception inside, nothing is changed, but for what an inner context stored before it.
        fwd_module: a module in whose forward the parameters are used from now on: they are registered as external to
            it (:func:`~zoo.zero.register_external_parameter`). Without it, a trainable parameter that is gathered for
            reading inside of a forward, at stage 3 and with gradients recorded, becomes external to the running unit.
        enabled: False makes this do nothing.

    Raises:
        RuntimeError: a parameter was written to in place without modifier_rank, or one that is not in ``params``: the
            change is lost, or stays on this rank alone where parameters are whole (found by version counters; those of
            ``Init``'s parameters do not see writes through ``.data``).
        ValueError: modifier_rank is no rank of the group.
        TypeError: something in ``params`` is no parameter, or modifier_rank no number.
        CollectiveMismatchError: the ranks gave different parameters.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = _parameters_in(params)
        number: Any = modifier_rank
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(
                f"GatheredParameters got modifier_rank={modifier_rank!r}, a {type(modifier_rank).__name__}; it takes "
                "the number of a rank, for writing, or None, for reading."
            )
        self._params = list({id(p): p for p in given}.values()) if enabled else []
        self._modifier, self._fwd_module = modifier_rank, fwd_module
        self._slots: dict[Bucket, list[int]] = {}
        self._held: dict[Bucket, Any] = {}
        self._inside = False
        self._saved: dict[Bucket, dict[int, torch.Tensor]] = {}
        self._versions: dict[Bucket, list[int]] = {}
        self._seen: dict[Bucket, list[int]] = {}

    def __enter__(self) -> None:
        if self._inside:
            raise RuntimeError(
                "this GatheredParameters is entered already; an object is one with statement at a time. Make another "
                "one for the inner with statement."
            )
        self._find()
        for owner in {id(o): o for o in map(owner_of, self._slots)}.values():
            owner.settle()
        self._agree()
        self._take_external()
        try:
            for bucket in self._slots:
                self._held[bucket] = owner_of(bucket).writes.hold(bucket, writes=self._modifier is not None)
                bucket.read_whole = True
            self._look()
        except BaseException:
            self._let_go(restore=False, forget=True)
            raise
        self._inside = True

    def _look(self) -> None:
        """What the parameters are at the begin."""
        self._versions = {bucket: bucket.parameters.versions() for bucket in self._slots}
        with torch._C.DisableTorchFunctionSubclass():
            self._seen = {bucket: [p._version for p in bucket.spec.parameters] for bucket in self._slots}
        # A copy, so that an exception inside leaves no rank with values of its own.
        for bucket, slots in self._slots.items() if self._modifier is not None else ():
            if not bucket.partitioned:
                copies = {slot: bucket.parameters.flat_of(slot).clone() for slot in slots}
                _COPIES.setdefault(bucket, []).append(copies)
                self._saved[bucket] = copies

    def _find(self) -> None:
        slots: dict[Bucket, list[int]] = {}
        for parameter in self._params:
            if isinstance(parameter, ShardedParameter):
                slots.setdefault(parameter._zoo_bucket, []).append(parameter._zoo_slot)
        # In the order of the buckets, whatever order the ranks gave.
        self._slots = {bucket: sorted(slots[bucket]) for bucket in sorted(slots, key=lambda b: b.index)}

        if self._fwd_module is not None:
            for parameter in self._params:
                register_external_parameter(self._fwd_module, parameter)

    def _take_external(self) -> None:
        """What is read in a forward may lead to the loss: its gradient comes in the backward of the running unit."""
        if self._modifier is None and torch.is_grad_enabled():
            for bucket, slots in self._slots.items():
                if bucket.partitioned and bucket.gradients is not None:
                    bucket.take_external(slots[0])

    def _agree(self) -> None:
        comms: dict[int, tuple[Communicator, torch.device, list[str]]] = {}
        for bucket, slots in self._slots.items():
            comm = owner_of(bucket).comm
            names = comms.setdefault(id(comm), (comm, bucket.device, []))[2]
            names += [bucket.called(slot) for slot in slots]
        for comm, device, names in comms.values():
            if self._modifier is not None and not 0 <= self._modifier < comm.size:
                raise ValueError(
                    f"GatheredParameters got modifier_rank={self._modifier}; the group has ranks 0 to {comm.size - 1}."
                )
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            digest = short_digest(names)
            comm.agree(
                "GatheredParameters of", f"{len(names)} ({shown}; {digest}), modifier_rank {self._modifier}", device
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost, stays = self._lost() if kind is None else ([], False)
        told, done = "", False
        try:
            if self._modifier is not None:  # all ranks store, or none does
                refused = RuntimeError(f"{', '.join(lost[:5])} would be lost") if lost else error
                for owner in {id(o): o for o in map(owner_of, self._slots)}.values():
                    told = told or owner.writes.failed_anywhere(refused)
            if kind is None and not told and not lost and self._modifier is not None:
                self._store(self._modifier)
            done = kind is None and not told and not lost
        finally:
            self._let_go(restore=not done, forget=not done)
        if lost:
            what = "stays on this rank alone, where parameters are whole" if stays else "would be lost"
            raise RuntimeError(
                f"{', '.join(lost[:5])} was written to inside GatheredParameters, and the change {what}: name it among "
                "the parameters and pass modifier_rank, the rank whose values become everybody's."
            )
        if told and kind is None:
            raise RankFailedError(f"{told}. What was written inside GatheredParameters is undone on all ranks.")

    def _let_go(self, *, restore: bool, forget: bool) -> None:
        """Nothing is held any more; with ``restore`` whole copies are as they were."""
        for bucket, copies in self._saved.items():
            if restore:
                for slot, saved in copies.items():
                    bucket.parameters.flat_of(slot).copy_(saved)
            _COPIES[bucket] = [others for others in _COPIES[bucket] if others is not copies]
        self._saved, self._inside = {}, False
        for bucket, held in self._held.items():
            owner_of(bucket).writes.let_go(bucket, held, forget=forget)
        self._held.clear()

    def _lost(self) -> tuple[list[str], bool]:
        """The parameters that were written to and will not be stored, and whether one of them is whole in any case."""
        # Nothing is lost where nothing was written since the beginning, or since an inner context stored it.
        found, stays = [], False
        for bucket, slots in self._slots.items():
            noted, before = owner_of(bucket).writes.noted(bucket), self._versions[bucket]
            for slot, version in enumerate(bucket.parameters.versions()):
                stored = self._modifier is not None and slot in slots
                if version not in (noted[slot], before[slot]) and not stored:
                    found.append(bucket.called(slot))
                    stays = stays or not bucket.partitioned
        return found, stays

    @torch.no_grad()
    def _store(self, modifier: int) -> None:
        by_owner: dict[int, tuple[Owner, dict[Bucket, list[int]]]] = {}
        for bucket, slots in self._slots.items():
            owner = owner_of(bucket)
            by_owner.setdefault(id(owner), (owner, {}))[1][bucket] = slots
        for owner, changed in by_owner.values():
            owner.writes.publish(changed, modifier, self._seen)
        for bucket, slots in self._slots.items():
            for copies in _COPIES.get(bucket, ()):
                for slot in copies.keys() & set(slots):
                    copies[slot].copy_(bucket.parameters.flat_of(slot))


def _parameters_in(params: Any) -> list[Any]:
    """What ``params=`` names, each a tensor."""
    allowed = "it takes a parameter, or an iterable of them: [layer.weight, layer.bias], or model.parameters()"
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, (str, nn.Module)) or not isinstance(params, Iterable):
        raise TypeError(f"GatheredParameters got a {type(params).__name__}; {allowed}.")
    given = list(params)
    for member in given:
        if not isinstance(member, torch.Tensor):
            pair = isinstance(member, tuple) and any(isinstance(part, torch.Tensor) for part in member)
            what = "a pair, as named_parameters() gives," if pair else f"a {type(member).__name__}"
            raise TypeError(f"GatheredParameters got an iterable with {what} in it; {allowed}.")
    return given


def owner_of(bucket: Bucket) -> Owner:
    """What a bucket belongs to."""
    owner: Owner | None = bucket.owner()
    if owner is None:
        raise RuntimeError(f"the optimizer of the parameters of {bucket.label} does not exist any more.")
    return owner
