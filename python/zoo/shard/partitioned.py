"""What stands where a tensor has no values on this rank, or where its memory is a flat buffer's.

``parameter.data`` and ``parameter.grad`` of what is partitioned have a shape, a dtype and a device, and refuse whatever
reads or writes values (:func:`look_at` knows what does not); a gradient that is whole is a view, which writes through
``.data`` do not take elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from torch import nn


class PartitionedAccessError(RuntimeError, ValueError):
    """A parameter or gradient was touched while only a shard of it is on this rank."""


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """What programs get that read what is not on this rank; a model has one, :attr:`zoo.shard.ShardedModel.reads`.

    Attributes:
        names_for: packages whose functions get tensors without memory (device "meta") from ``state_dict()``, because
            they ask it for names: prefixes of module names; None: everybody does. Others get PartitionedAccessError.
        gradients: ``p.grad`` of a partitioned gradient is a tensor that refuses to give values. False: it is None, so
            that loops over gradients pass it by.
    """

    names_for: tuple[str, ...] | None = ("transformers.",)
    gradients: bool = True


_DATA: Any = torch.Tensor.data  # the C level attribute beneath the property
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "names", "grad_fn", "itemsize", "nbytes", "_version", "output_nr", "retains_grad",
    "is_nested", "_backward_hooks", "is_xla", "is_xpu", "is_mkldnn", "is_mps", "is_mtia", "is_maia", "is_ipu",
    "is_vulkan", "is_sparse_csr", "_base", "volatile", "grad_dtype",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "storage_offset", "ndimension",
    "get_device", "__len__", "is_inference", "__bool__", "is_signed", "is_conj", "is_neg",
    "is_distributed", "dim_order", "contiguous", "has_names", "is_coalesced", "_is_view", "retain_grad", "__dir__",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided",
)  # fmt: skip
_FUNCTIONS = (
    torch._has_compatible_shallow_copy_type,  # modules compare types before they assign `data`
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.result_type, torch.get_device,
    torch.is_signed, torch.is_conj, torch.is_neg, torch.is_inference, torch.is_distributed,
)  # fmt: skip


def _allowed() -> frozenset[Any]:
    # Hashing a slot wrapper is stable: torch passes these very objects to __torch_function__.
    found: list[Any] = [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)]
    found.append(_REQUIRES_GRAD.__set__)
    found += [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name) and name != "__bool__"]
    return frozenset([*found, *_FUNCTIONS])


ALLOWED_WHEN_PARTITIONED = _allowed()
"""What reads metadata only."""
VIEWS = frozenset({_DATA.__get__, torch.Tensor.detach, torch.detach})
"""What gives the same values without a graph."""
MAKES = frozenset(
    {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
    | {getattr(torch.Tensor, name) for name in _METHODS if name.startswith("new_")}
)
"""What makes another tensor by the dtype, device and shape of this one."""
UNREAD: Any = object()
"""What :func:`look_at` gives for a function that reads values."""

# As of a tensor without memory: no address, a storage of the right size that gives no values.
_OF_MEMORY = frozenset(
    getattr(torch.Tensor, name)
    for name in ("data_ptr", "const_data_ptr", "is_pinned", "untyped_storage", "storage", "_typed_storage")
    if hasattr(torch.Tensor, name)
)


def look_at(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch that reads no values of its first argument, a tensor without values;
    :data:`UNREAD` for any other function."""
    tensor = args[0] if args else None
    if func in ALLOWED_WHEN_PARTITIONED or (func is torch.Tensor.type and len(args) == 1 and not kwargs):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if not isinstance(tensor, torch.Tensor):
        return UNREAD
    if func in _OF_MEMORY:
        return func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
    if func is torch.Tensor.type_as and (tensor.dtype, tensor.device) == (args[1].dtype, args[1].device):
        return tensor
    if func is torch.Tensor.is_set_to:
        return (args[1] if len(args) > 1 else kwargs["tensor"]) is tensor
    if func is torch.Tensor.to and (meant := _converted(func, args, kwargs)).is_meta:
        return torch.empty(tensor.shape, dtype=meant.dtype, device="meta")
    if func is torch.Tensor.is_shared:
        return bool(tensor.is_cuda)
    if func in (torch.Tensor.is_same_size, torch.is_same_size):
        return tensor.shape == (args[1] if len(args) > 1 else kwargs["other"]).shape
    if func is torch.Tensor.__format__ and args[1:] in ((), ("",)):
        return str(tensor)
    if func is torch.Tensor.__repr__:
        grad = ", requires_grad=True" if tensor.requires_grad else ""
        return (
            f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r}{grad}), of "
            "which this rank holds a shard"
        )
    return UNREAD


_DISABLED = torch._C._disabled_torch_function_impl

CONVERSIONS = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "type", "half", "bfloat16", "float", "double", "cpu", "cuda")
)
# What a gradient without values takes besides.
_OF_GRADIENTS = frozenset({torch.Tensor.detach_, torch.Tensor.requires_grad_, torch._has_compatible_shallow_copy_type})


class PartitionedValues(torch.Tensor):
    """What ``parameter.data``, ``parameter.detach()`` and views are where this rank holds a shard: a shape, the dtype
    and device of the parameter, and no values. What reads or writes them is a :class:`PartitionedAccessError`."""

    @staticmethod
    def of(
        parameter: nn.Parameter, refuse: Callable[[Any], NoReturn], like: torch.Tensor | None = None,
        requires_grad: bool = False,
    ) -> PartitionedValues:  # fmt: skip
        """Those of one parameter, in its shape or that of ``like``; ``refuse(func)`` says what keeps a function from
        them."""
        shape = parameter if like is None else like
        made: Any = torch.Tensor._make_wrapper_subclass(
            PartitionedValues, shape.shape, strides=shape.stride(), storage_offset=shape.storage_offset(),
            dtype=parameter.dtype, device=parameter.device, requires_grad=requires_grad,
        )  # fmt: skip
        made._zoo_parameter, made._zoo_refuse = parameter, refuse
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reads metadata, converts to the same; refuses the rest."""
        found: Any = next(value for value in flat_tensors((args, kwargs or {})) if isinstance(value, cls))
        if func in MAKES and args and args[0] is found:
            args = (torch.empty((), dtype=found.dtype, device=found.device).expand(found.shape), *args[1:])
        seen = look_at(func, args, kwargs or {})
        if seen is not UNREAD:
            return seen
        if func in VIEWS and args[0] is found:
            return found
        if func in CONVERSIONS and args[0] is found and changes_nothing(func, args, kwargs or {}):
            return found
        seen = without_values(func, args, kwargs or {}, found._zoo_parameter, found._zoo_refuse)
        return seen if seen is not UNREAD else found._zoo_refuse(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What gets past the above has no values to work on."""
        found: Any = next(value for value in flat_tensors((args, kwargs or {})) if isinstance(value, cls))
        return found._zoo_refuse(func)


class PartitionedGradient(torch.Tensor):
    """What ``parameter.grad`` is where this rank holds a shard of the mean: it has a shape and a dtype, and no values.

    It can be dropped, zeroed, converted to what it is already (as ``model.to(...)`` does) and asked what it looks like;
    everything else is a :class:`PartitionedAccessError`.
    """

    @staticmethod
    def of(gradients: Any, slot: int) -> PartitionedGradient:
        """The gradient of parameter ``slot`` of a bucket."""
        bucket = gradients.bucket
        made: Any = torch.Tensor._make_wrapper_subclass(
            PartitionedGradient, bucket.layout.tensors[slot].shape, dtype=gradients.dtype, device=bucket.device
        )
        made._zoo_gradients, made._zoo_slot = gradients, slot
        return made  # type: ignore[no-any-return]

    def stands_for(self, gradients: Any, slot: int) -> bool:
        """Whether it is the gradient of this parameter."""
        return self._zoo_gradients is gradients and self._zoo_slot == slot  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reads metadata, zeroes, converts to the same; refuses the rest."""
        seen = look_at(func, args, kwargs or {})
        if seen is not UNREAD:
            return seen
        if func in _OF_GRADIENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found: Any = next(value for value in flat_tensors((args, kwargs or {})) if isinstance(value, cls))
        if func is torch.Tensor.zero_:
            found._zoo_gradients.clear(found._zoo_slot)
            return found
        if func in (_DATA.__get__, torch.Tensor.detach) and args[0] is found:
            return found
        if func == _DATA.__set__ and args[0] is found and isinstance(args[1], cls) and found.same_as(args[1]):
            return None
        if func in CONVERSIONS and args[0] is found and changes_nothing(func, args, kwargs or {}):
            return found
        return found.refuse(func)

    def same_as(self, other: PartitionedGradient) -> bool:
        """Whether both are the gradient of one parameter."""
        return other.stands_for(self._zoo_gradients, self._zoo_slot)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What gets past the above has no values to work on."""
        found = next(value for value in flat_tensors((args, kwargs or {})) if isinstance(value, cls))
        return found.refuse(func)

    def refuse(self, func: Any) -> NoReturn:
        """Say what was touched, and what to do instead."""
        found: Any = self
        name, touched = found._zoo_gradients.bucket.called(found._zoo_slot), getattr(func, "__name__", str(func))
        scaler = "In the place of torch's GradScaler give loss_scale= to the optimizer. " if "_amp_" in touched else ""
        raise PartitionedAccessError(
            f"{touched} touched the gradient of {name!r}, which is partitioned: this rank holds a shard of the mean. "
            f"{scaler}Use clip_norm= or optimizer.clip_grad_norm_() to clip, optimizer.grad_norm to watch it, "
            "zoo.zero.safe_get_full_grad to read it, optimizer.zero_grad() to drop it."
        )


class WholeGradient(torch.Tensor):
    """What ``parameter.grad`` is where it is whole: a view of the flat buffer, which ``.data = value`` writes to.

    As torch has it, that would move this one view to other memory, and the optimizer would see nothing of it.
    """

    __torch_function__: Any = _DISABLED  # what is computed with it is a plain tensor

    @staticmethod
    def of(view: torch.Tensor, bucket: Any, slot: int) -> WholeGradient:
        """``view``, of the gradient of a parameter of ``bucket``."""
        made: Any = view.as_subclass(WholeGradient)
        made._zoo_place = bucket, slot
        return made  # type: ignore[no-any-return]

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        mine, given = ((tuple(t.shape), t.dtype, t.device) for t in (self, value))
        if mine != given:
            bucket, slot = self._zoo_place  # type: ignore[attr-defined]
            raise ValueError(
                f"the gradient of {bucket.called(slot)!r} is of shape {mine[0]}, {mine[1]}, on {mine[2]}, and was "
                f"given {given[0]}, {given[1]}, on {given[2]}: it lies in a flat buffer, where these stay."
            )
        with torch.no_grad():
            self.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A tensor of its own."""
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor."""
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for item in value for t in flat_tensors(item)] if isinstance(value, (tuple, list)) else []


def changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``model.to(...)`` and its like, to what the tensor is already; the order of its memory stays in any case."""
    tensor, meant = args[0], _converted(func, args, kwargs)
    same = isinstance(meant, torch.Tensor) and (meant.dtype, meant.device) == (tensor.dtype, tensor.device)
    return same and not kwargs.get("copy")


def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a conversion makes of a tensor without elements that is otherwise like the first argument."""
    tensor, *rest = args
    rest = [torch.empty(0, dtype=t.dtype, device=t.device) if isinstance(t, torch.Tensor) else t for t in rest]
    shape = (0,) * max(tensor.dim(), 1)  # some memory formats want a number of dims
    return func(torch.empty(shape, dtype=tensor.dtype, device=tensor.device), *rest, **kwargs)


_OTHER_SHAPES = (
    "t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "adjoint", "view", "reshape", "flatten",
    "ravel", "unflatten", "squeeze", "unsqueeze", "expand", "narrow", "select", "chunk", "tensor_split", "split",
    "unbind", "diagonal", "unfold", "as_strided", "__getitem__",
)  # fmt: skip
SHAPED = frozenset(
    [getattr(place, name) for place in (torch.Tensor, torch) for name in _OTHER_SHAPES if hasattr(place, name)]
    + [getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]
)
"""What gives the same elements in another shape, or some of them."""


def without_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parameter: nn.Parameter, refuse: Callable[[Any], NoReturn]
) -> Any:  # fmt: skip
    """What a function that reads no values gives of those of ``parameter``, its first argument or what this has made of
    it: the same elements without a graph, or in another shape; :data:`UNREAD` for any other function."""
    if not args or not isinstance(args[0], torch.Tensor):
        return UNREAD
    tensor, rest = args[0], args[1:]
    if func in VIEWS:
        return PartitionedValues.of(parameter, refuse, tensor)
    if func not in SHAPED or flat_tensors((rest, kwargs)):  # indices
        return UNREAD
    offset = tensor.storage_offset()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    memory = torch.empty(offset + last + 1, dtype=tensor.dtype, device="meta")
    like = memory.as_strided(tensor.shape, tensor.stride(), offset)
    found, storage = func(like, *rest, **kwargs), memory.untyped_storage()._cdata
    if any(view.untyped_storage()._cdata != storage for view in flat_tensors(found)):  # a copy
        return UNREAD
    trains = tensor.requires_grad and torch.is_grad_enabled()
    views = [PartitionedValues.of(parameter, refuse, view, trains) for view in flat_tensors(found)]
    return type(found)(views) if isinstance(found, (tuple, list)) else views[0]


# -- gradients that arrive when nothing reduces them -------------------------------------------------------------------


def stray(label: str) -> RuntimeError:
    """Of one of the bucket ``label`` that came while nothing was to come."""
    return RuntimeError(
        f"a gradient of {label} arrived in a backward that did not come through the output of its "
        "module (a penalty on the weights alone, a loss behind a transform of torch.func, or another layer that "
        "was given this parameter after construction), and was not reduced. Add that loss to the one of the model, "
        "so that one backward brings both, or tie layers before construction; zero_grad() forgets it."
    )


def late(label: str) -> PartitionedAccessError:
    """Of one that came after the reduction of the bucket ``label`` had begun."""
    return PartitionedAccessError(
        f"a gradient of {label} arrived after it had been reduced: one of its parameters was used "
        "before its unit's forward, or outside of a model that is one graph of zoo.compile (a penalty on the "
        "weights), so its gradient comes last in backward. Say so with register_external_parameter(module, "
        "parameter), or pass overlap_comm=False, which reduces at the end of backward. Or two layers were tied "
        "after construction: tie them before. Or it was used before under re-entrant checkpointing of a module "
        "that was called by itself: call the model as a whole, or checkpoint with use_reentrant=False."
    )
