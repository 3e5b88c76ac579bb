"""Reading and setting one parameter's fp32 value, gradient or optimizer state, wherever its elements live.

The *full* functions are collective: every rank calls them with the same parameter and gets, or sets, the whole tensor.
The *local* ones are about this rank's elements, a flat tensor: the part of the parameter that lies in this rank's chunk
of its bucket, which may be empty; at stage 0 every rank has all of it. Ranks at the same place of their shard groups
(MiCS) have the same elements and have to set the same values.

Values are in fp32 (fp64 for fp64 parameters), also what is set before the first step. Gradients are the mean over the
ranks, without the loss scale; there is one from ``backward`` until ``step`` or ``zero_grad``, and None at other times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import together
from zoo.shard.buckets import Bucket, bucket_of
from zoo.shard.gradients import BucketGradients
from zoo.shard.guard import ShardedParameter
from zoo.shard.values.whole import Pieces, share_range
from zoo.shard.values.writes import Values, overlaps, write_values
from zoo.zero.update.segments import Segment

if TYPE_CHECKING:
    from zoo.zero.inspection import Inspection
    from zoo.zero.state.optimizer_states import OptimizerStates


@dataclass(frozen=True)
class _Place:
    """Where a parameter is: elements [start, stop) of a bucket's flat buffer."""

    states: OptimizerStates
    bucket: Bucket
    slot: int
    shape: torch.Size
    start: int
    stop: int

    @property
    def optimizer(self) -> Inspection:
        return self.states.optimizer

    @property
    def key(self) -> str:
        """What the bucket knows it by."""
        return self.bucket.spec.names[self.slot]

    @property
    def name(self) -> str:
        """What it is called now."""
        return self.bucket.called(self.slot)

    @property
    def dtype(self) -> torch.dtype:
        spec = self.bucket.spec
        return torch.promote_types(torch.promote_types(spec.dtype, spec.original), torch.float32)

    @property
    def everywhere(self) -> bool:
        """Every rank has all optimizer states: stage 0."""
        return not self.bucket.placements.states.is_split

    def own(self) -> tuple[int, int]:
        """[start, stop) of this rank's elements, in the parameter."""
        low, high = (0, self.bucket.layout.size) if self.everywhere else self.bucket.own_range
        start = min(max(self.start, low), self.stop)
        return start - self.start, max(min(self.stop, high), start) - self.start


def _find(param: Any) -> _Place:
    bucket = bucket_of(param)
    if bucket is None:
        why = (
            "zoo.zero.Init partitioned it, and no optimizer has it yet"
            if isinstance(param, ShardedParameter)
            else "no ZeRO optimizer has it"
        )
        given = f"the tensor of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
        raise ValueError(
            f"{given} is not a parameter of a ZeRO optimizer ({why}). Construct the "
            "optimizer first, and pass a parameter of its model."
        )
    slot = param._zoo_slot
    tensor, offset = bucket.layout.tensors[slot], bucket.layout.offsets[slot]
    states: Any = bucket.states
    if states is None:
        raise ValueError(
            "this model is split over ranks without an optimizer, so that there are no optimizer states and no "
            "fp32 values beside the parameters. Read those by whole_parameters() or inside of `with "
            "GatheredParameters(...)`, write them inside of that (modifier_rank=) or by parameter.data = value; to "
            "train it close() it and construct a ZeRO optimizer."
        )
    return _Place(states, bucket, slot, torch.Size(tensor.shape), offset, offset + tensor.numel)


# What this rank has ----------------------------------------------------------------------------------------------


def _reduced_gradients(place: _Place) -> BucketGradients | None:
    """Those of the bucket, if there are any. Brings gradients together that no_sync() left apart. Collective."""
    optimizer, gradients = place.optimizer, place.bucket.gradients
    optimizer.settle_gradients()
    if gradients is None or not (optimizer.runtime.reduced and gradients.reduced):
        return None
    gradients.pay()
    return gradients


def _fill(out: torch.Tensor, start: int, pieces: Pieces) -> None:
    for base, values in pieces:
        low, high = max(base, start), min(base + values.numel(), start + out.numel())
        if low < high:
            out[low - start : high - start].copy_(values[low - base : high - base])


def _window(place: _Place, start: int, stop: int, pieces: Pieces, dtype: torch.dtype) -> torch.Tensor:
    """Elements [start, stop) of the bucket on every rank. Collective but at stage 0."""
    bucket, comm = place.bucket, place.bucket.shard_group
    place.optimizer.sharded.settle()
    out = torch.zeros(stop - start, dtype=dtype, device=bucket.device)
    _fill(out, start, pieces)
    if place.everywhere or comm.size == 1:
        return out
    if stop - start == bucket.layout.size:
        low, high = bucket.own_range
        comm.all_gather(out, out[low:high], label=f"states of {bucket.label}").wait()
        return out
    share_range(bucket, out, start)
    return out


def _full(place: _Place, pieces: Pieces, dtype: torch.dtype) -> torch.Tensor:
    return _window(place, place.start, place.stop, pieces, dtype).view(place.shape)


def _local(place: _Place, pieces: Pieces, dtype: torch.dtype) -> torch.Tensor:
    low, high = place.own()
    out = torch.zeros(high - low, dtype=dtype, device=place.bucket.device)
    _fill(out, place.start + low, pieces)
    return out


# What the optimizer keeps ----------------------------------------------------------------------------------------


def _kept(place: _Place) -> dict[str, Any]:
    """What this rank knows of the parameter's states: dtypes by key, numbers by key."""
    tensors: dict[str, str] = {}
    numbers: dict[str, float] = {}
    if place.bucket.spec.trainable:
        group = place.bucket.spec.groups[place.slot]
        for segment in place.states.segments(place.bucket):
            if segment.group == group and not tensors and not numbers:
                tensors = {k: str(v.dtype).removeprefix("torch.") for k, v in segment.states().items()}
                numbers = segment.numbers()
    return {"tensors": tensors, "numbers": numbers}


def _agreed_kept(place: _Place) -> dict[str, Any]:
    """What the rank that has the parameter's first element knows, on every rank. Collective but at stage 0."""
    place.optimizer.sharded.settle()
    mine, comm, bucket = _kept(place), place.bucket.shard_group, place.bucket
    if place.everywhere or comm.size == 1:
        return mine
    owner = min(place.start // max(bucket.layout.size // comm.size, 1), comm.size - 1)
    found: dict[str, Any] = comm.broadcast_object(mine, owner)
    return found


def _check_key(place: _Place, kept: Mapping[str, Any], key: str) -> bool:
    """Whether there is such a state; False before the first step, when there is none at all."""
    known = [*kept["tensors"], *kept["numbers"]]
    if known and key not in known:
        raise ValueError(f"{place.name!r} has no optimizer state {key!r}; it has {', '.join(map(repr, known))}.")
    return key in known


# Reading ---------------------------------------------------------------------------------------------------------

_Found = tuple[Pieces, torch.dtype] | torch.Tensor | None
"""Elements of a role that this rank has, and the dtype to read them in; a number; or None where there is no such."""
_Source = Callable[[_Place, bool], _Found]
"""``source(place, agreed)`` finds a role of a bucket; ``agreed``: all ranks ask, and get the same answer."""


def _gradient(place: _Place, agreed: bool) -> _Found:
    gradients = _reduced_gradients(place)
    if agreed and not place.everywhere:  # a rank that has dropped it would not take part in what follows
        place.bucket.agree(
            f"the gradient of {place.name!r}:", "dropped, or never made" if gradients is None else "there"
        )
    if gradients is None:
        return None
    factor, layout, num_chunks = 1.0 / place.optimizer.loss_scale, place.bucket.layout, place.bucket.num_chunks
    pieces = (
        (layout.shard_range(chunk, num_chunks)[0], gradients.reduced_chunk(chunk).to(place.dtype) * factor)
        for chunk in place.bucket.updated_chunks
    )
    return pieces, place.dtype


def _state(place: _Place, agreed: bool, *, key: str) -> _Found:
    kept = _agreed_kept(place) if agreed else _kept(place)
    if not _check_key(place, kept, key):
        return None
    if key in kept["numbers"]:
        return torch.tensor(float(kept["numbers"][key]))
    dtype = torch.promote_types(getattr(torch, kept["tensors"][key]), torch.float32)
    return ((first, roles[key]) for first, roles in place.states.read(place.bucket) if key in roles), dtype


@torch.no_grad()
def _read(param: nn.Parameter, source: _Source, *, whole: bool) -> torch.Tensor | None:
    place = _find(param)
    found = source(place, whole)
    if found is None or isinstance(found, torch.Tensor):
        return found
    return (_full if whole else _local)(place, *found)


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """A copy of the whole fp32 value, in the parameter's shape. Collective."""
    place = _find(param)
    return _full(place, place.bucket.values(), place.dtype)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of the whole gradient, or None where there is none. Collective.

    Raises CollectiveMismatchError where only some of the ranks that split it have it (but at stage 0, where each has
    its own copy).
    """
    return _read(param, _gradient, whole=True)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy of a whole state such as "exp_avg"; a number such as "step" as a tensor without dimensions. Collective.

    None before the first step and for frozen parameters. Raises ValueError for a key that the optimizer does not have.
    """
    return _read(param, partial(_state, key=optim_state_key), whole=True)


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """A flat copy of this rank's elements of the fp32 value."""
    place = _find(param)
    return _local(place, place.bucket.values(), place.dtype)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A flat copy of this rank's elements of the gradient, or None where there is none.

    Collective only if gradients that ``no_sync()`` left on each rank are to be brought together first.
    """
    return _read(param, _gradient, whole=False)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A flat copy of this rank's elements of a state; see :func:`safe_get_full_optimizer_state`."""
    return _read(param, partial(_state, key=optim_state_key), whole=False)


# Many at once ----------------------------------------------------------------------------------------------------


def _bulk(
    params: Iterable[nn.Parameter], source: _Source, *, by_group: bool = False
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """``by_group``: what there is depends on the parameter group too."""
    alike: dict[tuple[int, int], list[_Place]] = {}
    for place in [_find(p) for p in params]:
        number = place.bucket.spec.groups[place.slot] if by_group else 0
        alike.setdefault((place.bucket.index, number), []).append(place)
    for key in sorted(alike):
        group, bucket = alike[key], alike[key][0].bucket
        found = source(group[0], True)
        if found is None or isinstance(found, torch.Tensor):
            yield from ((place.name, None) for place in group)
            continue
        flat = _window(group[0], 0, bucket.layout.size, *found)
        for place in group:
            yield place.name, flat[place.start : place.stop].view(place.shape).clone()


@torch.no_grad()
def get_full_fp32_params(params: Iterable[nn.Parameter]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, whole fp32 value) of many parameters, one collective a bucket; only one bucket is in memory at a time.

    Collective: every rank consumes it to the end.
    """
    return _bulk(params, lambda place, agreed: (place.bucket.values(), place.dtype))


@torch.no_grad()
def get_full_grads(params: Iterable[nn.Parameter]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, whole gradient or None) of many parameters; see :func:`get_full_fp32_params`."""
    return _bulk(params, _gradient)


@torch.no_grad()
def get_full_optimizer_states(
    params: Iterable[nn.Parameter], optim_state_key: str
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, whole state or None) of many parameters; see :func:`get_full_fp32_params`. Not for numbers ("step").

    One collective a bucket and parameter group, which may keep other states: None for those without this one.
    """
    return _bulk(params, partial(_state, key=optim_state_key), by_group=True)


# Setting ---------------------------------------------------------------------------------------------------------


def _agree_to_set(place: _Place, check: Callable[[], Any]) -> None:
    """Run ``check`` on all ranks, which set a value together: where it fails on one, all raise. Collective."""
    together(
        place.bucket.routes.axes.world, f"setting a value of {place.name!r}", check,
        error=lambda text, ranks: ValueError(f"{text} Nothing was set."), plain=ValueError,
    )  # fmt: skip


def _whole_value(place: _Place, value: Any, refuses: Callable[[], Any] = lambda: None) -> torch.Tensor:
    """``refuses``: raises for what else is wrong on this rank; all ranks raise then."""

    def check() -> None:
        refuses()
        if not isinstance(value, torch.Tensor) or value.shape != place.shape:
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else f"none: it is a {type(value).__name__}"
            raise ValueError(
                f"{place.name!r} has shape {tuple(place.shape)}; the value given has {given}. Every rank gives a "
                "tensor of its shape, and that of rank 0 counts."
            )

    place.optimizer.sharded.settle()
    _agree_to_set(place, check)
    flat: torch.Tensor = value.detach().to(place.bucket.device, place.dtype, copy=True).reshape(-1).contiguous()
    if flat.numel():
        place.bucket.routes.axes.world.broadcast(flat).wait()
    return flat


def _local_value(place: _Place, value: Any) -> tuple[int, torch.Tensor]:
    if place.everywhere and place.bucket.routes.axes.world.size > 1:
        raise ValueError(
            f"{place.name!r} is whole on every rank (stage 0), and setting it on one would make the ranks differ. Use "
            "the function of the same name with 'full'."
        )
    low, high = place.own()
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"the value given for {place.name!r} is a {type(value).__name__}; it takes a tensor.")
    if value.numel() != high - low:
        raise ValueError(
            f"this rank has elements [{low}, {high}) of {place.name!r}; the value given has {value.numel()} elements "
            f"instead of {high - low}."
        )
    return low, value.detach().reshape(-1)


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole value, of the parameter's shape; that of rank 0 counts. Collective."""
    place = _find(param)
    _write_param(place, (0, _whole_value(place, value)))


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's elements. Every rank calls it, each with its own."""
    place = _find(param)
    if not place.bucket.partitioned:  # all ranks get the values of each
        _agree_to_set(place, partial(_local_value, place, value))
    _write_param(place, _local_value(place, value))
    if not place.bucket.partitioned:
        handle = place.bucket.executor.publish(place.bucket)
        if handle is not None:
            handle.wait()
        place.bucket.parameters.written()


def _write_param(place: _Place, values: tuple[int, torch.Tensor]) -> None:
    bucket = place.bucket
    if bucket.active:
        raise ValueError(
            f"{place.name!r} is in use: it cannot be set inside of a forward or of GatheredParameters, which has "
            "modifier_rank= for that."
        )
    place.optimizer.runtime.updated()
    if bucket.partitioned:
        place.optimizer.runtime.residency.forget(bucket)
    write_values({bucket: {place.key: values}}, keep_equal=False)


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a whole state, of the parameter's shape; that of rank 0 counts. Collective.

    Raises ValueError before the first step, and for a number such as "step", which parameters share.
    """
    place = _find(param)
    _check_settable(place, _agreed_kept(place), optim_state_key)
    _write_state(place, (0, _whole_value(place, value)), optim_state_key)


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of a state; see :func:`safe_set_full_optimizer_state`."""
    place = _find(param)
    _check_settable(place, _kept(place), optim_state_key)
    _write_state(place, _local_value(place, value), optim_state_key)


def _check_settable(place: _Place, kept: Mapping[str, Any], key: str) -> None:
    if not _check_key(place, kept, key):
        raise ValueError(f"{place.name!r} has no optimizer states yet: they are made in its first step.")
    if key in kept["numbers"]:
        raise ValueError(f"{key!r} is one number for many parameters; it cannot be set for {place.name!r} alone.")


def _write_state(place: _Place, values: tuple[int, torch.Tensor], key: str) -> None:
    given: Values = {place.key: values}

    def change(segment: Segment, roles: dict[str, torch.Tensor]) -> None:
        for offset, part in overlaps(given, segment.slices()):
            roles[key][offset : offset + part.numel()].copy_(part)

    place.states.edit([place.bucket], change)


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole gradient, of the parameter's shape; that of rank 0 counts. Collective, after ``backward``."""
    place = _find(param)
    found = _reduced_gradients(place)
    flat = _whole_value(place, value, lambda: _settable(place, found))
    _write_grad(place, _settable(place, found), 0, flat)


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's elements of the gradient, after ``backward``."""
    place = _find(param)
    gradients = _settable(place, _reduced_gradients(place))
    _write_grad(place, gradients, *_local_value(place, value))


def _settable(place: _Place, gradients: BucketGradients | None) -> BucketGradients:
    if gradients is None:
        raise ValueError(f"{place.name!r} has no gradient to be replaced: call it between backward and step.")
    return gradients


def _write_grad(place: _Place, gradients: BucketGradients, first: int, values: torch.Tensor) -> None:
    layout, num_chunks = place.bucket.layout, place.bucket.num_chunks
    given: Values = {place.key: (first, values.to(place.dtype) * place.optimizer.loss_scale)}
    for chunk in place.bucket.updated_chunks:
        for offset, part in overlaps(given, layout.slices(*layout.shard_range(chunk, num_chunks))):
            with gradients.edited(chunk) as mean:
                mean[offset : offset + part.numel()].copy_(part)
