"""The training state of a ZeRO optimizer as logical slices: what a checkpoint is made of.

Every element of every logical tensor is owned by exactly one rank, whatever the stage, so the slices of all ranks
together are the state of the run, and any other placement can be filled from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from zoo.layout import Box, Slice, Stored
from zoo.layout import StateSlice as StateSlice
from zoo.shard.buckets import Bucket
from zoo.shard.roles import PARAMETER
from zoo.zero.update.segments import Segment

Reader = Callable[..., torch.Tensor]
"""``read(name, role, start, length)``: these elements as a 1-D tensor; KeyError when there is no such state. For parts
of a tensor that are no run of it, ``start`` is a :class:`zoo.layout.Box` of ``length`` elements. A reader that has a
keyword ``out`` gets the memory where they belong, and may fill and return it: it saves a copy."""


def taking_out(read: Reader) -> Reader:
    """The reader itself where it has the keyword ``out``; otherwise one that has it and leaves it alone."""
    if "out" in inspect.signature(read).parameters:
        return read
    return lambda name, role, start, length, out=None: read(name, role, start, length)


def _settle(room: torch.Tensor, value: torch.Tensor) -> None:
    """What a reader returned is in ``room`` now."""
    if value is not room:
        room.copy_(value)


def slices_of(
    segments: Iterable[Segment], buckets: Sequence[Bucket], *, owned: bool = True,
    means: Mapping[int, torch.Tensor] | None = None,
) -> Iterator[StateSlice]:  # fmt: skip
    """The slices this rank holds; with ``owned`` only its own chunk of every bucket, so that no two ranks overlap.

    ``means``: by ``id`` of a segment what its parameters are said to be, where they are not its own.
    """
    for segment in segments:
        if owned and not segment.bucket.owns(segment.chunk):
            continue
        for role, own in segment.sources().items():
            source = (means or {}).get(id(segment), own) if role == PARAMETER else own
            yield from _cut(segment.bucket, segment.slices(), role, source)
        yield from _of_other_shapes(segment)
    for bucket in buckets:
        if not bucket.spec.trainable:
            if owned and not any(bucket.owns(chunk) for chunk in range(bucket.num_chunks)):
                continue
            low, high = bucket.own_range if owned else bucket.kept_range
            values = bucket.exact.source(low - bucket.exact.first, high - low)  # as they came, where that is kept
            yield from _cut(bucket, bucket.layout.slices(low, high), "parameter", values, constant=True)


def gone_of(buckets: Iterable[Bucket]) -> frozenset[str]:
    """What parameters that the model does not have any more are called in slices: no checkpoint has these."""
    return frozenset().union(*(bucket.gone for bucket in buckets))


def parameters_of(buckets: Iterable[Bucket]) -> list[Run]:
    """The parameters that the model has, as runs of logical tensors: names and shapes, whatever state they are in."""
    return [run for b in buckets for run in runs_of(b, b.layout.slices()) if run.name not in b.gone]


APART = "apart."
"""Roles of what each of the ranks that repeat a state has for itself: ``apart.<rank among them>.<role>``."""


APART_WITH_MEANS = 2.0
"""The number ``zero/apart`` of a state whose parameters are the mean of what the ranks have. With 1, of states saved
earlier, each element of them is that of one rank."""


def means_of(segments: Iterable[Segment]) -> dict[int, torch.Tensor]:
    """By ``id`` of each segment that this rank saves, and of which ranks have values apart, their mean. Collective."""
    found = {}
    for segment in segments:
        repeat = segment.bucket.placements.states.repeat
        if repeat.size == 1 or segment.bucket.routes.feedback is None:
            continue
        total = segment.value().to(torch.float32, copy=True)
        repeat.all_reduce(total).wait()
        if segment.bucket.owns(segment.chunk):
            found[id(segment)] = total.mul_(1.0 / repeat.size)
    return found


def apart_slices(segments: Iterable[Segment]) -> Iterator[StateSlice]:
    """The parameters and states of this rank, where it steps by itself and so do those that repeat them."""
    for segment in segments:
        axes, repeat = segment.bucket.routes.axes, segment.bucket.placements.states.repeat
        if not axes.counts or repeat.size == 1 or segment.bucket.routes.feedback is None:
            continue
        for role, tensor in segment.roles().items():
            yield from _cut(segment.bucket, segment.slices(), f"{APART}{repeat.rank}.{role}", tensor)


def from_ranks_apart(read: Reader, bucket: Bucket, scalars: Mapping[str, float]) -> Reader:
    """Reads what was saved apart: by as many ranks as repeat the state now what each had, by others the mean of all.

    Ranks that never bring the parameters of ``bucket`` together would have other ones for ever: they have the mean too.
    """
    repeat, meets = bucket.placements.states.repeat, bucket.routes.feedback is not None

    def reader(name: str, role: str, start: Any, length: int, out: torch.Tensor | None = None) -> torch.Tensor:
        num_saved = int(_number("peers", name, scalars, 0))
        try:
            if num_saved == repeat.size and meets:
                return read(name, f"{APART}{repeat.rank}.{role}", start, length)
            if role == PARAMETER and scalars["zero/apart"] >= APART_WITH_MEANS:
                return read(name, role, start, length, out=out)
            parts = [read(name, f"{APART}{r}.{role}", start, length).float() for r in range(num_saved)]
        except KeyError:  # what a rank has saved for itself
            return read(name, role, start, length, out=out)
        return torch.stack(parts).mean(0) if parts else read(name, role, start, length, out=out)

    return reader


def feedback_slices(bucket: Bucket, *, owned: bool = True) -> Iterator[StateSlice]:
    """What a collective of ``bucket`` still owes; with ``owned`` of ranks that have the same only one says it."""
    feedback, axes = bucket.routes.feedback, bucket.routes.axes
    if feedback is None:
        return
    if feedback.error is not None and (axes.counts or not owned):
        pieces = bucket.layout.slices(*feedback.error_range)
        yield from _cut(bucket, pieces, f"feedback.{feedback.peers.rank}", feedback.error)
    if feedback.owed is not None and ((axes.counts and feedback.pays) or not owned):
        yield from _cut(bucket, bucket.layout.slices(*feedback.owed_range), "owed", feedback.owed)


def folded_slices(bucket: Bucket) -> Iterator[StateSlice]:
    """The same as one tensor, s + Σ_r e_r / D, on those who make the means: what a load at another number of ranks
    makes of it. Collective over the ranks that have errors for the same elements; nothing here changes.
    """
    feedback, axes = bucket.routes.feedback, bucket.routes.axes
    if feedback is None:
        return
    peers, error, (first, last) = feedback.peers, feedback.error, feedback.error_range
    total = torch.zeros(last - first + 1, dtype=torch.float32, device=bucket.device)
    if error is not None:
        total[:-1] = error
        total[-1] = 1  # somebody has one
    peers.all_reduce(total).wait()
    low, high = feedback.owed_range
    if low == high or not (axes.counts and feedback.pays) or (feedback.owed is None and not total[-1]):
        return
    found = total[low - first : high - first] / feedback.divisor(axes.num_losses, peers.size)
    if feedback.owed is not None:
        found += feedback.owed
    yield from _cut(bucket, bucket.layout.slices(low, high), "owed", found)


def feedback_scalars(buckets: Iterable[Bucket]) -> dict[str, float]:
    """How many ranks have errors for the same elements, and the unit of these: once for all dense parameters, and by
    name for those with mesh axes of their own, which other runs may have without.
    """
    found: dict[str, float] = {}
    for bucket in buckets:
        feedback = bucket.routes.feedback
        if feedback is None:
            continue
        names = [f"/{bucket.logical(name)[0]}" for name in bucket.spec.names] if bucket.spec.axes else [""]
        for name in names:
            found[f"zero/feedback_peers{name}"] = float(feedback.peers.size)
            found[f"zero/feedback_unit{name}"] = feedback.unit
    return found


def _number(what: str, name: str, scalars: Mapping[str, float], default: float) -> float:
    """What :func:`feedback_scalars` said of parameter ``name``."""
    found = scalars.get(f"zero/feedback_{what}/{name}")
    return scalars.get(f"zero/feedback_{what}", default) if found is None else found


def fill_feedback(bucket: Bucket, saved_losses: int, scalars: Mapping[str, float], read: Reader) -> None:
    """Take over what was owed to means of ``saved_losses`` losses, 0 if nothing was.

    Each rank goes on with its own error of a parameter where as many ranks had errors as have them now, of means with
    the same divisor. Elsewhere those who make the means owe the sum.
    """
    feedback, axes = bucket.routes.feedback, bucket.routes.axes
    if feedback is None:
        return
    feedback.forget()
    if not saved_losses:
        return
    peers = feedback.peers
    mine = feedback.divisor(axes.num_losses, peers.size)

    def saved(name: str) -> tuple[int, int, float]:
        """How many ranks had errors, what their sum is divided by, and what one of them is in our unit."""
        num = int(_number("peers", name, scalars, saved_losses))
        unit = _number("unit", name, scalars, 1.0) / feedback.unit
        return num, feedback.divisor(saved_losses, num), unit

    def goes_on(name: str) -> bool:
        num, divisor, _ = saved(name)
        return divisor == mine and num <= peers.size

    # By what there is of all of the bucket: of a tensor that is saved every rank has to save its elements.
    firsts, own = _firsts(bucket), f"feedback.{peers.rank}"
    first, last = feedback.error_range
    runs = list(runs_of(bucket, bucket.layout.slices(first, last)))
    if any(goes_on(run.name) and _has(run, own, read) for run in [*firsts, *runs]):
        error = torch.zeros(last - first, device=bucket.device)
        for run in runs:
            if goes_on(run.name):
                _add(error, run, own, read, saved(run.name)[2])
        feedback.error = error
    low, high = feedback.owed_range
    runs = list(runs_of(bucket, bucket.layout.slices(low, high))) if feedback.pays else []
    roles = {run.name: ["owed", *(["feedback.0"] if not goes_on(run.name) else [])] for run in firsts}
    if runs and any(_has(run, role, read) for run in [*firsts, *runs] for role in roles[run.name]):
        owed = torch.zeros(high - low, device=bucket.device)
        for run in runs:
            num, divisor, unit = saved(run.name)
            _add(owed, run, "owed", read, unit)
            for rank in range(0 if goes_on(run.name) else num):
                _add(owed, run, f"feedback.{rank}", read, unit / divisor)
        feedback.owed = owed


def owed_to_nobody(bucket: Bucket, saved_losses: int, read: Reader) -> list[str]:
    """The parameters of which something was owed to a mean that no ranks make any more: it is left out."""
    if bucket.routes.feedback is not None or not saved_losses:
        return []
    return [run.name for run in _firsts(bucket) if _has(run, "owed", read) or _has(run, "feedback.0", read)]


def _firsts(bucket: Bucket) -> list[Run]:
    """A run of each tensor of the bucket that has elements."""
    return list({run.name: run for run in runs_of(bucket, bucket.layout.slices()) if run.length}.values())


def _look(
    read: Reader, name: str, role: str, start: Any, length: int, out: torch.Tensor | None = None
) -> torch.Tensor | None:  # fmt: skip
    """What ``read`` has there; None where there is no such state."""
    try:
        return read(name, role, start, length, out=out)
    except KeyError:
        return None


def _has(run: Run, role: str, read: Reader) -> bool:
    return _look(read, run.name, role, run.start, 1) is not None


def _add(out: torch.Tensor, run: Run, role: str, read: Reader, factor: float) -> None:
    """Add what ``read`` has of a run, times ``factor``."""
    value = _look(read, run.name, role, run.where, run.length)
    if value is not None:  # other parameters may have been on more ranks
        out[run.offset : run.offset + run.length].add_(value.to(out.device, out.dtype), alpha=factor)


def _cut(
    bucket: Bucket, pieces: Sequence[Slice], role: str, tensor: torch.Tensor | Stored, *, constant: bool = False
) -> Iterator[StateSlice]:
    for run in runs_of(bucket, pieces):
        part = tensor[run.offset : run.offset + run.length]
        yield StateSlice(run.name, role, run.start, run.length, run.shape, part, run.box, constant)


@dataclass(frozen=True)
class Run:
    """Elements [start, start + length) of a logical tensor, at ``offset`` of what some slices describe.

    Where the parameter is a part of it that is no run (columns of a matrix, say), ``length`` elements of a ``box``, in
    its row-major order, of which ``start`` is the first.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int
    box: Box | None = None

    @property
    def where(self) -> int | Box:
        """What a :data:`Reader` is asked for."""
        return self.start if self.box is None else self.box

    def rows(self) -> Iterator[Run]:
        """The same as runs: one for each row of the box."""
        if self.box is None:
            yield self
            return
        offset = self.offset
        for start, length in self.box.runs_in(self.shape):
            yield Run(self.name, self.shape, start, length, offset)
            offset += length


def runs_of(bucket: Bucket, pieces: Iterable[Slice]) -> Iterator[Run]:
    """What slices of this rank's parameters are of logical tensors, by their names in the whole model."""
    for piece in pieces:
        name, split = bucket.logical(piece.name)
        if split.box is None or split.shape is None:
            yield Run(name, bucket.shape_of(piece.name), piece.start, piece.length, piece.offset)
            continue
        offset, whole = piece.offset, Box.whole(split.shape)
        for box in split.box.run(piece.start, piece.stop):
            part = None if box.is_run_in(split.shape) else box
            yield Run(name, split.shape, whole.number_of(box.offsets), box.numel, offset, part)
            offset += box.numel


OF = "::"
"""Between the name of a parameter and that of a state of another shape: together the name of a logical tensor."""


def split_name(name: str, role: str) -> str | None:
    """The parameter whose state ``role``, of another shape, is called ``name``; None if it is none."""
    base, found, last = name.rpartition(OF)
    return base if found and last == role else None


def _of_other_shapes(segment: Segment) -> Iterator[StateSlice]:
    for role, value in segment.of_any_shape().items():
        name = f"{segment.bucket.logical(segment.slices()[0].name)[0]}{OF}{role}"
        yield StateSlice(name, role, 0, value.numel(), tuple(value.shape), value.reshape(-1))


def _check_kinds(segment: Segment, name: str) -> None:
    """Raise ValueError for a state that cannot be saved: it would be lost."""
    saved = segment.of_any_shape()
    lost = {role: value for role, value in segment.others().items() if role not in saved and value is not None}
    for role, value in lost.items():
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(
            f"the optimizer keeps the state {role!r} of {name!r}, {what}; states that can be saved are numbers, and "
            "tensors with one element for each of the parameter's."
        )


def scalars_of(segments: Sequence[Segment]) -> dict[str, float | int]:
    """``"<role>/<name>" -> value`` for the scalar states of every tensor this rank has a part of.

    Raises:
        ValueError: a state that no checkpoint holds, by name.
    """
    found: dict[str, float | int] = {}
    for segment in segments:
        runs = list(runs_of(segment.bucket, segment.slices()))
        if runs:
            _check_kinds(segment, runs[0].name)
        for role, value in segment.numbers().items():
            for run in runs:
                found[f"{role}/{run.name}"] = value
    return found


LATE = "zero/late/"
"""Before the name of a state that a first step does not make: a scalar whose value says what kind it is."""
_ELEMENTS, _NUMBER, _TENSOR = 1.0, 2.0, 3.0


def late_scalars(made_later: Mapping[str, Any]) -> dict[str, float]:
    """What a load needs to know of states that an optimizer makes in a later step than its first, from one of each."""
    return {
        f"{LATE}{role}": _NUMBER if not isinstance(value, torch.Tensor) else _TENSOR if value.dim() == 0 else _ELEMENTS
        for role, value in made_later.items()
    }


def late_roles(scalars: Iterable[str]) -> set[str]:
    """Their names."""
    return {key.removeprefix(LATE) for key in scalars if key.startswith(LATE)}


def _make_late(segment: Segment, piece: Run, read: Reader, scalars: Mapping[str, float]) -> None:
    """Make the states that a first step does not make, where the source has them."""
    for role in sorted(late_roles(scalars) - segment.entries.keys()):
        kind, like = scalars[f"{LATE}{role}"], segment.tensor
        made: Any = None
        if kind == _ELEMENTS:
            value = _look(read, piece.name, role, piece.where, piece.length)
            made = None if value is None else torch.zeros(like.shape, dtype=value.dtype, device=like.device)
        elif (number := scalars.get(f"{role}/{piece.name}")) is not None:
            made = torch.tensor(float(number)) if kind == _TENSOR else number
        if made is not None:
            segment.inner.state[like][role] = made


def fill_segment(segment: Segment, read: Reader, scalars: Mapping[str, float]) -> bool:
    """Load a segment's parameters and states; False if the source has no optimizer state for it.

    The optimizer must have the entries that it makes in a step: they are what is looked for, beside those that it makes
    in later ones.
    """
    pieces = []
    for piece in runs_of(segment.bucket, segment.slices()):
        room = segment.value()[piece.offset : piece.offset + piece.length]
        value = _known(segment.bucket, piece, read, room)
        if value is not None:
            _settle(room, value)
            pieces.append(piece)
    if not pieces:
        return True
    _make_late(segment, pieces[0], read, scalars)
    found: set[bool] = set()
    for role, tensor in segment.states().items():
        if sum(piece.length for piece in pieces) < tensor.numel():
            tensor.zero_()  # padding
        for piece in pieces:
            room = tensor[piece.offset : piece.offset + piece.length]
            value = _look(read, piece.name, role, piece.where, piece.length, room)
            found.add(value is not None)
            if value is None:
                room.zero_()
            else:
                _settle(room, value)
    for role, other in segment.of_any_shape().items():
        value = _look(read, f"{pieces[0].name}{OF}{role}", role, 0, other.numel())
        found.add(value is not None)
        if value is not None:
            other.view(-1).copy_(value)
    for role in segment.numbers():
        numbers = {scalars.get(f"{role}/{piece.name}") for piece in pieces}
        found |= {v is not None for v in numbers}
        if len(numbers) > 1:
            raise ValueError(
                f"the state {role!r} differs between parameters that share an optimizer segment "
                f"({', '.join(p.name for p in pieces)}: {sorted(map(str, numbers))}); give them parameter groups "
                f"of their own."
            )
        number = numbers.pop()
        if role == "step" and number == 0:
            return False  # what was saved before the first step, whatever the states begin with
        if number is not None:
            segment.entries[role] = _like(segment.entries[role], number)
    if len(found) > 1:
        raise ValueError(f"the source holds only part of the optimizer state of {', '.join(p.name for p in pieces)}.")
    return found != {False}


def _known(bucket: Bucket, piece: Run, read: Reader, out: torch.Tensor | None) -> torch.Tensor | None:
    """The parameter's elements; None where neither the source nor the model has it: it stays what it is."""
    try:
        return read(piece.name, "parameter", piece.where, piece.length, out=out)
    except KeyError:
        if piece.name not in bucket.gone:
            raise
        return None


def _like(old: Any, number: float) -> Any:
    """A number as the optimizer keeps it."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, number)
    return type(old)(number) if type(old) in (bool, int, float) else number


def rounded(read: Reader, dtype: torch.dtype) -> Reader:
    """``read`` with parameters rounded to ``dtype``, in which they compute."""

    def found(
        name: str, role: str, start: int | Box, length: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        if role != "parameter":
            return read(name, role, start, length, out=out)
        return read(name, role, start, length).to(dtype)

    return found


def fill_frozen(buckets: Sequence[Bucket], read: Reader) -> None:
    """Load what this rank answers for of frozen buckets, and bring it to all that have them whole. Collective."""
    handles = []
    for bucket in buckets:
        low, high = bucket.kept_range
        with ExitStack() as opened:
            places = [opened.enter_context(role.borrow()) for role in bucket.roles.values()]
            for piece in runs_of(bucket, bucket.layout.slices(low, high)):
                rooms = [place[piece.offset : piece.offset + piece.length] for place in places]
                value = _known(bucket, piece, read, rooms[0] if rooms else None)
                if value is not None:
                    for room in rooms:
                        _settle(room, value)
        handles.append(bucket.executor.publish(bucket))
    for handle in handles:
        if handle is not None:
            handle.wait()
    for bucket in buckets:
        bucket.parameters.written()
