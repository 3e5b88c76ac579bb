"""What programs of DeepSpeed ask a parameter at stage 3: ``ds_id``, ``ds_shape``, ``ds_tensor``, ...

Importing this gives these attributes to the parameters that ZeRO stage 3 or ``Init`` partitions; no others have them,
which is how programs tell them apart.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zoo.shard import GatheredParameters as _Gathered
from zoo.shard import PartitionedAccessError
from zoo.shard import register_external_parameter as _register
from zoo.shard import unregister_external_parameter as _unregister
from zoo.shard.guard import ShardedParameter

ZeRORuntimeException = PartitionedAccessError
"""What touching a partitioned parameter raises."""


class ZeroParamType(enum.Enum):
    """Kinds of parameters that DeepSpeed tells apart."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter is whole on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_NUMBERS = itertools.count()


def _is_stage3(parameter: Any) -> bool:
    from zoo.shard.init.parts import InitBucket

    bucket = parameter._zoo_bucket
    if isinstance(bucket, InitBucket):
        return True
    owner = bucket.owner()
    return owner is not None and owner.config.stage == 3


def _of_stage3(read: Callable[[Any], Any]) -> property:
    def get(self: Any) -> Any:
        if not _is_stage3(self):
            raise AttributeError(f"{read.__name__}: only parameters of ZeRO stage 3 have it.")
        return read(self)

    return property(get, doc=read.__doc__)


def ds_id(parameter: Any) -> int:
    """A number that no other parameter of this process has."""
    if "_zoo_ds_id" not in parameter.__dict__:
        parameter._zoo_ds_id = next(_NUMBERS)
    return int(parameter._zoo_ds_id)


def ds_shape(parameter: Any) -> torch.Size:
    """The shape of the whole parameter, as its ``shape`` is here too."""
    return torch.Size(parameter._zoo_bucket.layout.tensors[parameter._zoo_slot].shape)


def ds_numel(parameter: Any) -> int:
    """Elements of the whole parameter."""
    return ds_shape(parameter).numel()


def ds_status(parameter: Any) -> ZeroParamStatus:
    """Whether it is whole here now."""
    presence = parameter._zoo_bucket.parameters.presence.value
    known = {"sharded": ZeroParamStatus.NOT_AVAILABLE, "unsharding": ZeroParamStatus.INFLIGHT}
    return known.get(presence, ZeroParamStatus.AVAILABLE)


def ds_tensor(parameter: Any) -> torch.Tensor:
    """(n,) this rank's elements, in the parameter's dtype, of the shape that the local setters take.

    A view where they are in memory, a copy where they are on NVMe or packed; ranks have different numbers of them,
    none too. ``ds_numel`` is n and ``status`` says that it is here.
    """
    bucket, slot = parameter._zoo_bucket, parameter._zoo_slot
    start = bucket.layout.offsets[slot]
    stop = start + ds_numel(parameter)
    low, high = bucket.own_range
    begin, end = min(max(start, low), stop), max(min(stop, high), start)
    role = bucket.roles["parameter"]
    found: Any = (
        role.read(begin - role.first, end - begin)
        if end > begin
        else torch.empty(0, dtype=role.dtype, device=role.device)
    )
    found.ds_numel, found.status = found.numel(), ZeroParamStatus.AVAILABLE
    return found  # type: ignore[no-any-return]


def ds_persist(parameter: Any) -> bool:
    """Whether it stays whole (``param_persistence_threshold``)."""
    return not parameter._zoo_bucket.partitioned


def ds_active_sub_modules(parameter: Any) -> set[int]:
    """Empty: zoo counts what uses a bucket, not a parameter. Programs clear it before they generate."""
    found: set[int] = parameter.__dict__.setdefault("_zoo_ds_modules", set())
    return found


def ds_process_group(parameter: Any) -> Any:
    """The ranks that split it."""
    return getattr(parameter._zoo_bucket.shard_group, "group", None)


def is_external_param(parameter: Any) -> bool:
    """Whether a module that does not own it has been told, or was found, to use it."""
    bucket = parameter._zoo_bucket
    owner = bucket.owner()
    runtime = getattr(owner, "runtime", None)
    return runtime is not None and any(bucket in unit.external for unit in runtime.units)


for _read in (
    ds_id, ds_shape, ds_numel, ds_status, ds_tensor, ds_persist, ds_active_sub_modules, ds_process_group,
    is_external_param,
):  # fmt: skip
    setattr(ShardedParameter, _read.__name__, _of_stage3(_read))


class _Gathering:
    """What ``all_gather_coalesced()`` returns."""

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters

    def wait(self, **_: Any) -> None:
        """The parameters are whole after this, on every rank."""
        for bucket in _buckets_of(self._parameters):
            bucket.owner().wait([bucket])


def _buckets_of(parameters: Iterable[Any]) -> list[Any]:
    """The buckets of these parameters, each once, in the order that all ranks have."""
    return sorted({p._zoo_bucket: None for p in parameters}, key=lambda bucket: int(bucket.index))


def all_gather_coalesced(parameter: Any, params: Iterable[Any] | None = None, *_: Any, **__: Any) -> _Gathering:
    """Gather ``params``, by default this one: they are whole when ``wait()`` of what is returned is over, until the
    next forward or :func:`partition` lets them go. Collective. To write into them use ``GatheredParameters``."""
    return _Gathering([parameter] if params is None else list(params))


def all_gather(parameter: Any, param_list: Iterable[Any] | None = None, *_: Any, **__: Any) -> None:
    """Gather these parameters, by default this one, as :func:`all_gather_coalesced` and its ``wait()`` do."""
    all_gather_coalesced(parameter, param_list).wait()


def partition(
    parameter: Any, param_list: Iterable[Any] | None = None, hierarchy: int = 0, has_been_updated: bool = False
) -> None:  # fmt: skip
    """Let these parameters go, by default this one: each rank has its part again.

    Raises:
        ValueError: ``has_been_updated``: who has written, and what the optimizer keeps, is not known here.
    """
    if has_been_updated:
        raise ValueError(
            "partition(has_been_updated=True) does not say which rank's values count. Write inside of `with "
            "GatheredParameters(params, modifier_rank=0)`."
        )
    for bucket in _buckets_of([parameter] if param_list is None else param_list):
        bucket.owner().reshard([bucket])


def ds_summary(parameter: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """What there is to know of it, for a message."""
    return {
        "id": ds_id(parameter), "status": ds_status(parameter).name, "numel": parameter.numel(),
        "ds_numel": ds_numel(parameter), "shape": tuple(parameter.shape), "ds_shape": tuple(ds_shape(parameter)),
        "requires_grad": parameter.requires_grad, "persist": ds_persist(parameter),
        "ds_tensor.shape": tuple(ds_tensor(parameter).shape),
    }  # fmt: skip


def _methods_of_stage3() -> None:
    for method in (all_gather_coalesced, all_gather, partition, ds_summary):

        def bound(parameter: Any, method: Any = method) -> Any:
            return functools.partial(method, parameter)

        bound.__name__, bound.__doc__ = method.__name__, method.__doc__
        setattr(ShardedParameter, method.__name__, _of_stage3(bound))


_methods_of_stage3()


class GatheredParameters(_Gathered):
    """As :class:`zoo.zero.GatheredParameters`, and with three habits of DeepSpeed's.

    What is no tensor among ``params`` is passed over, None too. So are, without ``modifier_rank``, parameters that are
    whole on every rank (stages 0 to 2): what all ranks write into them stays. And tensors that are taken inside, such
    as a ``state_dict()``, keep the values of then when the parameters are partitioned again, in memory of their own;
    under zoo.zero they are refused.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        given: Any = params if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
        tensors: list[Any] = [p for p in given if isinstance(p, torch.Tensor)]
        if modifier_rank is None:
            tensors = [p for p in tensors if not isinstance(p, ShardedParameter) or _is_stage3(p)]
        super().__init__(tensors, modifier_rank, fwd_module, enabled)
        self._taken: dict[Any, int] = {}

    def __enter__(self) -> None:
        super().__enter__()
        self._taken = {bucket: bucket.parameters.taken() for bucket in self._held if bucket.partitioned}

    def _let_go(self, *, restore: bool, forget: bool) -> None:
        for bucket, before in self._taken.items():
            if bucket.active == 1 and bucket.parameters.live and bucket.parameters.taken() > before:
                bucket.parameters.renew()
        self._taken = {}
        super()._let_go(restore=restore, forget=forget)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """As :func:`zoo.zero.register_external_parameter`.

    Raises:
        RuntimeError: ``parameter`` is no ``nn.Parameter``.
    """
    try:
        _register(module, parameter)
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """As :func:`zoo.zero.unregister_external_parameter`.

    Raises:
        RuntimeError: ``parameter`` is not registered, or is no ``nn.Parameter``.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"unregister_external_parameter got a {type(parameter).__name__}; it takes an nn.Parameter.")
    try:
        _unregister(module, parameter)
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype, target_device: torch.device
) -> Callable[..., Any]:
    """``fn``, a constructor of tensors, with what has floating point in ``target_fp_dtype``; on ``target_device``
    unless a call says ``device=``.

    zoo's ``Init`` replaces no constructors; programs that keep DeepSpeed's from doing so look for this.
    """

    @functools.wraps(fn)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("device", target_device)
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return make
