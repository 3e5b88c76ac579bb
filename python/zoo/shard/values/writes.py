"""Values that the user writes into parameters, and how they come to be everywhere that the parameters live.

A parameter's value is in up to four places: the whole copy, this rank's shard in its tier, and the fp32 value that the
optimizer updates, in its tier. Writing to one alone would be undone by the next gather or the next step
(:func:`write_values`).

Where parameters are whole (stages 0 to 2, small ones at stage 3) a write lands in the flat buffer that the model
computes with; an fp32 master of it would undo it in the next step, so the master takes it over first
(:meth:`Writes.take`). A write to what is gathered only for the moment would be lost, and is an error. Both are found by
the parameters' version counters, which the runtime itself touches in updates only (:meth:`Writes.updated`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from zoo.comm import Communicator
from zoo.shard.buckets import Bucket
from zoo.shard.offload.tiers import Tier
from zoo.shard.roles import ORIGINAL, PARAMETER, RoleBuffer

if TYPE_CHECKING:
    from zoo.shard.runtime.hooks import Runtime


class Writes:
    """What was written to a model since the last look, and since the latest update.

    To ``GatheredParameters`` it is what holds the model's buckets (:class:`~zoo.shard.values.gathered.Holder`).
    """

    def __init__(self, buckets: Iterable[Bucket], runtime: Runtime) -> None:
        self._runtime = runtime
        self._noted = {bucket: bucket.parameters.versions() for bucket in buckets}
        self._whole: set[tuple[Bucket, int]] = set()
        self._given: dict[tuple[Bucket, int], torch.Tensor] = {}
        self.held: dict[Bucket, list[int]] = {}
        """Buckets that the user keeps whole, and the versions of their parameters."""
        self._holds: Counter[Bucket] = Counter()

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

    def updated(self, buckets: Iterable[Bucket]) -> None:
        """The parameters of these buckets have been updated, in place as far as autograd is concerned.

        A graph that has saved one of them is refused by torch then, as after a step of any optimizer.
        """
        self._whole.clear()
        self._given.clear()
        for bucket in buckets:
            if not bucket.partitioned:  # there is no memory of those that a graph could have saved
                increment_version(bucket.spec.parameters)
                for notes in (self._noted, self.held):
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

    # New values ------------------------------------------------------------------------------------------------------

    def change(self, bucket: Bucket, slot: int, value: torch.Tensor, *, keep_equal: bool = False) -> None:
        """Give one parameter a whole new value of its own shape; every rank gives the same.

        ``keep_equal``: masters that round to the value stay.
        """
        bucket.check_writable()
        self._runtime.updated()  # torch would go back through the memory that the parameter had before
        write_values({bucket: {bucket.spec.names[slot]: (0, value.detach().reshape(-1))}}, keep_equal=keep_equal)
        self.wrote(bucket, slot, value)

    def hold(self, bucket: Bucket, *, writes: bool) -> tuple[bool, bool]:
        """See :class:`~zoo.shard.values.gathered.Holder`; what is held is exact in any case."""
        if writes:
            bucket.check_writable()
        parameters = bucket.parameters
        stays = parameters.live and (bucket.active > 0 or not parameters.rounds)
        before = (stays, parameters.refused)
        self._runtime.executor.wait(bucket, exact=True)
        bucket.active += 1
        self._holds[bucket] += 1
        if self._holds[bucket] == 1:
            if bucket.partitioned:
                parameters.watch()
            self.held[bucket] = parameters.versions()
        return before

    def let_go(self, bucket: Bucket, held: tuple[bool, bool], *, forget: bool) -> None:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        was_live, was_hidden = held
        bucket.active = max(bucket.active - 1, 0)  # an abandoned pass has set it to zero
        self._holds[bucket] -= 1
        if not self._holds[bucket]:
            del self._holds[bucket], self.held[bucket]
        if not bucket.active:  # else a forward uses it
            if forget or not was_live:
                self._runtime.residency.forget(bucket)
            elif was_hidden:
                self._runtime.executor.hide(bucket)
        if bucket.partitioned:  # of the others what was written elsewhere is still to be taken over
            self.note(bucket)

    def check_not_held(self) -> None:
        """Before the model is given back. Raises RuntimeError where some of it is held."""
        if self.held:
            named = ", ".join(bucket.label for bucket in list(self.held)[:3])
            raise RuntimeError(
                f"close() inside of GatheredParameters (of {named}), whose modifier_rank has not told the others yet "
                "what it wrote: it comes after it."
            )

    def failed_anywhere(self, error: BaseException | None) -> str:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        recovery = self._runtime.recovery
        return recovery.agree_on(error, next(iter(self._noted)).device) if recovery is not None else ""

    def noted(self, bucket: Bucket) -> list[int]:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        return self.held[bucket]

    def publish(
        self, slots: Mapping[Bucket, Sequence[int]], rank: int, seen: Mapping[Bucket, Sequence[int]]
    ) -> None:  # fmt: skip
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        changes, wrote = take_from(rank, slots, seen)
        if wrote:
            self._runtime.contexts.refuse_older()  # as torch does on the rank that wrote
        for bucket, chosen in slots.items():
            self.held[bucket] = bucket.parameters.versions()
            self.published(bucket, chosen)
        write_values(changes, keep_equal=True)

    # Between ranks, and before a step --------------------------------------------------------------------------------

    def settle(self, comm: Communicator) -> bool:
        """Where ranks have not noticed the same writes: whether all of them have the same values nevertheless, as after
        one has written and sent them to the others by a collective, of which autograd knows nothing. Then all of them
        have written. Collective.
        """
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


Values = Mapping[str, tuple[int, torch.Tensor]]
"""By the name of a parameter: new values of its elements [start, start + len) in its row-major order."""


def overlaps(values: Values, pieces: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Where the values lie in what ``pieces`` (:class:`zoo.layout.Slice`) describe: (offset, values)."""
    for piece in pieces:
        if piece.name not in values:
            continue
        first, given = values[piece.name]
        low, high = max(first, piece.start), min(first + given.numel(), piece.start + piece.length)
        if low < high:
            yield piece.offset + low - piece.start, given[low - first : high - first]


@torch.no_grad()
def write_values(changes: Mapping[Bucket, Values], *, keep_equal: bool) -> None:
    """Give parameters new values, on this rank: in every role that has them.

    Args:
        changes: for each bucket the values by name. Whole parameters must be given where copies are whole.
        keep_equal: an exact value stays where it rounds to the value given: what nobody changed keeps its precision.
    """
    for bucket in changes:  # before anything changes
        bucket.check_writable()
    kept = [bucket for bucket in changes if bucket.spec.trainable and bucket.states is not None]
    states = kept[0].states if kept else None
    for bucket, values in changes.items():
        parameters = bucket.parameters
        parameters.secondary = None
        if parameters.live:
            parameters.versions()  # others may have been written to
            for offset, part in overlaps(values, bucket.layout.slices(0, bucket.layout.size)):
                parameters.full[offset : offset + part.numel()].copy_(part)
            parameters.written()
        for name, role in bucket.roles.items():
            if name == ORIGINAL or (name == PARAMETER and bucket.partitioned):
                _write(bucket, role, values, keep_equal=keep_equal and name == ORIGINAL)
    if states is None:
        return
    follow = states.that_follow

    def change(piece: Any, roles: dict[str, torch.Tensor]) -> None:
        value = roles[PARAMETER]
        for offset, part in overlaps(changes[piece.bucket], piece.slices()):
            place = slice(offset, offset + part.numel())
            _overwrite(value[place], part, piece.bucket, keep_equal=keep_equal)
            for name in roles.keys() & follow:
                roles[name][place].copy_(value[place])

    states.edit(kept, change, precise=not keep_equal)


def _write(bucket: Bucket, role: RoleBuffer, values: Values, *, keep_equal: bool) -> None:
    found = list(overlaps(values, bucket.layout.slices(role.first, role.first + role.numel)))
    if found:
        with role.borrow() as kept:
            for offset, part in found:
                _overwrite(kept[offset : offset + part.numel()], part, bucket, keep_equal=keep_equal)


def _overwrite(old: torch.Tensor, value: torch.Tensor, bucket: Bucket, *, keep_equal: bool) -> None:
    new = value.to(old.device, old.dtype)
    if keep_equal:
        rounded = old.to(bucket.spec.dtype).to(old.dtype)
        new = torch.where(rounded == new, old, new)
    old.copy_(new)


def take_from(
    rank: int, slots: Mapping[Bucket, Sequence[int]], seen: Mapping[Bucket, Sequence[int]]
) -> tuple[dict[Bucket, Values], bool]:
    """Bring the values that ``rank`` has of parameters to everybody, in the whole copies; and give them back, with
    whether it has written to any of these buckets so that autograd saw it. Collective.

    ``seen``: the versions of a bucket's parameters before, as autograd counts them.

    Raises:
        RuntimeError: a whole copy is gone.
    """
    changes, wrote = dict[Bucket, Values](), False
    for bucket in slots:  # before anything changes
        bucket.check_writable()
    for bucket, chosen in slots.items():
        if not bucket.parameters.live:
            raise RuntimeError(
                f"the parameters of {bucket.label} were partitioned again inside GatheredParameters, by a step or "
                "a nested context: what was written to them is lost. Step outside of it."
            )
        found = {}
        for slot in chosen:
            view = bucket.parameters.flat_of(slot)
            if view.numel():
                bucket.routes.axes.world.broadcast(view, rank).wait()
            found[bucket.spec.names[slot]] = (0, view)
        changes[bucket] = found
        wrote = _wrote(bucket, rank, seen[bucket]) or wrote
    return changes, wrote


def _wrote(bucket: Bucket, rank: int, seen: Sequence[int]) -> bool:
    """Whether ``rank`` wrote to the bucket so that autograd saw it. Collective."""
    with torch._C.DisableTorchFunctionSubclass():
        mine = any(p._version != version for p, version in zip(bucket.spec.parameters, seen, strict=True))
    flag = torch.tensor([float(mine)], device=bucket.device)
    bucket.routes.axes.world.broadcast(flag, rank).wait()
    return bool(flag)
