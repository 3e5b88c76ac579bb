"""What a model's parameters become under a ZeRO optimizer, and how touching one at the wrong time is caught.

Every bucket has a subclass of ``nn.Parameter`` of its own, and its parameters become instances of it (the objects stay
the same). Two things hang on the class, so that they cost the same for one parameter as for a thousand:

* ``grad`` is a property: the gradient lives in the bucket's flat buffer, and ``p.grad = None`` empties it there;
* while no unit that owns them runs, ``__torch_function__`` refuses every operation except reading metadata, by name.

Tensors made from a parameter earlier (a transpose kept by the user) share its storage; the storage itself is then told
to refuse access. Without either, reading freed storage would end the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses import meta_utils
from torch.utils._python_dispatch import _disable_current_modes

from zoo.shard.call_stack import SAVES, TORCH_FUNCTIONS, called_by, nothing_of, split_for_torch
from zoo.shard.dtensors import is_dtensor
from zoo.shard.memory import allow_storage, refuse_storage
from zoo.shard.partitioned import (
    CONVERSIONS,
    UNREAD,
    PartitionedAccessError,
    PartitionedGradient,
    PartitionedValues,
    changes_nothing,
    flat_tensors,
    look_at,
    without_values,
)
from zoo.shard.quantised_parameters import class_of, ordinary, shown

_DISABLED = torch._C._disabled_torch_function_impl
_GRAD: Any = torch.Tensor.grad  # the C level attributes beneath the properties
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_DATA: Any = torch.Tensor.data

_NEW_PARAMETER = nn.Parameter.__new__.__code__
_LOADS = nn.Module._load_from_state_dict.__code__
_CONVERTS = nn.Module._apply.__code__
_DESCRIBES = meta_utils.safe_grad.__code__
_PARAMETRISE = ("torch.nn.utils.parametri", "torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")

_CONVERT_FIRST = " Convert a model before the optimizer is constructed, or close() it first."
# A gradient may be asked for, and modules compare types before they assign `data`.
_PASS = frozenset(
    {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward, torch._has_compatible_shallow_copy_type}
)


class ShardedParameter(nn.Parameter):
    """A parameter that lives in a bucket: under a ZeRO optimizer or, before that, of ``Init``."""

    _zoo_bucket: Any
    _zoo_name: str
    _zoo_slot: int
    _zoo_refusal: str | None = None
    """What to say after "sum touched 'weight'", where that is another thing than for a unit's parameters."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = ordinary(self, torch.clone(self.detach()))
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _use_count(self) -> NoReturn:
        # Only torch.utils.swap_tensors asks for it, of both tensors, before it changes anything.
        refuse_swap(self)

    def module_load(self, other: torch.Tensor, assign: bool = False) -> NoReturn:
        """What ``load_state_dict`` calls before it swaps: it would have written the values by then."""
        refuse_swap(self)


def refuse_swap(parameter: Any) -> NoReturn:
    """Say why no other tensor can be put in the place of this one."""
    raise ValueError(
        f"torch.utils.swap_tensors was given {_name(parameter)!r}, whose memory is a flat buffer: the model would run "
        "on other values than those that are trained. Write them into the parameter (p.data.copy_(value); at stage 3 "
        "inside of GatheredParameters). A module swaps in to(...) and in load_state_dict(...) after "
        "torch.__future__.set_swap_module_params_on_conversion(True): set it to False."
    )


def refuse(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``__torch_function__`` of parameters of which only a shard is here: it refuses what needs their values."""
    seen = look_at(func, args, kwargs or {})
    if seen is not UNREAD:
        return seen
    if func in CONVERSIONS and changes_nothing(func, args, kwargs or {}):
        return args[0]
    if func in _PASS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    touched = sharded_in((args, kwargs or {}))
    hidden = {p._zoo_bucket: p for p in touched if p._zoo_bucket.parameters.refused}
    # In a forward the running unit takes them as its own, all in the same order on every rank.
    in_order = sorted(hidden.items(), key=lambda item: item[0].index)
    if hidden and all(bucket.take_external(p._zoo_slot) for bucket, p in in_order):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    if len(touched) == 1 and args and touched[0] is args[0]:
        seen = without_values(func, args, kwargs or {}, touched[0], partial(refuse_touched, touched))
        if seen is not UNREAD:
            return seen
    return refuse_touched(touched, func)


def refuse_touched(touched: Sequence[ShardedParameter], func: Any) -> NoReturn:
    """Say by name which of these parameters, all of one kind, ``func`` needs the values of."""
    closed = [p for p in touched if p._zoo_bucket.parameters.refused] or touched
    names = sorted({p._zoo_bucket.called(p._zoo_slot) for p in closed})
    named = f"{getattr(func, '__name__', func)} touched {', '.join(map(repr, names)) or 'a parameter'}"
    if touched and touched[0]._zoo_refusal is not None:
        raise PartitionedAccessError(f"{named}{touched[0]._zoo_refusal}")
    raise PartitionedAccessError(
        f"{named} outside of its unit's forward and backward: at ZeRO stage 3 only a shard of it is on this rank then. "
        "Use it inside the forward of the module that owns it, or of a unit that contains all its uses (units=...), or "
        "keep it whole (param_persistence_threshold), or say who uses it (register_external_parameter), or read it "
        "inside `with GatheredParameters(...):`; its rows for a state_dict come from get_model_state_dict() of "
        f"{TORCH_FUNCTIONS}, which all ranks call."
        f"{_CONVERT_FIRST if func in CONVERSIONS else ''}{_of_parametrisation()}"
    )


def _of_parametrisation() -> str:
    """What to say besides where a model is being parametrised."""
    if called_by(*_PARAMETRISE):
        return " Parametrise a model before the optimizer is constructed, or close() it first."
    return ""


def cannot_convert(name: str, parameter: torch.Tensor, value: torch.Tensor) -> str:
    """Why a parameter does not take a tensor of another dtype or device."""
    return (
        f"parameter {name!r} is {parameter.dtype} on {parameter.device}, and was given {value.dtype} on {value.device}:"
        " under a ZeRO optimizer parameters lie in flat buffers, whose dtype and device stay. Convert the model before "
        "the optimizer is constructed, or close() it first."
    )


def sharded_in(value: Any) -> list[ShardedParameter]:
    """The parameters of buckets in nested arguments."""
    return [tensor for tensor in flat_tensors(value) if isinstance(tensor, ShardedParameter)]


def _name(parameter: Any) -> str:
    name: str = parameter._zoo_bucket.called(parameter._zoo_slot)
    return name


def _get_grad(self: Any) -> torch.Tensor | None:
    bucket = self._zoo_bucket
    if bucket.gradients is None:
        return None
    if sys._getframe(1).f_code is _DESCRIBES:  # a compiler that makes a graph, perhaps amid tensors without values
        with _disable_current_modes():
            found = bucket.gradients.visible(self._zoo_slot)
        return None if isinstance(found, PartitionedGradient) else found
    found = bucket.gradients.visible(self._zoo_slot)
    if not isinstance(found, PartitionedGradient) or not bucket.placements.states.is_split:
        return found  # type: ignore[no-any-return]  # what every rank updates, programs count on, and are told
    owner = bucket.owner()  # of a model whose optimizer is gone there is none
    return found if owner is None or owner.reads.gradients else None


def _set_grad(self: Any, value: torch.Tensor | None) -> None:
    gradients = self._zoo_bucket.gradients
    if gradients is not None:
        gradients.assign(self._zoo_slot, value)
    elif value is not None:
        raise ValueError(f"{_name(self)!r} was frozen when the optimizer was constructed; it takes no gradient.")


def _get_data(self: Any) -> torch.Tensor:
    alias = _DATA.__get__(self)
    if isinstance(alias, PartitionedValues):
        return alias
    # As torch's, it shares no version counter with the parameter; but one with all others of this parameter, so that
    # writes through it are seen.
    return self._zoo_bucket.parameters.alias(self._zoo_slot, alias)  # type: ignore[no-any-return]


def _set_data(self: Any, value: torch.Tensor) -> None:
    self._zoo_bucket.assign(self._zoo_slot, self, value)


def _get_requires_grad(self: Any) -> bool:
    return _REQUIRES_GRAD.__get__(self)  # type: ignore[no-any-return]


def _set_requires_grad(self: Any, value: bool) -> None:
    # Freezing for a while is fine: the gradient of these steps is zero. The other way round there is no place for one.
    if value and not self._zoo_bucket.spec.trainable:
        raise ValueError(
            f"parameter {_name(self)!r} was frozen when the model was split over ranks, by a ZeRO optimizer or without "
            "training, and has no place for a gradient. Set requires_grad before that, or close() it and construct a "
            "new one."
        )
    _REQUIRES_GRAD.__set__(self, value)


def _requires_grad_(self: Any, requires_grad: bool = True) -> Any:
    _set_requires_grad(self, requires_grad)
    return self


def _detach(self: Any) -> torch.Tensor:
    # `nn.Parameter(parameter)` asks for it first: there would be two parameters of one memory.
    if not torch.compiler.is_compiling() and sys._getframe(1).f_code is _NEW_PARAMETER:
        if sys._getframe(2).f_code is _CONVERTS:  # to swap the two, though nothing has changed
            refuse_swap(self)
        raise ValueError(
            f"nn.Parameter(...) of {_name(self)!r} would be a second parameter in its memory, which the ZeRO "
            "optimizer does not know. Make it of parameter.detach().clone(); what makes parameters of others (a "
            "parametrisation such as weight_norm) has to come before the optimizer is constructed."
        )
    if sys._getframe(1).f_code is SAVES and split_for_torch(self):
        bucket = self._zoo_bucket
        return bucket.owner().rows(bucket, self._zoo_slot)  # type: ignore[no-any-return]
    if self._zoo_bucket.parameters.refused and not torch.compiler.is_compiling():
        nothing = nothing_of(self)
        if nothing is not None:
            return nothing
        if sys._getframe(1).f_code is SAVES:
            values = torch.Tensor.detach(self)  # a unit that runs gathers it
            return refuse_touched([self], torch.Tensor.detach) if isinstance(values, PartitionedValues) else values
    return torch.Tensor.detach(self)


def _copy_(self: Any, source: torch.Tensor, non_blocking: bool = False) -> Any:
    # What set_model_state_dict() gives may be split, and so may be the parameter; every rank is here.
    if source is self or sys._getframe(1).f_code is not _LOADS or not called_by(TORCH_FUNCTIONS):
        return self if source is self else torch.Tensor.copy_(self, source, non_blocking)
    given: Any = source
    whole = given.full_tensor() if is_dtensor(given) else given
    if not split_for_torch(self):
        return torch.Tensor.copy_(self, whole, non_blocking)
    bucket = self._zoo_bucket
    # Torch sets the states first: masters that round to what is given here stay.
    bucket.owner().writes.change(bucket, self._zoo_slot, whole.to(self.device, self.dtype), keep_equal=True)
    return self


def _deepcopy(self: Any, memo: dict[int, Any]) -> nn.Parameter:
    # A copy (an averaged model, say) is a parameter of its own: it belongs to no bucket.
    copy = memo.get(id(self))
    if copy is None:
        copy = memo[id(self)] = ordinary(self, torch.clone(self.detach()), memo)
    return copy


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    # In the place of what another class does: codes are converted, or packed anew, outside of a bucket only.
    if changes_nothing(torch.Tensor.to, (self, *args), kwargs):
        return self
    raise ValueError(
        f"parameter {_name(self)!r}, a {class_of(self).__name__}, would go to {(*args, *kwargs.values())!r}: it "
        f"lies in a flat buffer, whose dtype and device stay.{_CONVERT_FIRST}"
    )


_REFUSE: Any = classmethod(refuse)
_BODY: dict[str, Any] = {
    "grad": property(_get_grad, _set_grad, lambda self: _set_grad(self, None)),
    "requires_grad": property(_get_requires_grad, _set_requires_grad),
    "requires_grad_": _requires_grad_,
    "data": property(_get_data, _set_data),
    "__torch_function__": _DISABLED,
    "detach": _detach,
    "copy_": _copy_,
    "__deepcopy__": _deepcopy,
}
CompiledParameter: Any = type("CompiledParameter", (ShardedParameter,), {**_BODY, "_zoo_bucket": None})
"""The class of parameters, while they are shown, of all buckets that modules have which are compiled."""


class Guard:
    """Makes one bucket's parameters instances of a class of their own, and opens and closes that class.

    Args:
        bucket: the :class:`~zoo.shard.buckets.Bucket`, which the class has.
        storage: the memory of its parameters.

    Of a bucket with a ``parameter_class`` these find out by themselves whether they are whole, and each has the bucket.
    """

    def __init__(self, bucket: Any, storage: torch.UntypedStorage) -> None:
        self._shown: Any = _DISABLED  # what the class does to functions of torch while its parameters are whole
        self._bucket, self._is_shown = bucket, True
        self._class: Any = bucket.parameter_class or self._class_for(bucket)
        self._compiled: Sequence[Any] = ()
        self._held = False
        self._address = storage._cdata

    def _class_for(self, bucket: Any) -> Any:
        """The class of the bucket's parameters."""
        cls = bucket.spec.cls
        if cls is nn.Parameter:
            return type("ZeroParameter", (ShardedParameter,), {**_BODY, "_zoo_bucket": bucket})
        self._shown = shown(cls)
        body = {**_BODY, "_zoo_bucket": bucket, "_zoo_coded": cls, "__torch_function__": self._shown, "to": _stay}
        return type(f"Zero{cls.__name__}", (ShardedParameter, cls), body)

    def share(self, parameters: Sequence[Any]) -> None:
        """For modules that are compiled: a compiler guards on the class of a parameter, and of equal modules it is to
        make one graph. From now on ``parameters`` have one class with those of other buckets while they are shown."""
        if self._compiled or self._bucket.spec.cls is not nn.Parameter or self._bucket.parameter_class is not None:
            return
        self._compiled = parameters
        for parameter in parameters:
            parameter._zoo_bucket = self._bucket
        if self._is_shown:
            self._become(CompiledParameter)

    def _become(self, cls: Any) -> None:
        for parameter in self._compiled:
            if vars(parameter).get("_zoo_bucket") is self._bucket:  # else it was released
                parameter.__class__ = cls

    def adopt(self, parameter: nn.Parameter, name: str, slot: int) -> None:
        """Make ``parameter`` an instance of the bucket's class."""
        parameter.__class__ = self._class
        parameter._zoo_name = name  # type: ignore[attr-defined]
        parameter._zoo_slot = slot  # type: ignore[attr-defined]
        if self._bucket.parameter_class is not None:
            parameter._zoo_bucket = self._bucket  # type: ignore[attr-defined]

    def hide(self) -> None:
        """No unit that owns the parameters is running: refuse them. Their memory may still be there."""
        self._is_shown = False
        if self._bucket.parameter_class is None:
            self._class.__torch_function__ = _REFUSE
            if self._compiled and not self._held:
                self._become(self._class)

    def show(self) -> None:
        """A unit that owns the parameters runs."""
        self._is_shown = True
        if self._bucket.parameter_class is None:
            self._class.__torch_function__ = self._shown
            if self._compiled and not self._held:
                self._become(CompiledParameter)

    def hold(self, held: bool) -> None:
        """Parameters of compiled modules have their common class, shown or not, as long as they are ``held``: a graph
        of all of the model is called with them."""
        self._held = held
        self._become(CompiledParameter if held or self._is_shown else self._class)

    def moved(self, storage: torch.UntypedStorage) -> None:
        """Their memory is another one now."""
        self._address = storage._cdata

    def close(self) -> None:
        """The memory is gone: refuse everything that shares it."""
        refuse_storage(self._address, self._bucket.refusal)

    def open(self) -> None:
        """There is memory again."""
        allow_storage(self._address)


def release(parameter: Any) -> None:
    """Make an adopted parameter an ordinary ``nn.Parameter`` again, without a gradient."""
    parameter.__class__ = class_of(parameter)
    del parameter._zoo_name, parameter._zoo_slot
    parameter.__dict__.pop("_zoo_bucket", None)
    parameter.grad = None
    if parameter.grad_dtype is not parameter.dtype:
        parameter.grad_dtype = parameter.dtype


def assign_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """What ``parameter.data = value`` does in torch."""
    _DATA.__set__(parameter, value)


def raw_grad(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    """Set the gradient that autograd accumulates into."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, value)


def grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Set the dtype that a gradient is converted to before autograd accumulates it."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad_dtype = dtype


def raw_grad_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd accumulates into."""
    with torch._C.DisableTorchFunctionSubclass():
        return _GRAD.__get__(parameter)  # type: ignore[no-any-return]


def has_raw_grad(parameter: nn.Parameter) -> bool:
    """Whether autograd would accumulate into something, or has just made it."""
    return raw_grad_of(parameter) is not None


def raw_data(parameter: nn.Parameter) -> torch.Tensor:
    """What ``parameter.data`` is in torch."""
    with torch._C.DisableTorchFunctionSubclass():
        return _DATA.__get__(parameter)  # type: ignore[no-any-return]


def refuse_copy(what: object) -> NoReturn:
    """Say why ``what`` is neither copied nor pickled, and what to do instead."""
    raise ValueError(
        f"a {type(what).__name__} cannot be copied or pickled: it is tied to the memory of its model, and to other "
        "ranks. Copy or save the state instead, optimizer.state_dict() or a checkpoint, and load it into an "
        "optimizer that is "
        "constructed the same way; of the model itself there are copies and pickles (stage 3: inside of gathered())."
    )
