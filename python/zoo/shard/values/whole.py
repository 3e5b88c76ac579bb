"""Whole parameters one bucket after the other, for what reads all of them without room for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from zoo.comm import Communicator
from zoo.layout import Box, Part, boxes_of
from zoo.shard.buckets import Bucket
from zoo.shard.dtensors import rows_of
from zoo.shard.placement.axes import Axes
from zoo.shard.placement.families import Family
from zoo.shard.roles import ORIGINAL, PARAMETER

Pieces = Iterable[tuple[int, torch.Tensor]]
"""Elements that this rank has: where they begin in the bucket's flat buffer, and their values."""


def whole_parameters(buckets: Iterable[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole value) of every parameter of these buckets that the model still has, as the ranks keep it, one
    bucket gathered at a time.

    Collective: every rank has to go to the end. A tensor is the parameter's memory and valid until the next one is
    asked for. What was gathered before stays so. Where an optimizer lets ranks have parameters of their own for some
    steps it is the mean of theirs.
    """
    for bucket in buckets:
        with _whole(bucket) as views:
            yield from ((name, views[slot]) for slot, name in bucket.named())


@contextlib.contextmanager
def _whole(bucket: Bucket) -> Iterator[list[torch.Tensor]]:
    """A view of each parameter of a bucket, which is gathered for as long."""
    parameters = bucket.parameters
    stays = parameters.live and not (parameters.rounds and not bucket.active)
    hidden = parameters.refused
    bucket.executor.wait(bucket, exact=True)
    try:
        yield bucket.views(_mean(bucket, parameters.full) if bucket.apart() else parameters.full)
    finally:
        if not stays:
            bucket.executor.reshard(bucket)
        elif hidden:
            bucket.executor.hide(bucket)


def _mean(bucket: Bucket, full: torch.Tensor) -> torch.Tensor:
    """Of what the ranks have that repeat the bucket. Collective over these."""
    repeat = bucket.placements.states.repeat
    total = full.detach().to(torch.float32, copy=True)
    repeat.all_reduce(total).wait()
    return total.mul_(1.0 / repeat.size).to(full.dtype)


def share_range(bucket: Bucket, out: torch.Tensor, start: int) -> None:
    """Elements [start, start + len(out)) of a bucket's flat buffer, of which each rank has put its own into ``out``.

    Collective over the ranks that split the bucket.
    """
    comm, stop, handles = bucket.shard_group, start + out.numel(), []
    for rank in range(comm.size):
        low, high = bucket.layout.shard_range(rank, comm.size)
        low, high = max(low, start), min(high, stop)
        if low < high:
            handles.append(comm.broadcast(out[low - start : high - start], rank))
    for handle in handles:
        handle.wait()


class WholeModel:
    """The parameters of all ranks that the model still has, under their names in the whole model: parts along other
    mesh axes are joined.

    Collective over all ranks, as is the iteration, in which every rank goes to the end.

    Attributes:
        described: dtype and shape by name.
    """

    def __init__(
        self, buckets: Iterable[Bucket], families: Mapping[Family, Axes], layers: Communicator | None = None
    ) -> None:  # fmt: skip
        self._layers = layers
        self._buckets = [(bucket, families[bucket.spec.axes].parts) for bucket in buckets]
        self._pieces: dict[tuple[Bucket, int], list[_Piece]] = {}
        self.described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for bucket, parts in self._buckets:
            slots = [slot for slot, _ in bucket.named()]
            mine = [_piece(bucket, slot) for slot in slots]
            everybody = [mine] if parts is None else parts.all_gather_object(mine)
            for slot, pieces in zip(slots, zip(*everybody, strict=True), strict=True):
                self._pieces[bucket, slot] = list(pieces)
                self.described |= {called: (bucket.spec.dtype, shape) for called, shape, _ in pieces}
        self._of_layers = [self.described] if layers is None else layers.all_gather_object(self.described)
        for there in self._of_layers:
            self.described = {**there, **self.described}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value); valid until the next one is asked for."""
        layers, done = self._layers, set[str]()  # what several stages have comes from the first
        if layers is None:
            yield from self._here()
            return
        for number, there in enumerate(self._of_layers):
            if number == layers.rank:
                for name, tensor in self._here():
                    if name not in done:
                        layers.broadcast(tensor.detach().contiguous(), src=number).wait()
                        yield name, tensor
            else:
                for name, (dtype, shape) in there.items():
                    if name not in done:
                        tensor = torch.empty(shape, dtype=dtype, device=self._device)
                        layers.broadcast(tensor, src=number).wait()
                        yield name, tensor
            done |= there.keys()

    @property
    def _device(self) -> torch.device:
        return self._buckets[0][0].device

    def _here(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, parts in self._buckets:
            with _whole(bucket) as views:
                for slot, tensor in enumerate(views):
                    pieces = self._pieces.get((bucket, slot))
                    if pieces is not None:
                        yield from [(pieces[0][0], tensor)] if parts is None else _joined(tensor, pieces, parts)


_Piece = tuple[str, tuple[int, ...], Part]
"""Name and shape of a whole tensor, and a part of it."""


def _piece(bucket: Bucket, slot: int) -> _Piece:
    key = bucket.spec.names[slot]
    called, split = bucket.logical(key)
    shape = bucket.shape_of(key) if split.shape is None else split.shape
    return called, shape, Box.whole(shape) if split.box is None else split.box


def _joined(tensor: torch.Tensor, pieces: list[_Piece], parts: Communicator) -> Iterator[tuple[str, torch.Tensor]]:
    """What the ranks' parts are together: one tensor, or several where each part is one of its own."""
    most = max(part.numel for _, _, part in pieces)
    mine = tensor.new_zeros(most)
    mine[: tensor.numel()] = tensor.detach().reshape(-1)
    every = tensor.new_empty(parts.size * most)
    parts.all_gather(every, mine, label="parts of a parameter").wait()
    found: dict[str, torch.Tensor] = {}
    for r, (name, shape, part) in enumerate(pieces):
        whole = found.setdefault(name, tensor.new_zeros(shape))
        there = every[r * most : r * most + part.numel].view(part.sizes)
        for laid in boxes_of(part):
            whole[laid.box.ranges] = there[laid.here.ranges]
    yield from found.items()


def whole_values(bucket: Bucket, *, trains: bool) -> torch.Tensor:
    """(P,) what a bucket's parameters are when the model is given back; they are whole now. Collective.

    In the dtype in which they came, and as exact as they are kept: from the masters of the optimizer, or from what
    frozen parameters came with. These count where they round to what the parameters are: anything else was written
    there by somebody, and counts itself. Where nothing was trained parameters stay in the dtype that computes.
    """
    full, spec = bucket.parameters.full, bucket.spec
    if not trains or spec.original is spec.dtype:
        return full
    out = full.to(spec.original)
    if not spec.keeps_originals:
        return out
    low, high = bucket.kept_range
    # What a failed step left is of no one step.
    there = ORIGINAL in bucket.roles or (bucket.states is not None and bucket.states.are_whole)
    for base, values in bucket.values() if there else ():
        start, stop = max(base, low), min(base + values.numel(), high)
        if start < stop:
            exact = values[start - base : stop - base].to(out.device)
            same = exact.to(full.dtype) == full[start:stop]
            out[start:stop] = torch.where(same, exact, full[start:stop].to(exact.dtype)).to(spec.original)
    if bucket.placements.states.is_split:
        bucket.shard_group.all_gather(out, out[low:high], label=f"original values of {bucket.label}").wait()
    return out


@torch.no_grad()
def parameter_rows(bucket: Bucket, slot: int) -> torch.Tensor:
    """This rank's rows of a partitioned parameter; what is gathered meanwhile is this one. Collective."""
    tensor, offset = bucket.layout.tensors[slot], bucket.layout.offsets[slot]
    whole = torch.empty(tensor.numel, dtype=bucket.spec.dtype, device=bucket.device)
    first, last = bucket.own_range
    low, high = max(first, offset), min(last, offset + tensor.numel)
    if low < high:
        whole[low - offset : high - offset].copy_(bucket.roles[PARAMETER].read(low - first, high - low))
    share_range(bucket, whole, offset)
    return rows_of(whole.view(tensor.shape), bucket.shard_group, bucket.device)
