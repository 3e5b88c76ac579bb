"""The parameters of one bucket: whole while they are used, this rank's shard in its tier in between.

They are *sharded*; *unsharding*, while a gather is under way; *hidden*, where they are whole and the model's are
refused to everybody; and *shown*, while somebody uses them. Legend: see ``buckets.py``.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import Handle
from zoo.layout import FlatLayout
from zoo.shard.gathering import Gathering
from zoo.shard.guard import Guard, assign_data, raw_data
from zoo.shard.guard import release as release_parameter
from zoo.shard.offload.tiers import OffloadError
from zoo.shard.roles import ORIGINAL, PARAMETER, RoleBuffer

if TYPE_CHECKING:
    from zoo.shard.buckets import Bucket


_VERSION: Any = attrgetter("_version")
_USE_COUNT: Any = torch.Tensor._use_count  # which a parameter's own class refuses


class Presence(enum.Enum):
    """What of a bucket's parameters is on this rank now."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    HIDDEN = "hidden"
    SHOWN = "shown"


_SHARDED, _UNSHARDING, _HIDDEN, _SHOWN = Presence


class BucketParameters:
    """The buffers of a bucket's parameters on this rank.

    Attributes:
        presence: what is here; ``full`` holds valid parameters where they are hidden or shown.
        full: (P,) parameters; the model's are views of it. Its storage is empty while they are sharded.
        shard: this rank's parameters where they are partitioned, wherever and however it keeps them; a view of ``full``
            elsewhere.
        secondary: (P / ranks of a secondary group,) hpZ: a part of what forward gathered, for backward; None when that
            is over, or an update made it stale.
        aliases: by slot what was made of ``parameter.data``, where that counts.
        saved: where backward asked for the latest time, what was whole could still be read (:meth:`is_saved`).
        samples: of their values, for writes that nothing counts; None where they are not watched.
    """

    def __init__(self, bucket: Bucket, source: RoleBuffer | None = None) -> None:
        self.bucket = bucket
        self._route = bucket.routes.gather
        self.presence = _SHOWN
        self.saved = False
        self.secondary: torch.Tensor | None = None
        self.aliases: dict[int, torch.Tensor] = {}
        self._gathering: Gathering | None = None
        self.samples: Samples | None = None
        self._lay_out(source)

    def _lay_out(self, source: RoleBuffer | None) -> None:
        bucket, spec = self.bucket, self.bucket.spec
        self.full = torch.zeros(bucket.layout.size, dtype=spec.dtype, device=bucket.device)
        self._storage = self.full.untyped_storage()
        self._guard = Guard(bucket, self._storage)
        # Values are brought together in the dtype in which they came, and rounded then.
        came = self.full if spec.original is spec.dtype else torch.zeros_like(self.full, dtype=spec.original)
        try:
            self._fill(came, source)
        except BaseException:
            if source is None:
                leave_ordinary(bucket, bucket.views(came))
            raise

    def _fill(self, came: torch.Tensor, source: RoleBuffer | None) -> None:
        bucket, spec = self.bucket, self.bucket.spec
        members = zip(spec.names, spec.parameters, bucket.views(self.full), bucket.views(came), strict=True)
        for slot, (name, parameter, view, before) in enumerate(members):
            if source is None:
                fill_from(before, parameter)
            parameter.data = view
            parameter.grad = None
            self._guard.adopt(parameter, name, slot)
        if source is None:
            self.bucket.routes.axes.world.broadcast(came).wait()
        if came is not self.full:
            self._round(came)
        low, high = bucket.own_range if bucket.partitioned else bucket.kept_range
        self.shard = bucket.new_shard() if bucket.partitioned else RoleBuffer.within(self.full[low:high], low)
        bucket.roles[PARAMETER] = self.shard
        if source is not None:
            self.shard.take(source)
            self.free()
        elif bucket.partitioned:
            self.shard.set(self.full[low:high])
            self.free()

    def _round(self, came: torch.Tensor) -> None:
        self.full.copy_(came)
        if self.bucket.spec.keeps_originals:
            low, high = self.bucket.kept_range
            self.bucket.roles[ORIGINAL] = self.bucket.new_originals()
            self.bucket.roles[ORIGINAL].set(came[low:high])

    # Whole -----------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """They are whole, hidden or shown."""
        return self.presence is _SHOWN or self.presence is _HIDDEN

    @property
    def refused(self) -> bool:
        """The model's parameters are refused to everybody."""
        return self.presence is not _SHOWN

    def _cannot(self, what: str, expected: Presence) -> AssertionError:
        return AssertionError(f"{what} of {self.bucket.label}: they are {self.presence.value}, not {expected.value}.")

    def give(self) -> None:
        """Take part in a gather of which this rank needs nothing: it has the parameters."""
        shard, device = self.shard, self.full.device
        spare = self.bucket.memory.empty(self.full.numel(), self.full.dtype, device)
        if shard.pack is not None:
            shard.pack.over(shard.stored()).to(device).start(spare, self.bucket.label_of_gathers).wait()
        else:
            self.bucket.routes.gather.start(spare, shard.read().to(device), self.bucket.label_of_gathers).wait()

    def start(self, *, exact: bool = False) -> None:
        """Start gathering what is sharded, on all ranks."""
        if self.presence is not _SHARDED:
            raise self._cannot("a gather of the parameters", _SHARDED)
        routes = self.bucket.routes
        self._route = routes.exact if exact else routes.gather
        self._guard.open()
        self.bucket.memory.fill(self._storage, self.bucket.num_bytes)
        near = self.secondary if routes.secondary is not None and not (exact and self.rounds) else None
        route = routes.secondary if near is not None and routes.secondary is not None else self._route
        bucket = self.bucket
        try:
            self._gathering = Gathering(
                self.shard, self.full, bucket.own_range, route=route, secondary=near, label=bucket.label_of_gathers
            )
        except OffloadError:
            self._lose()
            raise
        self.presence = _UNSHARDING

    def _lose(self) -> None:
        """What NVMe does not give leaves nothing that is valid."""
        self._gathering = None
        self.free()

    @property
    def rounds(self) -> bool:
        """What is gathered is not exactly what the ranks keep."""
        return self.bucket.routes.exact is not self.bucket.routes.gather

    @property
    def is_exact(self) -> bool:
        """What is gathered, if anything is, is what the ranks keep."""
        return self._route is self.bucket.routes.exact or not self.rounds

    def show(self) -> None:
        """Let everybody use hidden parameters."""
        if self.presence is not _HIDDEN:
            raise self._cannot("showing the parameters", _HIDDEN)
        self._guard.show()
        self.presence = _SHOWN

    def share_class(self) -> None:
        """See :meth:`zoo.shard.guard.Guard.share`."""
        if self.bucket.parameter_class is None:
            self._guard.share(self.bucket.spec.parameters)

    def hold(self, held: bool) -> None:
        """See :meth:`zoo.shard.guard.Guard.hold`."""
        self._guard.hold(held)

    def hide(self) -> None:
        """Refuse the parameters to everybody until the next ``wait``; their memory stays."""
        if self.presence is _SHOWN:
            self._guard.hide()
            self.presence = _HIDDEN

    def advance(self) -> None:
        """See :meth:`Gathering.advance`."""
        if self._gathering is not None:
            try:
                self._gathering.advance()
            except OffloadError:
                self._lose()
                raise

    def finish(self) -> None:
        """Wait for the gather that is under way."""
        if self.presence is not _UNSHARDING:
            raise self._cannot("waiting for a gather of the parameters", _UNSHARDING)
        gathering, self._gathering, self.presence = self._gathering, None, _SHARDED  # unless it ends well
        if gathering is not None:
            try:
                gathering.finish()
            except OffloadError:
                self._lose()
                raise
        self.presence = _HIDDEN

    def keep_part(self) -> None:
        """Keep a part of whole parameters for backward, where there is a secondary group (hpZ)."""
        kept = self.bucket.placements.secondary
        group = kept.split if kept is not None else None
        if group is not None and self.secondary is None:
            low, high = self.bucket.layout.shard_range(group.rank, group.size)
            self.secondary = self.full[low:high].clone()

    def free(self) -> None:
        """Free whole parameters that are partitioned."""
        try:
            self._storage.resize_(0)
        except RuntimeError:
            if self._storage.resizable():
                raise
            self.renew()  # NumPy has had it, and may have it still
            self._storage.resize_(0)
        self._guard.close()
        if self.samples is not None:
            self.samples.forget()
        if self.presence is _SHOWN:
            self._guard.hide()
        self.presence = _SHARDED

    def drop(self) -> None:
        """Keep nothing: neither whole nor this rank's shard."""
        if self.bucket.partitioned:
            self.bucket.executor.reshard(self.bucket)
        for role in self.bucket.roles.values():
            role.drop()

    @torch.no_grad()
    def renew(self) -> None:
        """Give the parameters of a partitioned bucket other memory with the same values; whoever has tensors of the old
        one keeps that."""
        before, self.full = self.full, torch.empty_like(self.full)
        self.full.copy_(before)
        self._storage = self.full.untyped_storage()
        self._guard.moved(self._storage)
        self.aliases.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, view in zip(self.bucket.spec.parameters, self.bucket.views(self.full), strict=True):
                assign_data(parameter, view)

    def taken(self) -> int:
        """How much has this memory, apart from what ``parameter.data`` is remembered by: more than before, and somebody
        has taken a tensor of it."""
        return self.shared_by() - len(self.aliases)

    def shared_by(self) -> int:
        """How many tensors and storages of Python there are with the memory of ``full``."""
        return int(torch._C._storage_Use_Count(self._storage._cdata)) + sys.getrefcount(self._storage)

    def is_saved(self) -> bool:
        """Whether there are tensors of the memory of ``full`` besides the runtime's and the model's, or autograd has
        saved one of the model's: then somebody may read it. ``saved`` is the answer."""
        parameters = self.bucket.spec.parameters
        count = int(torch._C._storage_Use_Count(self._storage._cdata)) - len(self.aliases)
        self.saved = count > len(parameters) + 2
        if not self.saved:
            nodes = accumulators(parameters)  # each has its parameter, and so has Python
            with torch._C.DisableTorchFunctionSubclass():
                self.saved = any(_USE_COUNT(p) > 1 + p.requires_grad for p in parameters)
            del nodes
        return self.saved

    def publish(self) -> Handle:
        """After an update of this rank's shard: bring it to everyone who keeps the parameters whole."""
        low, high = self.bucket.own_range
        return self.bucket.shard_group.all_gather(self.full, self.full[low:high], label=self.bucket.label_of_gathers)

    # One parameter, one chunk -----------------------------------------------------------------------------------------

    def flat_of(self, slot: int) -> torch.Tensor:
        """(numel,) one parameter's part of ``full``, behind the version counter of the runtime."""
        offset = self.bucket.layout.offsets[slot]
        return self.full[offset : offset + self.bucket.layout.tensors[slot].numel]

    def watch(self) -> None:
        """From now on :meth:`versions` counts on a CPU what autograd does not (:class:`Samples`)."""
        if self.full.device.type == "cpu" and self.live:
            self.samples = self.samples or Samples(self.bucket.layout)
            self.samples.note(self.full)

    def written(self) -> None:
        """The runtime has written the values that are here now: no write to count."""
        if self.samples is not None and self.live:
            self.samples.note(self.full)

    def versions(self) -> list[int]:
        """How often each parameter was written to in place, by anybody but the runtime."""
        with torch._C.DisableTorchFunctionSubclass():
            found = list(map(_VERSION, self.bucket.spec.parameters))
        for slot, alias in self.aliases.items():
            found[slot] += alias._version
        if self.samples is not None:
            self.samples.look(self.full)
            for slot, count in self.samples.counts.items():
                found[slot] += count
        return found

    def take_back(self, slot: int) -> None:
        """If a parameter was given other memory (``set_``), bring its values to ``full``, and make it a view again."""
        parameter, own = self.bucket.spec.parameters[slot], self.flat_of(slot)
        with torch._C.DisableTorchFunctionSubclass():
            if parameter.data_ptr() != own.data_ptr() and own.numel():
                own.copy_(parameter.detach().reshape(-1))
                assign_data(parameter, own.view(self.bucket.layout.tensors[slot].shape))

    def alias(self, slot: int, made: torch.Tensor) -> torch.Tensor:
        """What ``parameter.data`` returns; ``made`` is it as torch makes it."""
        return self.aliases.setdefault(slot, made).detach()

    def chunk(self, index: int) -> torch.Tensor | None:
        """(n,) the parameters of chunk ``index``, this rank's own where they are partitioned; None on NVMe."""
        if self.bucket.partitioned:
            return self.shard.values
        low, high = self.bucket.layout.shard_range(index, self.bucket.num_chunks)
        return self.full[low:high]

    def memory_bytes(self) -> int:
        """Bytes of parameters on this rank now."""
        kept = self.shard.nbytes if self.bucket.partitioned else 0
        besides = sum(t.nbytes for t in (self.secondary, self.bucket.roles.get(ORIGINAL)) if t is not None)
        return self._storage.nbytes() + kept + besides


class _LeadTo(torch.autograd.Function):
    """A graph of one node that leads to all of its inputs."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nobody goes back through this.")


def accumulators(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """The autograd nodes that add to the gradients of those of ``parameters`` that require one."""
    with torch.enable_grad():
        led = _LeadTo.apply(*parameters)
    # torch 2.11 tells what a node leads to only while there is a tensor that came from it.
    return [node for node, _ in led.grad_fn.next_functions if node is not None] if led.grad_fn is not None else []


def fill_from(view: torch.Tensor, parameter: Any) -> None:
    """Copy a parameter's value to ``view``; one that is partitioned already is gathered, and ordinary afterwards."""
    bucket: Bucket | None = getattr(parameter, "_zoo_bucket", None)
    if bucket is None:
        view.copy_(parameter.data)
        return
    bucket.executor.wait(bucket, exact=True)
    view.copy_(bucket.parameters.flat_of(parameter._zoo_slot).view(parameter.shape))
    release_parameter(parameter)
    bucket.end()


def leave_ordinary(bucket: Bucket, came: Sequence[torch.Tensor] | None = None) -> None:
    """Making ``bucket`` has failed: its parameters are ordinary ones again, where no other rank is needed for that.

    ``came``: their values, where these are not in their memory yet.
    """
    spec, exact = bucket.spec, bucket.roles.get(ORIGINAL)
    if came is None and bucket.shard_group.size == 1:
        bucket.executor.wait(bucket, exact=True)
        if exact is not None and exact.kept:
            came = bucket.views(exact.read())
    for slot, parameter in enumerate(list(spec.parameters)):
        if getattr(parameter, "_zoo_bucket", None) is bucket:
            value = raw_data(parameter) if came is None else came[slot]
            if value.untyped_storage().nbytes() or not value.numel():
                release_parameter(parameter)
                parameter.data = value.to(bucket.device, spec.original, copy=True)


SAMPLES = 4
"""Neighbours in the middle of each tensor: one cache line, which is what a look costs."""


class Samples:
    """Finds writes that autograd does not count: by NumPy, through DLPack, by a collective of the user's own.

    A few elements of each tensor in one flat buffer are remembered, and compared when somebody asks. So a tensor that
    was written as a whole is found at the price of a few reads; a write to elements between the samples is not.

    Args:
        layout: where the tensors lie.

    Attributes:
        counts: by tensor, how often a change was found; nothing where none was.
    """

    def __init__(self, layout: FlatLayout) -> None:
        places: list[int] = []
        slots: list[int] = []
        for slot, (offset, tensor) in enumerate(zip(layout.offsets, layout.tensors, strict=True)):
            taken = min(SAMPLES, tensor.numel)
            first = offset + (tensor.numel - taken) // 2
            places += range(first, first + taken)
            slots += [slot] * taken
        self._places, self._slots = torch.tensor(places, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
        self._known: torch.Tensor | None = None
        self.counts: dict[int, int] = {}

    def note(self, flat: torch.Tensor) -> None:
        """What ``flat`` (CPU) has now is known."""
        self._known = self._of(flat)

    def forget(self) -> None:
        """There is no buffer any more; nothing counts until the next :meth:`note`."""
        self._known = None

    def look(self, flat: torch.Tensor) -> None:
        """Count what has changed since it was known; it is known then."""
        if self._known is None:
            return
        now = self._of(flat)
        if torch.equal(now, self._known):
            return
        changed = (now != self._known).view(len(self._places), -1).any(dim=1)
        for slot in set(self._slots[changed].tolist()):
            self.counts[slot] = self.counts.get(slot, 0) + 1
        self._known = now

    def _of(self, flat: torch.Tensor) -> torch.Tensor:
        """(samples * bytes of an element) uint8: a NaN is equal to itself."""
        return flat.detach().index_select(0, self._places).view(torch.uint8)
