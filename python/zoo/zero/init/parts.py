"""A parameter of which this rank keeps a part, before any optimizer: how it is split, made whole, and guarded.

Legend: N ranks, n = ceil(numel / N), or more where something is quantised (``sharing.py``). Each rank keeps n elements
of the flat value, padded with zeros to N n.

The parameter object stays the one that the model was built with, and so do ties. It becomes an instance of
:class:`InitParameter`, has its shape and dtype and, while it is partitioned, a storage of zero bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zoo.zero.init.sharing import Share, Sharing
from zoo.zero.sharding.guard import ALLOWED_WHEN_PARTITIONED, PartitionedAccessError

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_METADATA = (
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided",
)  # fmt: skip
_ALLOWED = ALLOWED_WHEN_PARTITIONED | {
    *(getattr(torch.Tensor, name) for name in _METADATA),
    _GRAD.__get__,
    torch._has_compatible_shallow_copy_type,
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
SET_DATA: Any = _DATA.__set__
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "half", "bfloat16", "float", "double", "cpu", "cuda")
)


class InitParameter(nn.Parameter):
    """What a parameter is between ``Init`` and the optimizer; see :class:`Part`, which hangs on it as ``_zoo_part``."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reads metadata; everything else needs the whole value: the active Init brings it, else it is refused."""
        kwargs = kwargs or {}
        if func not in _ALLOWED:
            from zoo.zero.init.session import current

            session = current()
            parts = parts_in((args, kwargs))
            if func in _CONVERSIONS and parts and not parts[0].whole:
                return parts[0].converted(func, args[1:], kwargs)
            if func == SET_DATA and parts and parts[0].take_over(args[1]):
                return None
            if session is not None:
                return session.run(func, args, kwargs, parts)
            refuse_closed(func, parts)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A partitioned parameter of its own with the same values; nothing is communicated."""
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = self._zoo_part.copy()  # type: ignore[attr-defined]
        return copy  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(torch.clone(self.detach()), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def part_of(parameter: Any) -> Part | None:
    """The part behind a parameter that ``Init`` partitioned, else None."""
    return parameter._zoo_part if type(parameter) is InitParameter else None  # type: ignore[attr-defined]


def parts_in(value: Any) -> list[Part]:
    """The parts of all partitioned parameters in nested arguments."""
    if isinstance(value, torch.Tensor):
        part = part_of(value)
        return [] if part is None else [part]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return list({id(p): p for item in value for p in parts_in(item)}.values())
    return []


def refuse_closed(func: Any, parts: Sequence[Part]) -> None:
    """Raise for the first use of parameters of which only parts are here."""
    closed = [part.name for part in parts if not part.whole]
    if closed:
        raise PartitionedAccessError(
            f"{getattr(func, '__name__', func)} touched {', '.join(map(repr, closed))}: zoo.zero.Init partitioned it, "
            "and only a part is on this rank. Inside the Init context initialisers may touch it; afterwards use `with "
            "zoo.zero.GatheredParameters(...)`, or construct the optimizer, which makes parameters whole when their "
            "modules run."
        )


class Part:
    """One partitioned parameter.

    Attributes:
        name: for messages: the class and the attribute, and the full name once the model is known.
        flat: (N n,) the whole value while it is needed, else None.
        users: how many contexts need it whole.
        aliased: something that shares the memory of ``flat`` was handed out; it may have been written to.
        rounded: ``flat`` came as int8.
    """

    def __init__(self, parameter: nn.Parameter, name: str, sharing: Sharing) -> None:
        self.name, self.comm, self._sharing = name, sharing.comm, sharing
        self._parameter = weakref.ref(parameter)
        self.shape, self.dtype, self.device = parameter.shape, parameter.dtype, parameter.device
        self.flat: torch.Tensor | None = None
        self.users = 0
        self.aliased = self.rounded = False
        self.origin: Part | None = None  # from which it was converted
        self._version = 0
        self._share: Share | None = None

    # Splitting -------------------------------------------------------------------------------------------------------

    @classmethod
    def split(cls, parameter: nn.Parameter, name: str, sharing: Sharing, dtype: torch.dtype | None) -> Part:
        """Partition an ordinary parameter; the values of rank 0 count. Collective."""
        value = parameter.data
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        part = cls(parameter, name, sharing)
        part._share = Share(sharing, part.numel, value.dtype, name)
        part.flat = part._padded(value)
        part.dtype = value.dtype
        del value
        parameter.__class__ = InitParameter
        parameter._zoo_part = part  # type: ignore[attr-defined]
        part.store(src=0)
        part.drop_whole()
        return part

    def converted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Parameter:
        """What ``parameter.to(...)`` returns: each rank converts its own elements."""
        kwargs = {k: v for k, v in kwargs.items() if k != "copy"}
        now = torch.empty(0, dtype=self.dtype, device=self.device)
        meant = func(now, *args, **kwargs)
        if (meant.dtype, meant.device) == (self.dtype, self.device):
            return self.parameter
        made = self.copy()
        part = part_of(made)
        if part is None:
            raise AssertionError("a copy of a partitioned parameter is partitioned")
        part.origin, part.dtype, part.device = self, meant.dtype, meant.device
        part.share.convert(meant.dtype)
        part.drop_whole()
        return made

    def take_over(self, value: torch.Tensor) -> bool:
        """Do ``parameter.data = value`` if ``value`` is this parameter, or was converted from it."""
        other = part_of(value)
        if other is self:
            return True
        if other is None or other.origin is not self or self.whole:
            return False
        self.share.drop()
        self._share, self.dtype, self.device = other.share, other.dtype, other.device
        self.drop_whole()
        return True

    def copy(self) -> nn.Parameter:
        """See ``InitParameter.__deepcopy__``."""
        from zoo.zero.init.session import current

        session = current()
        if self.whole and session is None:
            with torch._C.DisableTorchFunctionSubclass():
                return nn.Parameter(self.parameter.detach().clone(), self.parameter.requires_grad)
        if session is not None:
            session.settle()
        made = nn.Parameter(torch.empty(0, dtype=self.dtype, device=self.device), self.parameter.requires_grad)
        part = Part(made, f"copy of {self.name}", self._sharing)
        part.shape = self.shape
        part._share = self.share.copy()
        made.__class__ = InitParameter
        made._zoo_part = part  # type: ignore[attr-defined]
        part.drop_whole()
        return made

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, which holds this part; whoever works on a part holds the parameter."""
        found = self._parameter()
        if found is None:
            raise AssertionError(f"rank {self.comm.rank}: {self.name} is gone.")
        return found

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    @property
    def share(self) -> Share:
        """This rank's elements."""
        if self._share is None:
            raise AssertionError(f"rank {self.comm.rank}: {self.name} has no shard.")
        return self._share

    def _padded(self, value: torch.Tensor) -> torch.Tensor:
        total = self.share.total
        if value.is_contiguous() and total == value.numel():
            return value.view(-1)
        flat = torch.empty(total, dtype=value.dtype, device=value.device)
        flat[: value.numel()].copy_(value.reshape(-1))
        flat[value.numel() :].zero_()
        return flat

    # Whole -----------------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """The value is here."""
        return self.flat is not None

    @property
    def value(self) -> torch.Tensor:
        """The whole value in its shape, without autograd."""
        if self.flat is None:
            raise AssertionError(f"rank {self.comm.rank}: {self.name} is not whole.")
        return self.flat[: self.numel].view(self.shape)

    def make_whole(self, *, exact: bool = False) -> None:
        """Gather the value; ``exact``: as it is kept, also where what is gathered is rounded. Collective."""
        if self.flat is None:
            self.flat = torch.empty(self.share.total, dtype=self.dtype, device=self.device)
            self.rounded = self.share.gather(self.flat, exact=exact)
            self._attach(self.value)
            self._version, self.aliased = self.parameter._version, False
        elif exact and self.rounded:
            self.rounded = self.share.gather(self.flat, exact=True)

    def fill(self, view: torch.Tensor) -> None:
        """Copy the whole value, as it is kept, into ``view``, of its shape. Collective unless it is here already."""
        if self.flat is None and view.is_contiguous() and self.share.total == self.numel:
            self.share.gather(view.view(-1), exact=True)
            return
        was_whole = self.whole
        self.make_whole(exact=True)
        view.copy_(self.value)
        if not was_whole:
            self.drop_whole()

    def _attach(self, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _DATA.__set__(self.parameter, value)

    @property
    def changed(self) -> bool:
        """The whole value was, or may have been, written to."""
        return self.whole and (self.aliased or self.parameter._version != self._version)

    @property
    def written(self) -> bool:
        """The parameter itself was written to since it is whole; writes through ``.data`` do not show."""
        return self.whole and self.parameter._version != self._version

    def replace(self, value: torch.Tensor) -> None:
        """What ``parameter.data = value`` does: another value, dtype or device; the shape stays."""
        with torch.no_grad():
            self.flat = self._padded(value.detach().clone(memory_format=torch.contiguous_format))
        self.dtype, self.device = value.dtype, value.device
        self._attach(self.value)
        self.aliased, self.rounded = True, False

    def moved(self) -> bool:
        """Something gave the parameter other memory while it was whole."""
        with torch._C.DisableTorchFunctionSubclass():
            now = self.parameter.untyped_storage()._cdata
            return self.flat is None or now != self.flat.untyped_storage()._cdata or self.parameter.shape != self.shape

    def hollow(self) -> bool:
        """The parameter has no memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.untyped_storage().nbytes() == 0

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the memory of the whole value."""
        if self.flat is None or tensor.layout is not torch.strided or tensor.device != self.flat.device:
            return False
        return bool(self.flat.numel()) and tensor.untyped_storage()._cdata == self.flat.untyped_storage()._cdata

    def store(self, src: int) -> None:
        """Keep the part of rank ``src``'s whole value that is this rank's. Collective."""
        if self.flat is None:
            raise AssertionError(f"rank {self.comm.rank}: {self.name} is not whole.")
        if self.flat.numel():
            self.comm.broadcast(self.flat, src).wait()
        self.share.store(self.flat, frozen=not self.parameter.requires_grad, rounded=self.rounded)
        self._version = self.parameter._version

    def drop_whole(self) -> bool:
        """Free the whole value; False, and it stays, if something else still uses its memory."""
        reference = None
        if self.flat is not None and self.aliased and self.flat.numel():
            reference = StorageWeakRef(self.flat.untyped_storage())  # type: ignore[no-untyped-call]
        self.flat = None
        self._attach(torch.empty(0, dtype=self.dtype, device=self.device))
        if reference is not None and not reference.expired():  # type: ignore[no-untyped-call]
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                self.flat = torch.empty(0, dtype=self.dtype, device=self.device).set_(storage)
                self._attach(self.value)
                return False
        hollow = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        hollow.untyped_storage().resize_(0)
        self._attach(hollow)
        self.aliased = False
        return True

    def end(self) -> None:
        """Make the parameter an ordinary one, whose memory the caller sets; the shard is gone."""
        self.share.drop()
        self.flat, self.users = None, 0
        self.parameter.__class__ = nn.Parameter
        del self.parameter._zoo_part  # type: ignore[attr-defined]


def fill_from(view: torch.Tensor, parameter: nn.Parameter) -> None:
    """Copy a parameter's value to ``view``; one that ``Init`` partitioned is gathered, and ordinary afterwards."""
    part = part_of(parameter)
    if part is None:
        view.copy_(parameter.data)
        return
    part.fill(view)
    part.end()
