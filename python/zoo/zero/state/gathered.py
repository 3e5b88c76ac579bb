"""``GatheredParameters``: parameters whole for a while, to be read or to be changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.zero.init.parts import Part, part_of
from zoo.zero.init.session import current
from zoo.zero.runtime.external import register_external_parameter
from zoo.zero.sharding.buckets import Bucket
from zoo.zero.state.editing import write_values

if TYPE_CHECKING:
    from zoo.zero.sharded import ShardedModel


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
            After an exception inside, nothing is changed.
        fwd_module: a module in whose forward the parameters are used from now on: they are registered as external to
            it (:func:`~zoo.zero.register_external_parameter`).
        enabled: False makes this do nothing.

    Raises:
        RuntimeError: a parameter was written to in place without modifier_rank, or one that is not in ``params``: the
            change would be lost (found by version counters; those of ``Init``'s parameters do not see writes through
            ``.data``).
        ValueError: modifier_rank is no rank of the group.
        CollectiveMismatchError: the ranks gave different parameters.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = list({id(p): p for p in given}.values()) if enabled else []
        self._modifier, self._fwd_module = modifier_rank, fwd_module
        self._parts: list[Part] = []
        self._slots: dict[Bucket, list[int]] = {}
        self._before: dict[Bucket, tuple[bool, bool]] = {}
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: dict[int, int] = {}
        self._bucket_versions: dict[Bucket, list[int]] = {}
        self._seen: dict[Bucket, list[int]] = {}

    def __enter__(self) -> None:
        self._find()
        for owner in {id(o): o for o in map(owner_of, self._slots)}.values():
            owner.settle()
        self._agree()
        for part in self._parts:
            part.users += 1
            part.make_whole()
        for bucket in self._slots:
            self._before[bucket] = owner_of(bucket).runtime.hold(bucket)
        self._versions = {id(part.parameter): part.parameter._version for part in self._parts}
        self._bucket_versions = {bucket: bucket.parameters.versions() for bucket in self._slots}
        with torch._C.DisableTorchFunctionSubclass():
            self._seen = {bucket: [p._version for p in bucket.spec.parameters] for bucket in self._slots}
        if self._modifier is not None:
            # A copy, so that an exception inside leaves no rank with values of its own.
            whole = [(b, slot) for b, slots in self._slots.items() if not b.partitioned for slot in slots]
            self._saved = [(view, view.clone()) for view in (b.parameters.flat_of(slot) for b, slot in whole)]

    def _find(self) -> None:
        slots: dict[Bucket, list[int]] = {}
        self._parts = []
        for parameter in self._params:
            part, bucket = part_of(parameter), getattr(type(parameter), "_zoo_bucket", None)
            if part is not None:
                self._parts.append(part)
            elif bucket is not None:
                slots.setdefault(bucket, []).append(parameter._zoo_slot)
        # In the order of the buckets, whatever order the ranks gave.
        self._slots = {bucket: sorted(slots[bucket]) for bucket in sorted(slots, key=lambda b: b.index)}

        if self._fwd_module is not None:
            for parameter in self._params:
                register_external_parameter(self._fwd_module, parameter)

    def _agree(self) -> None:
        comms: dict[int, tuple[Communicator, torch.device, list[str]]] = {}
        for part in self._parts:
            comms.setdefault(id(part.comm), (part.comm, part.device, []))[2].append(part.name)
        for bucket, slots in self._slots.items():
            comm = owner_of(bucket).comm
            names = comms.setdefault(id(comm), (comm, bucket.device, []))[2]
            names += [bucket.spec.names[slot] for slot in slots]
        for comm, device, names in comms.values():
            if self._modifier is not None and not 0 <= self._modifier < comm.size:
                raise ValueError(
                    f"GatheredParameters got modifier_rank={self._modifier}; the group has ranks 0 to {comm.size - 1}."
                )
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            digest = hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()
            comm.agree(
                "GatheredParameters of", f"{len(names)} ({shown}; {digest}), modifier_rank {self._modifier}", device
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost: list[str] = []
        if kind is not None:
            for view, saved in self._saved:
                view.copy_(saved)
        else:
            lost = self._lost()
            if self._modifier is not None and not lost:
                self._store(self._modifier)
        self._saved = []
        for part in self._parts:
            part.users -= 1
            session = current()
            if part.users == 0 and not (session is not None and session.uses(part)):
                part.drop_whole()
        for bucket, before in self._before.items():
            owner = owner_of(bucket)
            owner.runtime.let_go(bucket, before, forget=kind is not None or bool(lost))
            if bucket.partitioned:  # of the others what was written elsewhere is still to be taken over
                owner.writes.note(bucket)
        self._before.clear()
        if lost:
            raise RuntimeError(
                f"{', '.join(lost[:5])} was written to inside GatheredParameters, and the change would be lost: name "
                "it among the parameters and pass modifier_rank, the rank whose values become everybody's."
            )

    def _lost(self) -> list[str]:
        """The parameters that were written to and will not be stored."""
        # Nothing is lost where nothing was written since the beginning, or since an inner context stored it.
        found = [
            part.name for part in self._parts
            if self._modifier is None and part.written and part.parameter._version != self._versions[id(part.parameter)]
        ]  # fmt: skip
        for bucket, slots in self._slots.items():
            noted, before = owner_of(bucket).runtime.held[bucket], self._bucket_versions[bucket]
            for slot, version in enumerate(bucket.parameters.versions()):
                stored = self._modifier is not None and slot in slots
                if version not in (noted[slot], before[slot]) and not stored:
                    found.append(bucket.spec.names[slot])
        return found

    def _wrote(self, bucket: Bucket, modifier: int) -> bool:
        """Whether the modifier wrote to the bucket so that autograd saw it. Collective."""
        world, before = bucket.routes.axes.world, self._seen[bucket]
        with torch._C.DisableTorchFunctionSubclass():
            mine = any(p._version != version for p, version in zip(bucket.spec.parameters, before, strict=True))
        flag = torch.tensor([float(mine)], device=bucket.device)
        world.broadcast(flag, modifier).wait()
        return bool(flag)

    @torch.no_grad()
    def _store(self, modifier: int) -> None:
        for part in self._parts:
            part.store(modifier)
        by_owner: dict[int, tuple[ShardedModel, dict[Bucket, dict[str, tuple[int, torch.Tensor]]]]] = {}
        for bucket, slots in self._slots.items():
            owner = owner_of(bucket)
            if not bucket.parameters.live:
                raise RuntimeError(
                    f"the parameters of {bucket.label} were partitioned again inside GatheredParameters, by a step or "
                    "a nested context: what was written to them is lost. Step outside of it."
                )
            values: dict[str, tuple[int, torch.Tensor]] = {}
            for slot in slots:
                view = bucket.parameters.flat_of(slot)
                if view.numel():
                    bucket.routes.axes.world.broadcast(view, modifier).wait()
                values[bucket.spec.names[slot]] = (0, view)
            by_owner.setdefault(id(owner), (owner, {}))[1][bucket] = values
            if self._wrote(bucket, modifier):
                owner.runtime.contexts.refuse_older()  # as torch does on the rank that wrote
            owner.runtime.note(bucket)
        for owner, changes in by_owner.values():
            write_values(owner.optimizer if owner.trainable else None, changes, keep_equal=True)


def owner_of(bucket: Bucket) -> ShardedModel:
    """The model that a bucket belongs to."""
    owner = bucket.owner() if bucket.owner is not None else None
    if owner is None:
        raise RuntimeError(f"the optimizer of the parameters of {bucket.label} does not exist any more.")
    return owner
