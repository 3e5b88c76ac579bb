"""Parameters whole and in their shapes, for an optimizer that looks at more of one than its elements.

That fits where no rank has only a part of a state: at stage 0, and where one rank is alone. What such an optimizer gets
are the model's own parameters, if their memory is what it updates; while it runs they are ordinary ones, with
``.grad`` and ``.data`` as torch has them. Of 16-bit parameters it gets fp32 masters, in the same shapes and with the
same attributes, which are other objects.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from zoo.shard.buckets import Bucket
from zoo.shard.guard import assign_data, grad_dtype, raw_data, raw_grad, raw_grad_of
from zoo.shard.offload.tiers import Tier
from zoo.shard.quantised_parameters import class_of, ordinary
from zoo.shard.roles import PARAMETER
from zoo.zero.update.segments import Segment, original_of, updated_dtype
from zoo.zero.update.tensor_collectives import is_part

if TYPE_CHECKING:
    from zoo.zero.update.probe import Tried, Wrapped

_log = logging.getLogger("zoo.zero")
_CLASS = " Or pass the class (optimizer=torch.optim.AdamW) and its arguments (lr=3e-4) in the place of an instance."


class WholeTensor(Segment):
    """All of one parameter; ``tensor`` and ``target`` have its shape.

    Attributes:
        memory: what is updated, where ``tensor`` is the model's own parameter.
    """

    memory: torch.Tensor | None = None
    keeps_any_shape = True

    @property
    def place(self) -> torch.Tensor:
        """The memory that is updated, in the shape of the parameter."""
        return self.tensor if self.memory is None else self.memory

    def gradient(self) -> torch.Tensor:
        """The reduced gradient, in the shape of the parameter."""
        return self.gradients.reduced_all()[self.first : self.first + self.tensor.numel()].view(self.tensor.shape)

    def values(self) -> torch.Tensor:
        """See :meth:`Segment.values`."""
        return self.place.detach().view(-1)

    def moved_to(self, part: torch.Tensor) -> None:
        """See :meth:`Segment.moved_to`."""
        if self.memory is None:
            super().moved_to(part)
        else:
            self.memory = part.view(self.tensor.shape)


def why_split(buckets: Sequence[Bucket], *, in_backward: bool) -> str | None:
    """Why parameters cannot be whole: what has only parts of them, as the end of a sentence; None if they can be."""
    if in_backward:
        return "update_in_backward=True updates parts as they come"
    for bucket in buckets:
        if bucket.placements.states.is_split and bucket.num_chunks > 1:
            return f"{bucket.num_chunks} ranks split the optimizer states, and each has flat parts of parameters"
        if bucket.placements.states.tier is Tier.NVME:
            return "optimizer states on NVMe come and go in flat parts"
        part = next((name for name in bucket.spec.names if is_part(bucket.logical(name)[1])), None)
        if part is not None:
            return f"{part!r} {_PART} {bucket.spec.axes}"
    return None


_PART = "is a part along the mesh axes"


def has_whole_blocks(wrapped: Wrapped, buckets: Sequence[Bucket], *, in_backward: bool, tells: bool) -> bool:
    """Whether an optimizer that quantises its states in blocks gets parameters whole and in their shapes.

    Where it does not, blocks of what ranks split are blocks of their parts: ``tells`` warns of that, by name.
    """
    if why_split(buckets, in_backward=in_backward) is None:
        return True
    cut: list[str] = []
    for bucket in buckets if tells else ():
        length = bucket.layout.size // bucket.num_chunks
        places = zip(bucket.spec.names, bucket.layout.tensors, bucket.layout.offsets, strict=True)
        if bucket.placements.states.is_split:
            cut += [name for name, t, at in places if t.numel and at // length != (at + t.numel - 1) // length]
    if cut:
        _log.warning(
            "%s quantises states in blocks, and ranks split %d of the parameters (%s%s): there blocks begin where a "
            "rank's part does, so that numbers differ from one process's by what quantising loses. Such states cannot "
            "be saved. At stage 0 parameters are whole, and states are saved.",
            getattr(wrapped.make, "__name__", wrapped.make), len(cut), ", ".join(cut[:3]), ", …" if cut[3:] else "",
        )  # fmt: skip
    return False


def cannot_be_unsplit(
    tried: Tried, wrapped: Wrapped, buckets: Sequence[Bucket], *, in_backward: bool
) -> Exception | None:  # fmt: skip
    """What is wrong, for an optimizer that needs parameters as they are; None if it gets them."""
    name = getattr(wrapped.make, "__name__", str(wrapped.make))
    split = why_split(buckets, in_backward=in_backward)
    if split is not None:
        way, others = "Use stage 0, or one rank, where nothing is split", "zoo.optim.Lamb and zoo.optim.Muon do"
        if _PART in split:  # at every stage; and Muon has no way to add up what parts measure
            way, others = "Leave these axes out of the mesh", "zoo.optim.Lamb does"
        return NotImplementedError(
            f"{name} needs the parameters of the model whole and as they are: {tried.why_whole}. Here {split}. {way}; "
            "or use an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...); or one that says "
            f"needs_whole_tensors and takes parts=, as {others}.{_CLASS if wrapped.cannot_rebuild is not None else ''}"
        )
    masters = not getattr(wrapped.make, "keeps_masters", False)
    if tried.objects and not are_parameters(buckets, masters=masters):
        return NotImplementedError(
            f"{name} needs the very parameters of the model: {tried.why_whole}. They are of 16 bits, or on another "
            "device than their optimizer states, and the optimizer gets fp32 copies of them. Train in fp32."
            f"{_CLASS if wrapped.cannot_rebuild is not None else ''}"
        )
    return None


def whole_segments(
    buckets: Sequence[Bucket], groups: Sequence[Mapping[str, Any]], *, masters: bool
) -> list[WholeTensor]:
    """One for each parameter of the buckets, in the order of the groups; those of an instance have frozen ones too."""
    made = {
        id(parameter): _whole(bucket, slot, masters=masters)
        for bucket in buckets
        for slot, parameter in enumerate(bucket.spec.parameters)
    }
    return [made[id(parameter)] for group in groups for parameter in group["params"] if id(parameter) in made]


def are_parameters(buckets: Sequence[Bucket], *, masters: bool) -> bool:
    """Whether :func:`whole_segments` are the model's own parameters."""
    return not any(b.updates_off_device or updated_dtype(b, masters=masters) is not b.spec.dtype for b in buckets)


def _whole(bucket: Bucket, slot: int, *, masters: bool) -> WholeTensor:
    offset, layout = bucket.layout.offsets[slot], bucket.layout.tensors[slot]
    length = bucket.layout.size // bucket.num_chunks
    chunk = min(offset // max(length, 1), bucket.num_chunks - 1)
    start = offset - chunk * length
    stop, shape = start + layout.numel, tuple(layout.shape)
    parameter: Any = bucket.spec.parameters[slot]
    values = bucket.roles[PARAMETER].read()  # from NVMe a copy, which is updated
    part = values[offset : offset + layout.numel].view(shape)
    dtype, group = updated_dtype(bucket, masters=masters), bucket.spec.groups[slot]
    if are_parameters([bucket], masters=masters):
        found = WholeTensor(bucket, chunk, group, start, stop, parameter, None)
        found.memory = part.detach()
        return found
    source = original_of(bucket, chunk, start, stop) if dtype is not part.dtype else None
    source = part if source is None else source.view(shape)
    device = "cpu" if bucket.updates_off_device and not source.is_meta else source.device
    master = source.detach().to(device, dtype, copy=dtype is source.dtype)
    return WholeTensor(bucket, chunk, group, start, stop, ordinary(parameter, master), part)


@contextlib.contextmanager
def ordinary_parameters(segments: Sequence[Segment]) -> Iterator[None]:
    """Those of ``segments`` that are the model's own are ordinary ones inside, whose memory is what is updated.

    Values that an optimizer puts into other memory (``p.data = ...``) are brought back.
    """
    own = [s for s in segments if isinstance(s, WholeTensor) and s.memory is not None and not s.memory.is_meta]
    kept: list[tuple[type, torch.Tensor, torch.Tensor | None]] = []
    with torch._C.DisableTorchFunctionSubclass():
        for segment in own:
            parameter: Any = segment.tensor
            kept.append((type(parameter), raw_data(parameter), raw_grad_of(parameter)))
            parameter.__class__ = class_of(parameter)
            raw_grad(parameter, None)
            assign_data(parameter, segment.place)
            grad_dtype(parameter, parameter.dtype)
    try:
        with _unsafe_preserve_version_counter(tuple(s.tensor for s in own)):
            yield
    finally:
        for segment, (cls, data, grad) in zip(own, kept, strict=True):
            _give_back(segment, cls, data, grad)


def _give_back(segment: WholeTensor, cls: type, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    parameter: Any = segment.tensor
    memory = segment.place
    if parameter.data_ptr() != memory.data_ptr() or parameter.stride() != memory.stride():
        memory.copy_(parameter.detach())
    raw_grad(parameter, None)
    assign_data(parameter, data)
    grad_dtype(parameter, segment.gradients.dtype)
    parameter.__class__ = cls
    raw_grad(parameter, grad)
