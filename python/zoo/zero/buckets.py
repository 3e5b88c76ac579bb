"""Buckets: parameters that share one flat buffer and travel in one collective.

Legend: p ranks of a shard group (all N ranks unless options say otherwise, see ``axes.py``), P elements of a bucket's
flat buffer (padding included), n = P / p the length of a shard.

A bucket's layout does not depend on the ZeRO stage, so that every stage sums and updates the same chunks in the same
order and all stages compute the same bits. What the stage decides is the :class:`Placement`: which of a bucket's
buffers exist whole on every rank and which only as the rank's shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from zoo.comm import Handle
from zoo.io import Future
from zoo.zero.bucketing import BucketSpec, Placement, layout_of
from zoo.zero.guard import (
    CAN_REFUSE_STORAGE,
    Guard,
    PartitionedAccessError,
    allow_storage,
    has_raw_grad,
    raw_grad,
    refuse_storage,
)
from zoo.zero.init.parts import fill_from
from zoo.zero.offload.errors import OffloadError
from zoo.zero.offload.gradients import GradientPark
from zoo.zero.offload.plan import Tier, Tiers
from zoo.zero.offload.scratch import Scratch, Shelf
from zoo.zero.routes import Hop, Packed, Routes

if TYPE_CHECKING:
    from zoo.zero.optimizer import ZeroOptimizer


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Where a bucket's shards live when they are not on the device.

    ``shelf`` has the parameters on NVMe, ``park`` the reduced gradients; a bucket's region in both is its index.
    """

    tiers: Tiers = field(default_factory=Tiers)
    scratch: Scratch | None = None
    shelf: Shelf | None = None
    park: GradientPark | None = None
    keep_norms: bool = False  # of gradients, before they go


class Bucket:
    """The buffers of one bucket on this rank.

    Attributes:
        full: (P,) parameters. At stage 3, unless resident, its storage is empty between ``gather`` and ``release``.
        shard: (n,) this rank's parameters; a view of ``full`` unless partitioned, None while on NVMe or packed.
        packed: frozen parameters of this rank that are kept quantised.
        secondary: (P / ranks of a secondary group,) hpZ: a part of what forward gathered, for backward.
        grads: (P,) gradients as autograd accumulates them; the parameters' ``.grad`` are views of it.
        grad_shard: (n,) mean over ranks of this rank's chunk of the gradient, once reduced.
        updates_off_device: parameters are on another device than the CPU, their optimizer states are not.
        on_refused: called with the name of a refused parameter that was touched; True if it is whole now.
        owner: the optimizer it belongs to.
        live: ``full`` holds valid parameters.
        pending: number of recorded forwards that still have to come back to this bucket in backward.
        active: number of running forwards of units that use it.
    """

    def __init__(
        self, index: int, spec: BucketSpec, placement: Placement, routes: Routes, stores: Stores = Stores()
    ) -> None:
        self.index, self.spec, self.placement, self._routes = index, spec, placement, routes
        self._comm = routes.axes.shard
        self._stores, self.tiers = stores, stores.tiers
        self.layout = layout_of(spec, self._comm.size)
        device_type = spec.parameters[0].device.type
        self.updates_off_device = (
            stores.tiers.states is not Tier.DEVICE
            and (getattr(self._comm, "device_type", "cpu") if device_type == "meta" else device_type) != "cpu"
        )
        self.num_bytes = self.layout.size * spec.dtype.itemsize
        self.partitioned = placement.shard_parameters and not spec.resident
        self.label = ", ".join(repr(u) if u else "the model itself" for u in dict.fromkeys(spec.units))
        self._parameters_label = f"parameters of {self.label}"
        self.live, self.pending, self.active, self.tape_serial = True, 0, 0, -1
        self._hidden = False
        self._handle: Handle | None = None
        self.secondary: torch.Tensor | None = None
        self.packed: Packed | None = None
        self._route = routes.gather
        self._reading: tuple[Future, torch.Tensor] | None = None
        self.on_refused: Callable[[Bucket, str], bool] | None = None
        self.owner: weakref.ref[ZeroOptimizer] | None = None
        self._lay_out_parameters()
        if spec.trainable:
            self._lay_out_gradients()

    def _lay_out_parameters(self) -> None:
        spec = self.spec
        self.full = torch.zeros(self.layout.size, dtype=spec.dtype, device=spec.parameters[0].device)
        self._storage = self.full.untyped_storage()
        self._guard = Guard(
            self, self._storage, f"a parameter of {self.label} (or a view of one) was touched while it is partitioned "
            "(ZeRO stage 3): only inside its unit's forward and backward is it whole.",
        )  # fmt: skip
        views = self._views(self.full)
        for slot, (name, parameter, view) in enumerate(zip(spec.names, spec.parameters, views, strict=True)):
            fill_from(view, parameter)
            parameter.data = view
            parameter.grad = None
            self._guard.adopt(parameter, name, slot)
        self._routes.axes.world.broadcast(self.full).wait()
        low, high = self.own_range()
        self.shard: torch.Tensor | None = self.full[low:high]
        if self.partitioned:
            self.set_shard(self.full[low:high])
            self.release()

    def _lay_out_gradients(self) -> None:
        self.grads = torch.empty(self.layout.size, dtype=self.spec.dtype, device=self.full.device)
        # The same memory behind a version counter of its own: `grads._version` then counts only what autograd (or the
        # user) does to the gradients, and a gradient that arrives after the reduction shows as a change of it.
        self.grads_raw = self.grads.data
        self._grad_storage = self.grads.untyped_storage()
        self._grad_views = self._views(self.grads)
        self.grad_shard: torch.Tensor | None = None
        self.grad_norm: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None  # of a copy to the host
        self.reduced = False
        self._accumulating = self._launched = False
        self._version = 0
        self._attach_grads()
        self._free_grads()

    def _attach_grads(self) -> None:
        for parameter, view in zip(self.spec.parameters, self._grad_views, strict=True):
            raw_grad(parameter, view)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[offset : offset + tensor.numel].view(tensor.shape)
            for tensor, offset in zip(self.layout.tensors, self.layout.offsets, strict=True)
        ]

    # Parameters ------------------------------------------------------------------------------------------------------

    def gather(self, *, exact: bool = False) -> None:
        """Start gathering the parameters, if they are neither here nor on their way; ``exact``: see :meth:`wait`."""
        if self.live or self.coming:
            return
        self._route = self._routes.exact if exact else self._routes.gather
        self._guard.open()
        self._storage.resize_(self.num_bytes)
        if self.secondary is not None and self._routes.secondary is not None and not (exact and self.rounds):
            self._handle = self._routes.secondary.start(self.full, self.secondary, self._parameters_label)
            return
        if self.packed is not None:
            self._handle = self.packed.start(self.full, self._parameters_label)
            return
        if self.shard is not None and self.shard.device == self.full.device:
            self._handle = self._route.start(self.full, self.shard, self._parameters_label)
            return
        low, high = self.own_range()
        own = self.full[low:high]
        if self.shard is not None:
            own.copy_(self.shard, non_blocking=True)
            self._handle = self._route.start(self.full, own, self._parameters_label)
            return
        # What comes from NVMe is exchanged when somebody waits for it: all ranks do that in the same order.
        into = own if own.device.type == "cpu" else self.scratch.pool.empty(own.numel(), dtype=own.dtype)
        self._reading = (self.begin_parameters(into), into)

    @property
    def coming(self) -> bool:
        """A gather is under way."""
        return self._handle is not None or self._reading is not None

    @property
    def rounds(self) -> bool:
        """What is gathered is not exactly what the ranks keep."""
        return self._routes.exact is not self._routes.gather

    def wait(self, *, exact: bool = False) -> None:
        """Gather if needed, and wait until the parameters are whole.

        ``exact``: as the ranks keep them, also where gathering rounds; but what a running forward uses stays.
        """
        if exact and self.rounds and not self.active and self._route is not self._routes.exact:
            self.release()
        if not self.live:
            if not self.coming:
                self.gather(exact=exact)
            self._finish_gather()
        if self._hidden:
            self._hidden = False
            self._guard.show()

    def take_external(self, name: str) -> bool:
        """Parameter ``name`` was touched while it is refused: whether a running forward takes it."""
        return self.on_refused is not None and self.on_refused(self, name)

    def agree(self, what: str, value: str) -> None:
        """Raise on all ranks unless all of them pass the same."""
        self._comm.agree(what, value, self.full.device)

    @property
    def hidden(self) -> bool:
        """The parameters are refused."""
        return self._hidden

    def hide(self) -> None:
        """Refuse the parameters to everybody until the next ``wait``; their memory stays."""
        if not self._hidden:
            self._guard.hide()
            self._hidden = True

    def _finish_gather(self) -> None:
        if self._reading is not None:
            (future, read), self._reading = self._reading, None
            try:
                self.shelf.finish(future)
            except OffloadError:
                self._drop_full()  # nothing of it is valid
                raise
            low, high = self.own_range()
            own = self.full[low:high]
            if read.device != own.device:
                own.copy_(read)
            self._handle = self._route.start(self.full, own, self._parameters_label)
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
        self.live = True

    def release(self, *, again: bool = False) -> None:
        """Free the gathered parameters; this rank keeps its shard.

        ``again``: a backward will gather them once more; with hpZ this rank keeps a part of them until then.
        """
        if not self.partitioned:
            return
        if self.coming:
            self._finish_gather()
        if self.live:
            group = self._routes.axes.secondary
            if again and group is not None and self.secondary is None:
                low, high = self.layout.shard_range(group.rank, group.size)
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
        if self.partitioned:
            self.release()
            return None
        if not self.placement.shard_optimizer:
            return None
        return self._comm.all_gather(self.full, self.own_shard(), label=self._parameters_label)

    def own_shard(self) -> torch.Tensor:
        """(n,) this rank's parameters: the live ones, or a copy where they are on NVMe or packed."""
        if self.shard is not None:
            return self.shard
        if self.packed is not None:
            return self.packed.values(self.spec.dtype)
        low, high = self.own_range()
        return self.full[low:high] if self.full.is_meta else self.load_parameters(0, high - low)

    def load_parameters(self, start: int, length: int) -> torch.Tensor:
        """Elements [start, start + length) of the shard, from NVMe or of what is packed."""
        if self.packed is not None:
            return self.packed.values(self.spec.dtype)[start : start + length]
        copy = self.scratch.pool.empty(length, dtype=self.spec.dtype)
        self.shelf.finish(self.begin_parameters(copy, start))
        return copy

    def set_shard(self, values: torch.Tensor) -> None:
        """Keep (n,) ``values`` as this rank's parameters, in the tier where they live."""
        if self.full.is_meta:
            self.shard = None if self.parameters_on_nvme else values
        elif not self.partitioned:
            self.own_shard().copy_(values)
        elif self._routes.pack is not None:
            self.packed, self.shard = self._routes.pack(values), None
        elif self.parameters_on_nvme:
            host = self.scratch.pool.empty(values.numel(), dtype=values.dtype)
            host.copy_(values)
            self.shelf.finish(self.write_parameters(host))
            self.shard = None
        elif self.tiers.parameters is Tier.HOST and values.device.type != "cpu":
            self.shard = self.scratch.pool.empty(values.numel(), dtype=values.dtype).copy_(values)
        else:
            self.shard = values.clone()

    @property
    def parameters_on_nvme(self) -> bool:
        """This rank's parameters live on NVMe."""
        return self.partitioned and self.tiers.parameters is Tier.NVME

    @property
    def scratch(self) -> Scratch:
        """The buffers of offloaded state."""
        return _there(self._stores.scratch, self)

    @property
    def shelf(self) -> Shelf:
        """The file of parameters on NVMe."""
        return _there(self._stores.shelf, self)

    @property
    def park(self) -> GradientPark:
        """The file of reduced gradients on NVMe."""
        return _there(self._stores.park, self)

    def begin_parameters(self, into: torch.Tensor, start: int = 0) -> Future:
        """Begin reading elements [start, start + len) of the shard from NVMe."""
        return self.shelf.read(self.index, into, start * into.itemsize)

    def write_parameters(self, values: torch.Tensor, start: int = 0) -> Future:
        """Begin writing elements [start, start + len) of the shard to NVMe."""
        return self.shelf.write(self.index, values, start * values.itemsize)

    @property
    def num_chunks(self) -> int:
        """p: the layout is cut into one chunk for each rank of the shard group at every stage."""
        return self._comm.size

    def gather_hops(self, *, again: bool) -> list[Hop]:
        """The collectives of one gather of a partitioned bucket; ``again``: after a release in the same pass."""
        route = self._routes.pack or self._routes.gather
        if again and self._routes.secondary is not None:
            route = self._routes.secondary
        return route.hops(self.layout.size, self.spec.dtype.itemsize)

    def secondary_bytes(self) -> int:
        """Bytes that a release in forward leaves behind for backward."""
        group = self._routes.axes.secondary
        return self.num_bytes // group.size if group is not None and self.partitioned else 0

    def kept_bytes(self) -> int:
        """Bytes of parameters that stay in this rank's memory whatever runs."""
        numel = 0 if self.parameters_on_nvme else self.layout.size // self.num_chunks
        if not self.partitioned:
            return self.num_bytes
        return self._routes.pack.nbytes(numel) if self._routes.pack is not None else numel * self.spec.dtype.itemsize

    def reduce_hops(self, reduce_dtype: torch.dtype | None) -> list[Hop]:
        """The collectives of one backward and step for a trainable bucket, beside gathers."""
        itemsize = self.spec.dtype.itemsize
        hops = self._routes.reduce.hops(self.layout.size, reduce_dtype.itemsize if reduce_dtype else itemsize)
        if not self.partitioned:  # of the mean gradient at stage 0, of the new parameters at 1 and 2
            hops.append(Hop("all_gather", self._comm, self.num_bytes))
        return hops

    def own_range(self) -> tuple[int, int]:
        """[start, stop) of this rank's chunk in the flat buffer."""
        return self.layout.shard_range(self._comm.rank, self._comm.size)

    def owns(self, chunk: int) -> bool:
        """Whether checkpoints take this chunk from this rank."""
        return chunk == self._comm.rank and self._routes.axes.first_replica

    def updated_chunks(self) -> Sequence[int]:
        """The chunks this rank's optimizer updates."""
        return [self._comm.rank] if self.placement.shard_optimizer else range(self._comm.size)

    def chunk_parameters(self, index: int) -> torch.Tensor | None:
        """(n,) the parameters of chunk ``index``: only this rank's own where they are partitioned, None on NVMe."""
        if index == self._comm.rank:
            return self.shard
        low, high = self.layout.shard_range(index, self._comm.size)
        return self.full[low:high]

    def parameter_bytes(self) -> int:
        """Bytes of parameters on this rank now."""
        kept = [self.shard, self.packed, self.secondary] if self.partitioned else []
        return self._storage.nbytes() + sum(t.nbytes for t in kept if t is not None)

    def gradient_bytes(self) -> int:
        """Bytes of gradients on this rank now."""
        return self._grad_storage.nbytes() + (self.grad_shard.nbytes if self.grad_shard is not None else 0)

    # Gradients -------------------------------------------------------------------------------------------------------

    @property
    def _grads_here(self) -> bool:
        return self._grad_storage.nbytes() > 0

    def open_grads(self) -> None:
        """Make the flat gradient ready to be accumulated into; zero it if this starts a new sum."""
        if self._accumulating:
            return
        if self._launched:
            raise self._late()
        if not self._grads_here:
            allow_storage(self._grad_storage._cdata)
            self._grad_storage.resize_(self.num_bytes)
            if not CAN_REFUSE_STORAGE:
                self._attach_grads()
        elif self.reduced:
            # A further backward before the step: what is reduced already is kept aside and added to afterwards.
            low, high = self.own_range()
            self.grad_shard = self.grads_raw[low:high].clone()
        self.grads_raw.zero_()
        self._accumulating = True
        self._version = self.grads._version

    def start_reduce(self, reduce_dtype: torch.dtype | None) -> Callable[[], None]:
        """Issue the reduction of the flat gradient; the result is in place after calling what is returned.

        mean_r(g_r), added to what earlier backwards of the same step left. The flat gradient is freed afterwards when
        gradients are sharded.
        """
        self.open_grads()
        self._accumulating, self._launched = False, True
        self._version = self.grads._version
        low, high = self.own_range()
        chunk = self.grads_raw[low:high]
        sent = self.grads_raw if reduce_dtype is None else self.grads_raw.to(reduce_dtype)
        fresh = not self.reduced
        if reduce_dtype is not None and reduce_dtype != chunk.dtype:
            out = torch.empty(chunk.numel(), dtype=reduce_dtype, device=chunk.device)
        elif self.placement.shard_gradients and fresh:
            if self.grad_shard is None:
                self.grad_shard = self._new_grad_shard()
            out = self.grad_shard
        else:
            out = chunk
        handle = self._routes.reduce.start(sent, out, f"gradients of {self.label}")
        self.reduced = True
        return lambda: self._finish_reduce(handle, out, chunk, fresh)

    def _finish_reduce(self, handle: Handle, out: torch.Tensor, chunk: torch.Tensor, fresh: bool) -> None:
        handle.wait()
        self.check_late()
        if self.placement.shard_gradients:
            if not fresh:
                self.grad_shard = self._grad_shard_here().add_(out)
            elif self.grad_shard is None:
                self.grad_shard = self._new_grad_shard().copy_(out)
            elif out is not self.grad_shard:
                self.grad_shard.copy_(out)
            self._free_grads()
            self._put_away()
            return
        if out is not chunk:
            chunk.copy_(out)
        if not fresh and self.grad_shard is not None:
            chunk.add_(self.grad_shard)
        self.grad_shard = None
        if not self.placement.shard_optimizer:
            self._comm.all_gather(self.grads_raw, chunk).wait()

    # A reduced gradient may go to NVMe; `grad_shard` is None then.

    def _new_grad_shard(self) -> torch.Tensor:
        numel = self.layout.size // self._comm.size
        if self.parks and self.full.device.type == "cpu":
            return self.park.empty(numel, self.spec.dtype)
        return torch.empty(numel, dtype=self.spec.dtype, device=self.full.device)

    @property
    def parks(self) -> bool:
        """Reduced gradients go to NVMe."""
        return self._stores.park is not None and self.tiers.states is Tier.NVME and self.placement.shard_gradients

    @property
    def parked_gradient(self) -> bool:
        """There is a reduced gradient, and it is on NVMe."""
        return self.parks and self.reduced and self.grad_shard is None

    def _put_away(self) -> None:
        if self.grad_shard is None or not (self.parks or self._streams_gradients):
            return
        self.grad_norm = norm_of(self.grad_shard) if self._stores.keep_norms else None
        host = self.grad_shard
        if host.device.type != "cpu":
            host = self.scratch.pool.empty(host.numel(), dtype=host.dtype).copy_(host, non_blocking=not self.parks)
        if self.parks:
            self.park.put(self.index, host)
            self.grad_shard = None
        else:
            self.grad_shard = host
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    @property
    def _streams_gradients(self) -> bool:
        return self.updates_off_device and self.placement.shard_gradients and self.full.device.type == "cuda"

    def _grad_shard_here(self) -> torch.Tensor:
        """The reduced gradient on the device."""
        return self._grad_shard_kept().to(self.full.device)

    def _grad_shard_kept(self) -> torch.Tensor:
        """The reduced gradient where the update takes it."""
        if self.grad_shard is None:
            return self.park.get(self.index, self.layout.size // self._comm.size, self.spec.dtype)
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self.grad_shard

    def begin_gradient(self, into: torch.Tensor, start: int) -> Future:
        """Begin reading elements [start, start + len) of the reduced gradient from NVMe."""
        return self.park.begin(self.index, into, start)

    def reduced_norm(self, index: int) -> torch.Tensor:
        """‖·‖ of the reduced gradient of chunk ``index``, fp64."""
        if self.grad_norm is not None:
            return self.grad_norm
        return norm_of(self.reduced_chunk(index))

    def scale_reduced(self, index: int, factor: float) -> None:
        """Multiply the reduced gradient of chunk ``index``."""
        parked, self.grad_norm = self.parked_gradient, None
        chunk = self.reduced_chunk(index).mul_(factor)
        if parked:
            self.grad_shard = chunk
            self._put_away()

    def set_reduced(self, index: int, start: int, values: torch.Tensor) -> None:
        """Put ``values`` in the place of elements [start, start + len) of the reduced gradient of chunk ``index``."""
        parked, self.grad_norm = self.parked_gradient, None
        chunk = self.reduced_chunk(index)
        chunk[start : start + values.numel()].copy_(values)
        if parked:
            self.grad_shard = chunk
            self._put_away()

    def check_late(self) -> None:
        """Raise if a gradient arrived after the reduction had begun: it would be lost."""
        if self._launched and self.grads._version != self._version:
            raise self._late()

    def _late(self) -> PartitionedAccessError:
        return PartitionedAccessError(
            f"a gradient of {self.label} arrived after it had been reduced: one of its parameters was used before its "
            "unit's forward, so its gradient comes last in backward. Say so with register_external_parameter(module, "
            "parameter), or pass overlap_comm=False, which reduces at the end of backward."
        )

    def settle(self) -> None:
        """The backward that reduced this bucket is over."""
        self.check_late()
        self._launched = False
        freed = self.num_bytes > 0 and not self._grads_here
        if freed and not CAN_REFUSE_STORAGE and any(map(has_raw_grad, self.spec.parameters)):
            raise self._late()

    def _free_grads(self) -> None:
        if not CAN_REFUSE_STORAGE:
            # Autograd must not write into freed memory: without a gradient to add to it makes one; `settle` finds it.
            for parameter in self.spec.parameters:
                raw_grad(parameter, None)
        self._grad_storage.resize_(0)
        refuse_storage(
            self._grad_storage._cdata,
            f"a gradient of {self.label} arrived after it had been reduced (a parameter was used before its unit's "
            "forward: overlap_comm=False mends it), or without its unit's output leading to the loss in a way that the "
            "optimizer could see, or it was touched outside of backward while it is partitioned (ZeRO stages 2 and 3).",
        )

    def drop_grads(self) -> None:
        """Forget the gradient: the next backward starts a new sum."""
        self.reduced = self._accumulating = self._launched = False
        self.grad_norm = None
        if self.placement.shard_gradients:
            if self.parks:
                self.park.forget(self.index)
            if self._streams_gradients:
                self.grad_shard = None
            if self._grads_here:
                self._free_grads()
        else:
            self.grad_shard = None

    def reduced_chunk(self, index: int) -> torch.Tensor:
        """(n,) the reduced gradient of chunk ``index``; only this rank's own where gradients or states are sharded."""
        if self.placement.shard_gradients:
            if (self.grad_shard is None and not self.parked_gradient) or index != self._comm.rank:
                raise AssertionError(f"rank {self._comm.rank}: no reduced gradient of chunk {index} of {self.label}.")
            return self._grad_shard_kept()
        low, high = self.layout.shard_range(index, self._comm.size)
        return self.grads_raw[low:high]

    def visible_grad(self, slot: int) -> torch.Tensor | None:
        """What ``parameter.grad`` shows: this rank's gradient before the reduction, the mean after it at stage 0."""
        if not self.spec.trainable:
            return None
        if self._accumulating:
            return self._grad_views[slot]
        if not self.reduced:
            return None
        if (self.placement.shard_optimizer and self._routes.axes.world.size > 1) or not self._grads_here:
            raise PartitionedAccessError(
                f"the gradient of {self.spec.names[slot]!r} is partitioned: this rank holds a shard of the mean. Use "
                "clip_norm= or optimizer.clip_grad_norm_() to clip, optimizer.grad_norm to watch it, "
                "optimizer.zero_grad() to drop it."
            )
        return self._grad_views[slot]

    def assign_grad(self, slot: int, value: torch.Tensor | None) -> None:
        """What ``parameter.grad = value`` does: None empties the gradient of this parameter, a tensor replaces it."""
        tensor, offset = self.layout.tensors[slot], self.layout.offsets[slot]
        if not self.spec.trainable:
            if value is not None:
                raise ValueError(
                    f"{tensor.name!r} was frozen when the optimizer was constructed; it takes no gradient."
                )
            return
        if value is None:
            if self._grads_here and (self._accumulating or self.reduced):
                self.grads_raw[offset : offset + tensor.numel].zero_()
            if (self.grad_shard is not None or self.parked_gradient) and self.reduced:
                low, _ = self.own_range()
                start, stop = max(offset - low, 0), max(offset + tensor.numel - low, 0)
                self.grad_shard = self._grad_shard_here()
                self.grad_shard[start:stop].zero_()
                self._put_away()
            return
        if self.placement.shard_gradients or self.reduced:
            raise PartitionedAccessError(f"the gradient of {tensor.name!r} is partitioned; it cannot be assigned.")
        self.open_grads()
        self._grad_views[slot].copy_(value)


def norm_of(chunk: torch.Tensor) -> torch.Tensor:
    """‖chunk‖, fp64; 16-bit gradients are squared and added in fp32, because their squares overflow fp16."""
    norm: torch.Tensor = torch.linalg.vector_norm(chunk, dtype=torch.promote_types(chunk.dtype, torch.float32))
    return norm.double()


_T = TypeVar("_T")


def _there(value: _T | None, bucket: Bucket) -> _T:
    if value is None:
        raise AssertionError(f"the bucket of {bucket.label} has nothing offloaded.")
    return value
