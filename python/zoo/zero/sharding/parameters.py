"""The parameters of one bucket: whole while they are used, this rank's shard in its tier in between.

Legend: see ``buckets.py``.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import Handle
from zoo.io import Future
from zoo.zero.collectives.routes import Packed, Packer, advance
from zoo.zero.init.parts import fill_from
from zoo.zero.offload.errors import OffloadError
from zoo.zero.offload.tiers import Tier
from zoo.zero.sharding.guard import Guard, assign_data

if TYPE_CHECKING:
    from zoo.zero.sharding.buckets import Bucket

_VERSION: Any = attrgetter("_version")


class BucketParameters:
    """The buffers of a bucket's parameters on this rank.

    Attributes:
        full: (P,) parameters; the model's are views of it. Where the bucket is partitioned its storage is empty between
            ``release`` and ``gather``.
        shard: (n,) this rank's parameters; a view of ``full`` unless partitioned, None while on NVMe or packed.
        packed: frozen parameters of this rank that are kept quantised; None while on NVMe.
        secondary: (P / ranks of a secondary group,) hpZ: a part of what forward gathered, for backward.
        live: ``full`` holds valid parameters.
        coming: a gather is under way.
        hidden: the model's parameters are refused to everybody.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._routes = bucket.routes
        self._route = self._routes.gather
        self._label = f"parameters of {bucket.label}"
        self.live, self.coming, self.hidden = True, False, False
        self.secondary: torch.Tensor | None = None
        self.packed: Packed | None = None
        self._aliases: dict[int, torch.Tensor] = {}  # by slot: what was made of `parameter.data`
        self._handle: Handle | None = None
        self._reading: tuple[Future, torch.Tensor] | None = None
        self._lay_out()

    def _lay_out(self) -> None:
        bucket, spec = self.bucket, self.bucket.spec
        self.full = torch.zeros(bucket.layout.size, dtype=spec.dtype, device=bucket.device)
        self._storage = self.full.untyped_storage()
        self._guard = Guard(
            bucket, self._storage, f"a parameter of {bucket.label} (or a view of one) was touched while it is "
            "partitioned (ZeRO stage 3): only inside its unit's forward and backward is it whole.",
        )  # fmt: skip
        views = bucket.views(self.full)
        for slot, (name, parameter, view) in enumerate(zip(spec.names, spec.parameters, views, strict=True)):
            fill_from(view, parameter)
            parameter.data = view
            parameter.grad = None
            self._guard.adopt(parameter, name, slot)
        self._routes.axes.world.broadcast(self.full).wait()
        low, high = bucket.own_range()
        self.shard: torch.Tensor | None = self.full[low:high]
        if bucket.partitioned:
            self.set_shard(self.full[low:high])
            self.release()

    # Whole -----------------------------------------------------------------------------------------------------------

    def gather(self, *, exact: bool = False) -> None:
        """Start gathering the parameters, if they are neither here nor on their way; ``exact``: see :meth:`wait`."""
        if self.live or self.coming:
            return
        if self.bucket.meeting is not None and not exact:
            self.bucket.meeting.gather(self.bucket)
        else:
            self.gather_now(exact=exact)

    def give(self) -> None:
        """Take part in a gather of which this rank needs nothing: it has the parameters."""
        shard = self.own_shard()
        spare = self.bucket.memory.empty(self.full.numel(), self.full.dtype, self.full.device)
        self._routes.gather.start(spare, shard, self._label).wait()

    def gather_now(self, *, exact: bool = False) -> None:
        """Start gathering, on all ranks."""
        self._route = self._routes.exact if exact else self._routes.gather
        self._guard.open()
        self.bucket.memory.fill(self._storage, self.bucket.num_bytes)
        if self.secondary is not None and self._routes.secondary is not None and not (exact and self.rounds):
            self._handle = self._routes.secondary.start(self.full, self.secondary, self._label)
        elif self.packed is not None:
            self._handle = self.packed.to(self.full.device, non_blocking=True).start(self.full, self._label)
        elif self.shard is not None and self.shard.device == self.full.device:
            self._handle = self._route.start(self.full, self.shard, self._label)
        else:
            self._gather_from_tier()
        self.coming = True

    def _gather_from_tier(self) -> None:
        low, high = self.bucket.own_range()
        own = self.full[low:high]
        if self.shard is not None:
            own.copy_(self.shard, non_blocking=True)
            self._handle = self._route.start(self.full, own, self._label)
            return
        # What comes from NVMe is exchanged later: all ranks do that in the same order.
        into = own if self._routes.pack is None else own.view(torch.uint8)[: self.bucket.shard_bytes()]
        if own.device.type != "cpu":
            into = self.bucket.scratch.pool.empty(into.numel(), dtype=into.dtype)
        try:
            self._reading = (self.begin_read(into, urgent=True), into)
        except OffloadError:
            self._drop_full()
            raise

    @property
    def rounds(self) -> bool:
        """What is gathered is not exactly what the ranks keep."""
        return self._routes.exact is not self._routes.gather

    def wait(self, *, exact: bool = False) -> None:
        """Gather if needed, and wait until the parameters are whole.

        ``exact``: as the ranks keep them, also where gathering rounds; but what a running forward uses stays.
        """
        if exact and self.rounds and not self.bucket.active and self._route is not self._routes.exact:
            self.release()
        if not self.live:
            if not self.coming:
                self.gather(exact=exact)
            self.finish_gather()
        if self.hidden:
            self.hidden = False
            self._guard.show()

    def hide(self) -> None:
        """Refuse the parameters to everybody until the next ``wait``; their memory stays."""
        if not self.hidden:
            self._guard.hide()
            self.hidden = True

    def advance(self) -> None:
        """A gather that has two stages, and has been under way for a while, goes on to the second."""
        if self._reading is not None:
            self._exchange()
        else:
            advance(self._handle)

    def _exchange(self) -> None:
        """What was read from NVMe goes to all ranks."""
        if self._reading is None:
            return
        (future, read), self._reading = self._reading, None
        try:
            self.bucket.shelf.finish(future)
        except OffloadError:
            self.coming = False
            self._drop_full()  # nothing of it is valid
            raise
        if self._routes.pack is not None:
            # It may lie in the memory that is gathered into: that is written when what was sent has arrived.
            self._handle = self._routes.pack.over(read).to(self.full.device).start(self.full, self._label)
            return
        low, high = self.bucket.own_range()
        own = self.full[low:high]
        if read.device != own.device:
            own.copy_(read)
        self._handle = self._route.start(self.full, own, self._label)

    def finish_gather(self) -> None:
        """Wait for a gather that is under way."""
        if self._reading is not None:
            self._exchange()
        handle, self._handle, self.coming = self._handle, None, False
        if handle is not None:
            handle.wait()
        self.live = True

    def release(self, *, again: bool = False) -> None:
        """Free the gathered parameters; this rank keeps its shard.

        ``again``: a backward will gather them once more; with hpZ this rank keeps a part of them until then.
        """
        if not self.bucket.partitioned:
            return
        if self.coming:
            self.finish_gather()
        if self.live:
            kept = self.bucket.placements.secondary
            group = kept.split if kept is not None else None
            if again and group is not None and self.secondary is None:
                low, high = self.bucket.layout.shard_range(group.rank, group.size)
                self.secondary = self.full[low:high].clone()
            self._drop_full()

    def drop_secondary(self) -> None:
        """Forget what was kept for backward: it is over, or an update made it stale."""
        self.secondary = None

    def _drop_full(self) -> None:
        self._storage.resize_(0)
        self._guard.close()
        self.live = False
        self.hide()

    def publish(self) -> Handle | None:
        """After an update of this rank's shard: bring it to everyone who keeps the parameters whole."""
        if self.bucket.partitioned:
            self.release()
            return None
        if not self.bucket.placements.states.is_split:
            return None
        return self.bucket.shard_group.all_gather(self.full, self.own_shard(), label=self._label)

    # This rank's shard -----------------------------------------------------------------------------------------------

    def own_shard(self) -> torch.Tensor:
        """(n,) this rank's parameters: the live ones, or a copy where they are on NVMe or packed."""
        if self.shard is not None:
            return self.shard
        if self.packed is not None:
            return self.packed.values(self.full.dtype)
        low, high = self.bucket.own_range()
        return self.full[low:high] if self.full.is_meta else self.load(0, high - low)

    def set_shard(self, values: torch.Tensor) -> None:
        """Keep (n,) ``values`` as this rank's parameters, in the tier where they live."""
        bucket = self.bucket
        if self.full.is_meta:
            self.shard = None if bucket.parameters_on_nvme else values
        elif not bucket.partitioned:
            self.own_shard().copy_(values)
        elif self._routes.pack is not None:
            raw = self._in_its_tier(self._routes.pack(values).raw)
            self.packed, self.shard = self._routes.pack.over(raw) if raw is not None else None, None
        else:
            kept = self._in_its_tier(values)
            self.shard = values.clone() if kept is values else kept

    def _in_its_tier(self, kept: torch.Tensor) -> torch.Tensor | None:
        """What this rank keeps, where it lives: None on NVMe, the same tensor if it is there already."""
        bucket = self.bucket
        tier = bucket.placements.parameters.tier
        if not bucket.parameters_on_nvme and (tier is not Tier.HOST or bucket.device.type == "cpu"):
            return kept
        host = bucket.scratch.pool.empty(kept.numel(), dtype=kept.dtype).copy_(kept)
        if not bucket.parameters_on_nvme:
            return host
        bucket.shelf.finish(self.begin_write(host))
        return None

    def load(self, start: int, length: int) -> torch.Tensor:
        """Elements [start, start + length) of the shard, from NVMe or of what is packed."""
        if self.packed is not None:
            return self.packed.values(self.full.dtype)[start : start + length]
        if self._routes.pack is not None:
            return self._load_packed(self._routes.pack, start, length)
        copy = self.bucket.scratch.pool.empty(length, dtype=self.full.dtype)
        self.bucket.shelf.finish(self.begin_read(copy, start, urgent=True))
        return copy

    def _load_packed(self, pack: Packer, start: int, length: int) -> torch.Tensor:
        low, high = self.bucket.own_range()
        first, ranges = pack.parts(high - low, start, start + length)
        raw = self.bucket.scratch.pool.empty(sum(end - begin for begin, end in ranges), dtype=torch.uint8)
        pieces = raw.split_with_sizes([end - begin for begin, end in ranges])
        reads = [self.begin_read(p, begin, urgent=True) for p, (begin, _) in zip(pieces, ranges, strict=True)]
        for read in reads:
            self.bucket.shelf.finish(read)
        return pack.over(raw).values(self.full.dtype)[start - first :][:length]

    def begin_read(self, into: torch.Tensor, start: int = 0, *, urgent: bool = False) -> Future:
        """Begin reading from NVMe what this rank keeps, from element ``start`` (of what is packed: byte) on.

        ``urgent``: to compute with it.
        """
        return self.bucket.shelf.read(self.bucket.index, into, start * into.itemsize, urgent=urgent)

    def begin_write(self, values: torch.Tensor, start: int = 0) -> Future:
        """Begin writing to NVMe what this rank keeps, from element ``start`` (of what is packed: byte) on.

        The next forward may wait for it.
        """
        return self.bucket.shelf.write(self.bucket.index, values, start * values.itemsize, urgent=True)

    def flat_of(self, slot: int) -> torch.Tensor:
        """(numel,) one parameter's part of ``full``, behind the version counter of the runtime."""
        offset = self.bucket.layout.offsets[slot]
        return self.full[offset : offset + self.bucket.layout.tensors[slot].numel]

    def versions(self) -> list[int]:
        """How often each parameter was written to in place, by anybody but the runtime."""
        with torch._C.DisableTorchFunctionSubclass():
            found = list(map(_VERSION, self.bucket.spec.parameters))
        for slot, alias in self._aliases.items():
            found[slot] += alias._version
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
        return self._aliases.setdefault(slot, made).detach()

    def chunk(self, index: int) -> torch.Tensor | None:
        """(n,) the parameters of chunk ``index``: only this rank's own where they are partitioned, None on NVMe."""
        group = self.bucket.shard_group
        if index == group.rank:
            return self.shard
        low, high = self.bucket.layout.shard_range(index, group.size)
        return self.full[low:high]

    def memory_bytes(self) -> int:
        """Bytes of parameters on this rank now."""
        kept = [self.shard, self.packed, self.secondary] if self.bucket.partitioned else []
        return self._storage.nbytes() + sum(t.nbytes for t in kept if t is not None)
