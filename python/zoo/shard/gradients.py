"""The gradients of one trainable bucket: accumulated flat, reduced to a mean, kept where the update takes them.

Between two steps a bucket's gradient is *idle*; *accumulating*, while backwards add to the flat buffer; and *launched*,
while its reduction and the rest of that backward run; then it is idle again, and ``reduced``. A gradient that arrives
while it is not accumulating would be lost, and is an error. Legend: see ``buckets.py``.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import Handle, advance
from zoo.parts.hooks import own_hook
from zoo.shard.guard import grad_dtype, has_raw_grad, raw_grad
from zoo.shard.memory import CAN_REFUSE_STORAGE, allow_storage, refuse_storage
from zoo.shard.partitioned import PartitionedAccessError, PartitionedGradient, WholeGradient, late, stray
from zoo.shard.roles import GRADIENT, power_of

if TYPE_CHECKING:
    from zoo.shard.buckets import Bucket


class GradientPhase(enum.Enum):
    """What may happen to a flat gradient now."""

    IDLE = "idle"
    ACCUMULATING = "accumulating"
    LAUNCHED = "launched"


_IDLE, _ACCUMULATING, _LAUNCHED = GradientPhase


class BucketGradients:
    """The buffers of a bucket's gradients on this rank.

    Attributes:
        dtype: in which gradients are added up and kept.
        flat: (P,) gradients as autograd accumulates them; the parameters' ``.grad`` are views of it. Where gradients
            are sharded its storage is empty from the reduction until the next backward.
        role: mean over ranks of this rank's chunk of the gradient, once reduced, where gradients are sharded.
        squares: Σ g² of a shard that has left the device, where that is kept.
        reduced: there is a reduced gradient.
        owed: what that is still to be multiplied by, before anybody reads it or adds to it: see :meth:`pay`.
        num_changes: how often it was reduced, and that of a parameter cleared, since it was dropped; the same on all
            ranks, unless some drop gradients that others step with.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.dtype = bucket.spec.gradient_dtype
        self.flat = torch.empty(bucket.layout.size, dtype=self.dtype, device=bucket.device)
        # The same memory behind a version counter of its own: `flat._version` then counts only what autograd (or the
        # user) does to the gradients, and a gradient that arrives after the reduction shows as a change of it.
        self._raw = self.flat.data
        self._storage = self.flat.untyped_storage()
        self._views = bucket.views(self.flat)
        self._split = bucket.placements.gradients.is_split
        self.role = bucket.roles[GRADIENT] = bucket.new_gradient()
        # What a reduction makes here: [start, stop).
        self._range = (0, bucket.layout.size) if bucket.routes.reduces_whole else bucket.own_range
        self._aside: torch.Tensor | None = None  # the sum of earlier backwards of the step, where it is not split
        self.squares: torch.Tensor | None = None
        self.reduced, self.num_changes = False, 0
        self.owed: float | torch.Tensor = 1.0
        self.phase = _IDLE
        self._cleared: set[int] = set()  # slots of which `grad` was set to None
        self._cleared_at = 0
        self._handle: Handle | None = None  # of the reduction that is under way
        self._version = 0
        self._unit = self._next_unit = 1.0
        """The gradient is ``flat`` times this; of what is opened next."""
        self._arriving = self._resting = self._touched = self._seen = False
        for parameter in bucket.spec.parameters if self.dtype is not bucket.spec.dtype else ():
            grad_dtype(parameter, self.dtype)  # autograd converts what arrives, and then adds
        self._attach()
        self._free()
        self._waits = False  # for the first gradient that arrives: then it is opened
        self._arrivals = [] if bucket.memory.pools(bucket.num_gradient_bytes) else self._hook_arrivals()

    def _hook_arrivals(self) -> list[Any]:
        """Autograd adds up what several uses give before it adds that to the flat gradient: not both need memory."""
        own = weakref.ref(self)

        def arrives(_: torch.Tensor) -> None:
            gradients = own()
            if gradients is not None and gradients._waits:
                gradients.open()

        own_hook(arrives)
        return [p.register_hook(arrives) for p in self.bucket.spec.parameters]  # type: ignore[no-untyped-call]

    def unhook(self) -> None:
        """Its parameters are ordinary ones again."""
        while self._arrivals:
            self._arrivals.pop().remove()

    def expect(self) -> None:
        """Gradients are about to arrive: make it ready, or ready to be made so by the first of them."""
        if self._arrivals and not self._here and self.phase is _IDLE:
            self._waits = True
        else:
            self.open()

    def _attach(self) -> None:
        for parameter, view in zip(self.bucket.spec.parameters, self._views, strict=True):
            raw_grad(parameter, view)

    @property
    def _here(self) -> bool:
        return self._storage.nbytes() > 0

    def memory_bytes(self) -> int:
        """Bytes of gradients on this rank now."""
        aside = self._aside.nbytes if self._aside is not None else 0
        return self._storage.nbytes() + self.role.nbytes + aside

    # Accumulating and reducing ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the flat gradient ready to be accumulated into; zero it if this starts a new sum."""
        if self.phase is _ACCUMULATING:
            return
        if self.phase is _LAUNCHED:
            raise late(self.bucket.label)
        self._waits = False
        self.check_strays()
        self.pay()
        if not self._here:
            allow_storage(self._storage._cdata)
            # A split gradient is dropped when it is reduced, and not written to again.
            room = self.bucket.routes.room if self._split else None
            self.bucket.memory.fill(self._storage, self.bucket.num_gradient_bytes, room=room)
            if not CAN_REFUSE_STORAGE:
                self._attach()
        elif self.reduced:
            # A further backward before the step: what is reduced already is kept aside and added to afterwards.
            low, high = self._range
            self._aside = self._raw[low:high].clone()
        self._raw.zero_()
        if self._cleared:
            self._cleared.clear()
        self.phase, self._unit = _ACCUMULATING, self._next_unit
        self._version = self.flat._version

    def arrive_with(self, factor: float) -> None:
        """A backward begins of which each gradient is to be multiplied by ``factor``; what is there stays what it is.

        Raises:
            RuntimeError: see :meth:`check_strays`.
        """
        self._check_rest()
        if self._unit != factor and self.phase is _ACCUMULATING:
            self._raw.mul_(self._unit / factor)
            self._unit = factor
        self._next_unit, self._arriving = factor, True

    def rest(self) -> None:
        """That backward is over; others will add to what it left."""
        self._arriving = self._touched = self._waits = False
        if self._seen:  # somebody may have kept `p.grad`, a view of the flat gradient
            self._in_its_unit()
        if self.phase is _ACCUMULATING:
            self._version, self._resting = self.flat._version, True

    def _check_rest(self) -> None:
        """Raise RuntimeError if something was added between backwards which nobody could multiply."""
        if self._resting and self.phase is _ACCUMULATING:
            self._resting = False
            if self.flat._version != self._version and not self._touched:
                raise stray(self.bucket.label)

    def _in_its_unit(self) -> None:
        """Make the flat gradient what it stands for."""
        if self._unit != 1.0 and self.phase is _ACCUMULATING:
            self._raw.mul_(self._unit)
            self._unit = 1.0

    def add(self, slot: int, gradient: torch.Tensor) -> None:
        """What autograd does with the gradient of one parameter."""
        self.open()
        self._cleared.discard(slot)
        self._views[slot].add_(gradient.to(self.dtype))

    def start_reduce(self, reduce_dtype: torch.dtype | None) -> Callable[[], None]:
        """Issue the reduction of the flat gradient; the result is in place after calling what is returned.

        mean_r(g_r), added to what earlier backwards of the same step left, in the dtype of the gradients. The flat
        gradient is freed afterwards when gradients are sharded.
        """
        bucket = self.bucket
        self._check_rest()
        if self.phase is not _ACCUMULATING:
            self.open()
        if self._unit != 1.0:
            self._in_its_unit()
        self.phase = _LAUNCHED
        self._version = self.flat._version
        low, high = self._range
        chunk = self._raw[low:high]
        sent = self._raw if reduce_dtype is None else self._raw.to(reduce_dtype)
        fresh = not self.reduced
        if bucket.routes.reduces_whole:
            out = sent
        elif reduce_dtype is not None and reduce_dtype != chunk.dtype:
            out = torch.empty(chunk.numel(), dtype=reduce_dtype, device=chunk.device)
        elif self._split and fresh:
            out = self._new_mean()
        else:
            out = chunk
        handle = self._handle = bucket.routes.reduce.start(sent, out, f"gradients of {bucket.label}")
        self.reduced = True
        self.num_changes += 1
        return lambda: self._finish_reduce(handle, out, chunk, fresh)

    def advance(self) -> None:
        """A reduction that has two stages, and has been under way for a while, goes on to the second."""
        advance(self._handle)

    def _finish_reduce(self, handle: Handle, out: torch.Tensor, chunk: torch.Tensor, fresh: bool) -> None:
        handle.wait()
        self._handle = None
        self._check_late()
        if self._split:
            mean = out
            if not fresh:
                # Rounded first, as every stage does: torch adds values of other dtypes in the wider one.
                mean = self.role.read().to(self.bucket.device).add_(out.to(self.dtype))
            elif out.dtype is not self.dtype or self.bucket.routes.reduces_whole:
                mean = self._new_mean().copy_(out)
            self._free()
            self._keep(mean)
            return
        if out is not chunk and out is not self._raw:
            chunk.copy_(out)
        if not fresh and self._aside is not None:
            chunk.add_(self._aside)
        self._aside = None
        if not self.bucket.placements.states.is_split and not self.bucket.routes.reduces_whole:
            self.bucket.shard_group.all_gather(self._raw, chunk).wait()

    def consume(self) -> None:
        """The update has taken it, before its backward is over: a gradient that comes now is late."""
        self.reduced, self.num_changes, self.owed = False, 0, 1.0
        if self._split:
            self.role.drop()

    def settle(self) -> None:
        """The backward that reduced this bucket is over."""
        self._check_late()
        if self.phase is _LAUNCHED:
            self.phase = _IDLE
        if not CAN_REFUSE_STORAGE and self._has_strays():
            self._forget_strays()
            raise late(self.bucket.label)

    def _has_strays(self) -> bool:
        """Where nothing refuses to be written to: autograd has made a gradient beside the flat one, which is freed."""
        if self._here or not self.bucket.num_bytes:
            return False
        return any(map(has_raw_grad, self.bucket.spec.parameters))

    def _forget_strays(self) -> None:
        if not CAN_REFUSE_STORAGE and not self._here:
            for parameter in self.bucket.spec.parameters:
                raw_grad(parameter, None)

    def ground(self) -> None:
        """Wait for a reduction that is under way; its result is not used."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def drop(self) -> None:
        """Forget the gradient: the next backward starts a new sum."""
        if self._handle is not None:
            self.ground()  # it reads and writes the memory that is freed here
        if self.bucket.routes.feedback is not None:
            self.bucket.routes.feedback.roll_back()
        self.reduced, self.num_changes, self.phase, self.owed = False, 0, _IDLE, 1.0
        self._arriving = self._resting = self._seen = self._waits = False
        if self._cleared:
            self._cleared.clear()
        self.squares = None
        self._version = self.flat._version
        self._aside = None
        if self._split:
            self.role.drop()
            if self._here:
                self._free()
            self._forget_strays()

    def _free(self) -> None:
        if not CAN_REFUSE_STORAGE:
            # Autograd must not write into freed memory: without a gradient to add to it makes one, a stray.
            for parameter in self.bucket.spec.parameters:
                raw_grad(parameter, None)
        self._storage.resize_(0)
        refuse_storage(
            self._storage._cdata,
            f"a gradient of {self.bucket.label} arrived after it had been reduced (a parameter was used before its "
            "unit's forward: overlap_comm=False fixes it), or before (layers were tied, or parameters moved to others, "
            "after construction: do it before), or without its unit's output leading to the loss in a way that the "
            "optimizer could see (a transform of torch.func, as vmap or grad, hides it), or it was touched outside of "
            "backward while it is partitioned (ZeRO stages 2 and 3).",
        )

    def _check_late(self) -> None:
        """Raise if a gradient arrived after the reduction had begun: it would be lost."""
        if self.phase is _LAUNCHED and self.flat._version != self._version:
            raise late(self.bucket.label)

    def check_strays(self) -> None:
        """Raise RuntimeError if something was added while nothing could be.

        A backward that leads to no output of a unit is not seen by any hook of ours.
        """
        if self.phase is _IDLE and (
            self.flat._version != self._version or (not CAN_REFUSE_STORAGE and self._has_strays())
        ):
            self._version = self.flat._version
            self._forget_strays()
            raise stray(self.bucket.label)

    # The reduced gradient in its tier --------------------------------------------------------------------------------

    def _new_mean(self) -> torch.Tensor:
        """(n,) memory for it."""
        role = self.role
        if role.leaves_device and role.device.type == "cpu":  # on NVMe
            return role.buffer(role.numel, self.dtype)
        return self.bucket.memory.empty(role.numel, self.dtype, role.device)

    def _keep(self, mean: torch.Tensor) -> None:
        if self.role.leaves_device:
            self._note_squares(mean)
        self.role.put(mean)

    def _note_squares(self, mean: torch.Tensor) -> None:
        """Of a mean that leaves the device."""
        self.squares = power_of(mean) if self.bucket.keep_norms else None

    # The reduced gradient, chunk by chunk ----------------------------------------------------------------------------

    def reduced_chunk(self, index: int) -> torch.Tensor:
        """(n,) the reduced gradient of chunk ``index``; only this rank's own where gradients or states are sharded."""
        bucket = self.bucket
        if self._split:
            if not self.role.kept or index != bucket.shard_group.rank:
                raise AssertionError(f"no reduced gradient of chunk {index} of {bucket.label} is on this rank.")
            return self.role.read()
        low, high = bucket.layout.shard_range(index, bucket.num_chunks)
        return self._raw[low:high]

    def reduced_all(self) -> torch.Tensor:
        """(P,) the reduced gradient, where this rank has all of it."""
        return self.role.read() if self._split else self._raw

    def pay(self) -> None:
        """Multiply it by what is owed. An update need not write down what it clips by: most gradients are dropped."""
        owed, self.owed = self.owed, 1.0
        if self.reduced and not (isinstance(owed, float) and owed == 1.0):
            for chunk in self.bucket.updated_chunks:
                with self.edited(chunk) as mean:
                    if isinstance(owed, float):
                        mean.mul_(owed)
                    else:  # the bits that a number has, which torch never rounds to 16
                        mean.copy_(mean.to(torch.promote_types(mean.dtype, torch.float32)).mul_(owed))

    def paid(self) -> None:
        """Somebody has multiplied it by what was owed."""
        self.owed, self.squares = 1.0, None

    @contextlib.contextmanager
    def edited(self, index: int) -> Iterator[torch.Tensor]:
        """(n,) the reduced gradient of chunk ``index``, to be written to."""
        self.pay()
        if not self._split:
            yield self.reduced_chunk(index)
            return
        with self.role.borrow() as mean:
            yield mean
            if self.role.leaves_device:
                self._note_squares(mean)

    # What `parameter.grad` is ----------------------------------------------------------------------------------------

    def visible(self, slot: int) -> torch.Tensor | None:
        """What ``parameter.grad`` shows: this rank's gradient before the reduction, the mean after it at stage 0."""
        if self.phase is _ACCUMULATING:
            # After a reduction the view is only what came since: the sum is nowhere.
            if self.reduced:
                return PartitionedGradient.of(self, slot)
            self._look()
            return WholeGradient.of(self._views[slot], self.bucket, slot)
        if not self.reduced:
            return None
        self.pay()
        bucket = self.bucket
        if (bucket.placements.states.is_split and bucket.routes.axes.world.size > 1) or not self._here:
            return PartitionedGradient.of(self, slot)
        # Behind the other version counter: what the user does to a mean is no gradient that arrives.
        offset, tensor = bucket.layout.offsets[slot], bucket.layout.tensors[slot]
        return WholeGradient.of(self._raw[offset : offset + tensor.numel].view(tensor.shape), bucket, slot)

    def make_zero(self) -> None:
        """Where there is no gradient, be a zero one that is reduced."""
        if self.reduced:
            return
        if self._split:
            self._keep(self._new_mean().zero_())
        else:
            self._raw.zero_()
        self.reduced = True

    def clear(self, slot: int) -> None:
        """Make the gradient of one parameter zero."""
        bucket = self.bucket
        self.num_changes += self.reduced
        offset, numel = bucket.layout.offsets[slot], bucket.layout.tensors[slot].numel
        if self._here and (self.phase is _ACCUMULATING or self.reduced):
            self._raw[offset : offset + numel].zero_()
        low, _ = self._range
        start, stop = max(offset - low, 0), max(offset + numel - low, 0)
        if self._aside is not None:
            self._aside[start:stop].zero_()
        if self.role.kept and self.reduced:
            with self.edited(bucket.shard_group.rank) as mean:
                mean[start:stop].zero_()

    def _look(self) -> None:
        """The user sees the flat gradient, and may write to it.

        Raises:
            RuntimeError: it is in the middle of a backward whose gradients are multiplied at its end.
        """
        self._touched = self._seen = True
        if self._arriving and self._unit != 1.0:
            raise RuntimeError(
                f"a gradient of {self.bucket.label} was read inside of loss.backward() under an engine with "
                "accumulation, where it is not divided yet. Call engine.backward(loss), which divides first, or read "
                "it after the backward."
            )
        self._in_its_unit()

    def _check_assigned(self, slot: int, value: Any) -> None:
        """Raise ValueError for what no gradient of this parameter can be: it would be broadcast, or rounded."""
        spec, shape = self.bucket.spec, tuple(self.bucket.layout.tensors[slot].shape)
        given = (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else None
        if given in ((shape, self.dtype, self.bucket.device), (shape, spec.dtype, self.bucket.device)):
            return
        what = f"a {type(value).__name__}" if given is None else f"a tensor of {given[0]}, {given[1]}, on {given[2]}"
        dtypes = " or ".join(dict.fromkeys(map(str, (self.dtype, spec.dtype))))
        raise ValueError(
            f"the gradient of {self.bucket.called(slot)!r} was given {what}; it takes one of {shape}, {dtypes}, on "
            f"{self.bucket.device}, or None."
        )

    def assign(self, slot: int, value: torch.Tensor | None) -> None:
        """What ``parameter.grad = value`` does: None empties the gradient of this parameter, a tensor replaces it.

        Raises:
            ValueError: a tensor of another shape, dtype or device. PartitionedAccessError: the gradient is partitioned.
        """
        bucket = self.bucket
        if value is None:
            if self._cleared_at != self.flat._version:  # something arrived since
                self._cleared.clear()
                self._cleared_at = self.flat._version
            self._cleared.add(slot)
            if len(self._cleared) == len(bucket.layout.tensors):
                self.drop()
            else:
                self.clear(slot)
            return
        if isinstance(value, PartitionedGradient) and value.stands_for(self, slot):
            return
        self._check_assigned(slot, value)
        if self.reduced and not self._split and self.phase is _IDLE:
            whole = self.visible(slot)
            if whole is not None and not isinstance(whole, PartitionedGradient):
                whole.copy_(value)
                return
        if self.reduced or (self._split and self.phase is not _ACCUMULATING):  # while it adds up it is whole
            raise PartitionedAccessError(
                f"the gradient of {bucket.called(slot)!r} is partitioned; it cannot be assigned. Use "
                "zoo.zero.safe_set_full_grad, between backward and step."
            )
        self.open()
        self._look()
        self.bucket.note_gradient()
        self._cleared.discard(slot)
        self._views[slot].copy_(value)
        self._version = self.flat._version
