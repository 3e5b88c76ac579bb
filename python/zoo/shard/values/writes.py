"""Values that the user writes into parameters, in place or through ``.data``, where they also live elsewhere.

Where parameters are whole (stages 0 to 2, small ones at stage 3) a write lands in the flat buffer that the model
computes with; an fp32 master of it would undo it in the next step, so the master takes it over first
(:meth:`Writes.take`). A write to what is gathered only for the moment would be lost, and is an error. Both are found by
the parameters' version counters, which the runtime itself touches in updates only (:meth:`Writes.updated`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import increment_version

from zoo.comm import Communicator
from zoo.shard.buckets import Bucket
from zoo.shard.offload.tiers import Tier
from zoo.shard.roles import ORIGINAL


class Writes:
    """What was written since the last look, and since the latest update."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._noted = {bucket: bucket.parameters.versions() for bucket in buckets}
        self._whole: set[tuple[Bucket, int]] = set()
        self._given: dict[tuple[Bucket, int], torch.Tensor] = {}

    def watch(self) -> None:
        """See also what autograd does not count, on a CPU, where an exact value elsewhere would undo it; it is compared
        at each step, which waits for a device."""
        for bucket in self._noted:
            kept_elsewhere = bucket.spec.dtype.itemsize < 4 or bucket.placements.states.tier is not Tier.DEVICE
            if kept_elsewhere and bucket.spec.trainable and not bucket.partitioned:
                bucket.parameters.watch()

    def note(self, bucket: Bucket) -> None:
        """What was written to ``bucket`` until now is known."""
        self._noted[bucket] = bucket.parameters.versions()

    def updated(self, buckets: Iterable[Bucket], held: dict[Bucket, list[int]]) -> None:
        """The parameters of these buckets have been updated, in place as far as autograd is concerned.

        A graph that has saved one of them is refused by torch then, as after a step of any optimizer.

        Args:
            held: other notes of versions, which are to know of it too.
        """
        self._whole.clear()
        self._given.clear()
        for bucket in buckets:
            if not bucket.partitioned:  # there is no memory of those that a graph could have saved
                increment_version(bucket.spec.parameters)
                for notes in (self._noted, held):
                    if bucket in notes:
                        notes[bucket] = [version + 1 for version in notes[bucket]]

    def wrote(self, bucket: Bucket, slot: int, value: torch.Tensor | None = None) -> None:
        """A parameter has other values since the latest update: these, where it is not whole here.

        Of parts along other axes, and of what is frozen, ranks may have values of their own.
        """
        if not bucket.spec.trainable or bucket.spec.axes:
            return
        if not bucket.partitioned:
            self._whole.add((bucket, slot))
        elif value is not None:
            self._given[bucket, slot] = digest_of(value)

    def published(self, bucket: Bucket, slots: Iterable[int]) -> None:
        """All ranks have been given one rank's values of these parameters, whatever each of them had written before."""
        versions = bucket.parameters.versions()
        for slot in slots:
            self._given.pop((bucket, slot), None)
            if not bucket.partitioned:
                self._noted[bucket][slot] = versions[slot]
                self.wrote(bucket, slot)

    def settle(self, comm: Communicator) -> bool:
        """Where ranks have not noticed the same writes: whether all of them have the same values nevertheless, as after
        one has written and sent them to the others by a collective, of which autograd knows nothing. Then all of them
        have written. Collective.
        """
        from zoo.shard.values.editing import write_values

        mine = {(bucket.index, slot) for bucket, slot in self._whole}
        given = sorted((bucket.index, slot, int(value)) for (bucket, slot), value in self._given.items())
        theirs = comm.all_gather_object((mine, given))
        if any(other != given for _, other in theirs):
            return False
        buckets = {bucket.index: bucket for bucket in self._noted}
        written = sorted(set().union(*(slots for slots, _ in theirs)))
        values = [int(digest_of(buckets[index].parameters.flat_of(slot))) for index, slot in written]
        if any(other != values for other in comm.all_gather_object(values)):
            return False
        changes: dict[Bucket, dict[str, tuple[int, torch.Tensor]]] = {}
        for index, slot in written:
            if (index, slot) not in mine:
                bucket = buckets[index]
                self.wrote(bucket, slot)
                changes.setdefault(bucket, {})[bucket.spec.names[slot]] = (0, bucket.parameters.flat_of(slot))
        if changes:
            write_values(changes, keep_equal=True)
        return True

    def digest(self) -> float | torch.Tensor:
        """A number that is equal on ranks that have written the same since the latest update, in whatever order."""
        whole = [digest_of(bucket.parameters.flat_of(slot)) for bucket, slot in self._whole]
        found = [*whole, *self._given.values()]
        return torch.stack(found).sum().remainder(2**48).double() if found else 0.0

    def take(self) -> None:
        """Bring what was written to where it is kept. Every rank writes the same and calls this.

        Raises:
            RuntimeError: something was written to a parameter that was whole only for the moment, or while each rank
                had parameters of its own (then every step is refused until a state is loaded).
        """
        from zoo.shard.values.editing import write_values

        changes, lost = {}, []
        for bucket, noted in self._noted.items():
            now = bucket.parameters.versions()
            if now == noted:
                continue
            self._noted[bucket] = now
            changed = [slot for slot, (a, b) in enumerate(zip(noted, now, strict=True)) if a != b]
            if bucket.partitioned:
                lost += [bucket.called(slot) for slot in changed]
                continue
            for slot in changed:
                bucket.parameters.take_back(slot)
                self.wrote(bucket, slot)
            if bucket.spec.trainable or ORIGINAL in bucket.roles:
                changes[bucket] = {bucket.spec.names[s]: (0, bucket.parameters.flat_of(s)) for s in changed}
        for states in [bucket.states for bucket in changes if bucket.spec.trainable][:1]:
            if states is not None:
                states.refuse_writes("parameters were written to while each rank had its own")
        if changes:
            write_values(changes, keep_equal=True)
        if lost:
            raise RuntimeError(
                f"{', '.join(lost[:5])} was written to in place while it was gathered for its module, and the change "
                "is lost: only this rank's shard stays. Write inside `with GatheredParameters(parameter, "
                "modifier_rank=0):`, or assign a whole value: parameter.data = value."
            )


def digest_of(value: torch.Tensor) -> torch.Tensor:
    """() int64 below 2^48, of its bytes and their places. Waits for no device."""
    parts = value.detach().reshape(-1).contiguous().view(torch.uint8)
    if value.device.type == "cpu":
        from zoo.io import crc32c

        return torch.tensor(crc32c(parts) if parts.numel() else 0)
    places = torch.arange(1, 2 * parts.numel(), 2, device=parts.device)
    return (parts.long() * places).sum().remainder(2**48)
