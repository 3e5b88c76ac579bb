"""A parameter of which this rank keeps a part, before any optimizer: a bucket of its own, and how it is guarded.

The parameter object stays the one that the model was built with, and so do ties. It becomes an instance of
:class:`InitParameter`, has its shape and dtype and, while it is partitioned, a storage of zero bytes.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn

from zoo.shard.buckets import Bucket
from zoo.shard.call_stack import SAVES, nothing_of
from zoo.shard.guard import ShardedParameter, refuse, refuse_touched, sharded_in
from zoo.shard.guard import release as release_parameter
from zoo.shard.init.sharing import Sharing, current
from zoo.shard.offload.tiers import Tier
from zoo.shard.partitioned import ALLOWED_WHEN_PARTITIONED, CONVERSIONS, UNREAD, look_at
from zoo.shard.roles import RoleBuffer
from zoo.shard.runtime.executor import Executor

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_ALLOWED = ALLOWED_WHEN_PARTITIONED | {_GRAD.__get__}
SET_DATA: Any = _DATA.__set__


class InitParameter(ShardedParameter):
    """What a parameter is between ``Init`` and the optimizer; its bucket is a :class:`InitBucket`."""

    _zoo_adoptable = True  # the optimizer may take it
    _zoo_refusal = (
        ": zoo.zero.Init partitioned it, and only a part is on this rank. Inside the Init context initialisers may "
        "touch it; afterwards use `with zoo.zero.GatheredParameters(...)`, or construct the optimizer, which makes "
        "parameters whole when their modules run."
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reads metadata; everything else needs the whole value: the active Init brings it, else it is refused."""
        kwargs = kwargs or {}
        if func not in _ALLOWED:
            session = current()
            parts = parts_in((args, kwargs))
            closed = bool(parts) and not parts[0].whole
            if closed and session is None and (seen := look_at(func, args, kwargs)) is not UNREAD:
                return seen
            if func in CONVERSIONS and closed:
                return parts[0].converted(func, args[1:], kwargs)
            if func == SET_DATA and parts and parts[0].take_over(args[1]):
                return None
            held = bool(parts) and all(part.active and part.whole for part in parts)
            if session is not None and not (held and not any(map(session.uses, parts))):
                return session.run(func, args, kwargs, parts)
            if func == torch.Tensor.detach and sys._getframe(1).f_code is SAVES and closed:
                nothing = nothing_of(args[0])
                return nothing if nothing is not None else refuse_touched([args[0]], func)
            if not all(part.whole for part in parts):
                return refuse(cls, func, types, args, kwargs)
            if func == _DATA.__get__:  # what is written through it must show
                with torch._C.DisableTorchFunctionSubclass():
                    return parts[0].parameters.alias(0, func(*args))
            if func == SET_DATA and parts and parts[0].parameter is args[0]:
                parts[0].overwrite(args[1])
                return None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A partitioned parameter of its own with the same values; nothing is communicated."""
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = self._zoo_bucket.copy()
        return copy  # type: ignore[no-any-return]


def part_of(parameter: Any) -> InitBucket | None:
    """The bucket of a parameter that ``Init`` partitioned, else None."""
    return parameter._zoo_bucket if type(parameter) is InitParameter else None


def parts_in(value: Any) -> list[InitBucket]:
    """The buckets of all parameters in nested arguments that ``Init`` partitioned."""
    found = [part for part in map(part_of, sharded_in(value)) if part is not None]
    return list({id(part): part for part in found}.values())


class InitBucket(Bucket):
    """The bucket of one partitioned parameter.

    Args:
        dtype: in which it is kept.
        source: where this rank's elements are already; None: the values of rank 0 count, and it is collective.

    Attributes:
        aliased: something that shares the memory of the whole value was handed out; it may have been written to.
        version: of the parameter when it became whole, or when its value was stored.
        writers: number of ``GatheredParameters(modifier_rank=)`` that hold it.
        origin: the part from which it was converted.
    """

    parameter_class = InitParameter
    touched = (
        "{label} (or a view of it) was touched while zoo.zero.Init has partitioned it: only a part of it is on this "
        "rank."
    )

    def __init__(
        self, parameter: nn.Parameter, name: str, sharing: Sharing, dtype: torch.dtype, source: InitBucket | None = None
    ) -> None:
        self._sharing, self._parameter = sharing, weakref.ref(parameter)
        self.name, self.comm = name, sharing.comm
        self.origin: InitBucket | None = None
        self.aliased, self.version = False, -1
        self.writers = 0
        self._build(parameter, dtype, source, source.spec.group_size if source is not None else 0)
        # What is dropped while a model is built, as a weight that is tied, is freed at once.
        self._ends = weakref.finalize(parameter, self.end)
        self._ends.atexit = False

    def _build(self, parameter: nn.Parameter, dtype: torch.dtype, source: InitBucket | None, group_size: int) -> None:
        sharing = self._sharing
        spec = sharing.spec_of(parameter, self.name, dtype, group_size)
        super().__init__(
            0, spec, sharing.placements, sharing.routes_of(spec), sharing.memory, scratch=sharing.scratch,
            source=source.parameters.shard if source is not None else None, executor=Executor(),
        )  # fmt: skip
        self.owner = weakref.ref(sharing)
        self._alone = self.parameters.shared_by()

    def new_shard(self) -> RoleBuffer:
        """See :class:`~zoo.shard.buckets.Bucket`."""
        sharing, spec, (low, high) = self._sharing, self.spec, self.own_range
        tier = sharing.placements.parameters.tier if high > low else Tier.DEVICE
        region = 0
        if tier is Tier.NVME and sharing.store is not None:
            region = sharing.store.add((high - low) * spec.dtype.itemsize)
        scratch = None if tier is Tier.NVME else sharing.scratch  # a pool would be kept for one part at a time
        pack = sharing.packer_of(spec, frozen=not self.parameter.requires_grad)
        return RoleBuffer(
            high - low, spec.dtype, self.device, first=low, tier=tier, pack=pack, scratch=scratch, store=sharing.store,
            region=region,
        )  # fmt: skip

    def end(self) -> None:
        """See :class:`~zoo.shard.buckets.Bucket`."""
        self._ends.detach()
        super().end()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, which holds this part; whoever works on a part holds the parameter."""
        return self.spec.parameters[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter."""
        return self.spec.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the parameter."""
        return torch.Size(self.layout.tensors[0].shape)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    def rename(self, name: str) -> None:
        """The full name of the parameter, once the model is known."""
        self.name = self.spec.names[0] = self._called[0] = self.parameter._zoo_name = name  # type: ignore[attr-defined]
        self.label = repr(name)

    # Whole -----------------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """The value is here."""
        return self.parameters.live

    def make_whole(self, *, exact: bool = False) -> None:
        """Gather the value; ``exact``: as it is kept, also where what is gathered is rounded. Collective."""
        if self.whole and (self.parameters.is_exact or not exact):
            return
        self.executor.reshard(self)
        self.executor.wait(self, exact=exact)
        self.version, self.aliased = self._writes(), False

    def _writes(self) -> int:
        return self.parameters.versions()[0]

    @property
    def changed(self) -> bool:
        """The whole value was, or may have been, written to."""
        return self.whole and (self.aliased or self.written)

    @property
    def written(self) -> bool:
        """It was written to since it is whole; writes through a ``.data`` that an initialiser took do not show."""
        return self.whole and self._writes() != self.version

    def replace(self, value: torch.Tensor) -> None:
        """What ``parameter.data = value`` does: the value of rank 0, maybe of another dtype or device. Collective."""
        was_whole = self.whole
        self._rebuild(value.detach(), None)
        if was_whole:
            self.make_whole(exact=True)

    def _rebuild(self, data: torch.Tensor, source: InitBucket | None) -> None:
        """Other memory; views of what the value was before keep that, as in torch."""
        parameter, before, group_size = self.parameter, self.parameters.shard, self.spec.group_size
        release_parameter(parameter)
        parameter.data = data
        self._build(parameter, data.dtype, source, group_size)
        before.drop()

    def moved(self) -> bool:
        """Something gave the parameter other memory."""
        with torch._C.DisableTorchFunctionSubclass():
            now = self.parameter.untyped_storage()._cdata
            return now != self.parameters.full.untyped_storage()._cdata or self.parameter.shape != self.shape

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the memory of the whole value."""
        full = self.parameters.full
        if not self.whole or tensor.layout is not torch.strided or tensor.device != self.device:
            return False
        return bool(full.numel()) and tensor.untyped_storage()._cdata == full.untyped_storage()._cdata

    @property
    def viewed(self) -> bool:
        """Something that was handed out still shares the memory of the whole value."""
        return self.aliased and self.layout.size > 0 and self.parameters.shared_by() > self._alone

    def store(self, src: int) -> None:
        """Keep the part of rank ``src``'s whole value that is this rank's. Collective."""
        if not self.parameters.is_exact:
            raise AssertionError(f"rank {self.comm.rank}: {self.name} was rounded when it was gathered.")
        full = self.parameters.full
        if full.numel():
            self.comm.broadcast(full, src).wait()
        low, high = self.own_range
        self.parameters.shard.pack = self._sharing.packer_of(self.spec, frozen=not self.parameter.requires_grad)
        self.parameters.shard.set(full[low:high])
        self.version = self._writes()

    def pack(self) -> None:
        """Keep as int8 what was frozen after it was stored."""
        shard = self.parameters.shard
        pack = self._sharing.packer_of(self.spec, frozen=True)
        if pack is not None and shard.pack is None:
            values, shard.pack = shard.read(), pack
            shard.set(values)

    def drop_whole(self) -> None:
        """Free the whole value."""
        self.executor.reshard(self)
        self.parameters.aliases.clear()
        self.aliased = False

    # Copies ----------------------------------------------------------------------------------------------------------

    def converted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Parameter:
        """What ``parameter.to(...)`` returns: each rank converts its own elements."""
        kwargs = {k: v for k, v in kwargs.items() if k != "copy"}
        now = torch.empty(0, dtype=self.dtype, device=self.device)
        meant = func(now, *args, **kwargs)
        if (meant.dtype, meant.device) == (self.dtype, self.device):
            return self.parameter
        made = self._copy(meant.dtype, meant.device)
        made._zoo_bucket.origin = self  # type: ignore[attr-defined]
        return made

    def take_over(self, value: torch.Tensor) -> bool:
        """Do ``parameter.data = value`` if ``value`` is this parameter, or was converted from it."""
        other = part_of(value)
        if other is self:
            return True
        if other is None or other.origin is not self or self.whole:
            return False
        self._rebuild(_hollow(self.shape, other.dtype, other.device), other)
        return True

    @torch.no_grad()
    def overwrite(self, value: torch.Tensor) -> None:
        """Do ``parameter.data = value`` while the value is here: it stays where it is.

        Raises:
            ValueError: ``value`` has another shape, dtype or device.
        """
        mine, given = (tuple(self.shape), self.dtype, self.device), (tuple(value.shape), value.dtype, value.device)
        if mine != given:
            raise ValueError(
                f"{self.name!r} is of shape {mine[0]}, {mine[1]}, on {mine[2]}, and was given {given[0]}, {given[1]}, "
                f"on {given[2]}: zoo.zero.Init has partitioned it, and these stay."
            )
        with torch._C.DisableTorchFunctionSubclass():
            self.parameter.copy_(value)

    def copy(self) -> nn.Parameter:
        """See ``InitParameter.__deepcopy__``."""
        session = current()
        if self.whole and session is None:
            with torch._C.DisableTorchFunctionSubclass():
                return nn.Parameter(self.parameter.detach().clone(), self.parameter.requires_grad)
        if session is not None:
            session.settle()
        return self._copy(self.dtype, self.device)

    def _copy(self, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        made = nn.Parameter(_hollow(self.shape, dtype, device), self.parameter.requires_grad)
        InitBucket(made, f"copy of {self.name}", self._sharing, dtype, self)
        return made


def _hollow(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made
