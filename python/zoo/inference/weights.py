"""Weights that are trained in flat shards, as the tensor-parallel parts of another model that generates.

A rank of N trains P/N elements of each bucket, a run of its flat buffer, and generates with the boxes of its heads and
features. What goes where is planned once (:func:`zoo.layout.reshard`); then each bucket is one all-to-all, in which an
element that a rank has and needs itself does not travel. A rank receives no more than its own part.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.layout import Box, Copy, Held, Piece, boxes_of, logical_name, reshard, split_of

Tensor = torch.Tensor
Pieces = Sequence[Piece]


@dataclass(frozen=True)
class _Sent:
    """Elements for one rank: a box of ``source`` with these strides, from this element on."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, source: Tensor) -> Tensor:
        """A view."""
        return source.as_strided(self.sizes, self.strides, source.storage_offset() + self.offset)


@dataclass
class _Move:
    """One bucket.

    Attributes:
        role: keeps this rank's elements. whole: the buffer in which it has all of them, None where it has a shard.
        sends: for each rank, in the order in which it takes them. places: likewise where elements of each rank go.
        kept: what this rank has and needs itself, and where it goes.
        is_local: no rank needs anything of another one.
    """

    role: Any
    whole: Any
    sends: list[list[_Sent]]
    places: list[list[Tensor]]
    kept: list[tuple[_Sent, Tensor]]
    is_local: bool

    def splits(self) -> tuple[list[int], list[int]]:
        """How many elements come from each other rank, and go to each."""
        came = [sum(view.numel() for view in views) for views in self.places]
        return came, [sum(torch.Size(one.sizes).numel() for one in of) for of in self.sends]


class Resharded:
    """Fills a split model from the shards of one that is trained.

    Args:
        sharded: the model that is trained, whole on each data rank.
        model: split over the ranks of a group, its parameters on "meta": they get memory, in the dtypes that compute.
        comm: all ranks that have shards.

    Attributes:
        sent_bytes: that this rank sends others at each :meth:`refresh`. num_bytes: of the parts of this rank.

    Raises:
        ValueError: the two have other parameters, or the one that is trained is in parts itself; on all ranks.
    """

    def __init__(self, sharded: Any, model: nn.Module, comm: Communicator) -> None:
        self.comm, self._sharded, self._model = comm, sharded, model
        parts = _parts_of(model)
        described = {name: (split_of(one).shape or tuple(one.shape), _part(one)) for name, one in parts.items()}
        ranges = [_range(bucket) for bucket in sharded.buckets]
        everywhere = comm.all_gather_object((described, ranges))
        self._check(described)
        made: dict[int, nn.Parameter] = {}
        self.num_bytes, self._moves = 0, list[_Move]()
        for index, bucket in enumerate(sharded.buckets):
            names = _names(bucket)
            source = Held(
                {names[t.name]: t.shape for t in bucket.layout.tensors if t.name in names},
                [_named(bucket.layout.pieces(*ranges[index]), names) for _, ranges in everywhere],
            )
            targets = [_targets(names.values(), described) for described, _ in everywhere]
            target = Held({name: described[name][0] for name in names.values()}, [p for p, _ in targets])
            mine = {name: _made(model, parts[name], bucket.spec.dtype, made) for name in names.values()}
            self.num_bytes += sum(one.nbytes for one in mine.values())
            self._moves.append(self._move(bucket, reshard(source, target), targets[comm.rank], mine))
        self.sent_bytes = sum(sum(move.splits()[1]) * move.role.dtype.itemsize for move in self._moves)

    def _check(self, described: dict[str, Any]) -> None:
        trained = {name for bucket in self._sharded.buckets for name in _names(bucket).values()}
        for bucket in self._sharded.buckets:
            if any(split_of(one).box is not None for one in bucket.spec.parameters):
                raise ValueError(
                    f"{bucket.label} of the model that is trained is in parts itself (tensor or expert parallel), and "
                    "its boxes are not dealt anew: generate in place."
                )
        missing, more = sorted(set(described) - trained), sorted(trained - set(described))
        if missing or more:
            said = [f"only the one that generates has {', '.join(missing[:3])}"] if missing else []
            said += [f"only the one that is trained has {', '.join(more[:3])}"] if more else []
            raise ValueError(f"the models have other parameters: {'; '.join(said)}. Give make= that makes the same.")

    def _move(
        self, bucket: Any, copies: list[Copy], target: tuple[Pieces, list[Any]], mine: dict[str, nn.Parameter]
    ) -> _Move:  # fmt: skip
        rank, size = self.comm.rank, self.comm.size
        pieces, laid = target
        begins = [piece.offset for piece in pieces]
        sends: list[list[_Sent]] = [[] for _ in range(size)]
        places: list[list[Tensor]] = [[] for _ in range(size)]
        kept: list[tuple[_Sent, Tensor]] = []
        for copy in sorted(copies):
            sent, view = _Sent(copy.src_offset, copy.box.sizes, copy.src_strides), None
            if copy.dst_rank == rank:
                at = bisect.bisect_right(begins, copy.dst_offset) - 1
                view = mine[pieces[at].name].detach()[laid[at].here_of(copy.box).ranges]
            if copy.src_rank == rank and view is not None:
                kept.append((sent, view))
            elif copy.src_rank == rank:
                sends[copy.dst_rank].append(sent)
            elif view is not None:
                places[copy.src_rank].append(view)
        local = all(copy.src_rank == copy.dst_rank for copy in copies)
        whole = None if bucket.partitioned else bucket.parameters
        return _Move(bucket.roles["parameter"], whole, sends, places, kept, local)

    @torch.no_grad()
    def refresh(self) -> None:
        """The parts become those of the weights as they are now. Collective over the ranks of ``comm``.

        While a bucket is on its way the one before is put into its places: two are in memory at once.
        """
        self._sharded.refuse_closed()
        self._sharded.settle()
        before: tuple[Any, Tensor, _Move] | None = None
        for move in self._moves:
            source = move.role.read() if move.whole is None else move.whole.full
            sent: tuple[Any, Tensor, _Move] | None = None
            if not move.is_local:
                came, went = move.splits()
                given, out = source.new_empty(sum(went)), source.new_empty(sum(came))
                _pack(given, source, move.sends)
                handle = self.comm.all_to_all_uneven(out, given, came, went, label="weights for generation")
                sent = handle, out, move
            for one, view in move.kept:
                view.copy_(one.of(source))
            _unpack(before)
            before = sent
        _unpack(before)
        self._copy_buffers()

    def _copy_buffers(self) -> None:
        theirs = dict(self._sharded.module.named_buffers())
        for name, buffer in self._model.named_buffers():
            own = theirs.get(name)
            if own is not None and own.shape == buffer.shape:
                buffer.copy_(own)


def _pack(given: Tensor, source: Tensor, sends: list[list[_Sent]]) -> None:
    at = 0
    for one in (one for of in sends for one in of):
        there = one.of(source)
        given[at : at + there.numel()].view(one.sizes).copy_(there)
        at += there.numel()


def _unpack(arrived: tuple[Any, Tensor, _Move] | None) -> None:
    if arrived is None:
        return
    handle, out, move = arrived
    handle.wait()
    at = 0
    for view in (view for views in move.places for view in views):
        view.copy_(out[at : at + view.numel()].view(view.shape))
        at += view.numel()


def _range(bucket: Any) -> tuple[int, int]:
    """The elements of the flat buffer that this rank has."""
    return bucket.own_range if bucket.partitioned else (0, bucket.layout.size)


def _names(bucket: Any) -> dict[str, str]:
    """By the name at construction, that in the whole model, of parameters that it still has."""
    found = {key: bucket.logical(key)[0] for key in bucket.spec.names}
    return {key: name for key, name in found.items() if name not in bucket.gone}


def _named(pieces: Pieces, names: dict[str, str]) -> list[Piece]:
    return [Piece(names[one.name], one.box, one.offset) for one in pieces if one.name in names]


def _part(parameter: nn.Parameter) -> Any:
    said = split_of(parameter)
    return Box.whole(tuple(parameter.shape)) if said.box is None else said.box


def _parts_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, under its first name."""
    return {logical_name(model, name): one for name, one in model.named_parameters()}


def _targets(names: Iterable[str], described: dict[str, Any]) -> tuple[list[Piece], list[Any]]:
    """The boxes of a rank's parts one after the other, and where each lies in its part."""
    pieces: list[Piece] = []
    laid: list[Any] = []
    at = 0
    for name in names:
        for one in boxes_of(described[name][1]):
            pieces.append(Piece(name, one.box, at))
            laid.append(one)
            at += one.box.numel
    return pieces, laid


def _made(model: nn.Module, parameter: nn.Parameter, dtype: torch.dtype, made: dict[int, nn.Parameter]) -> nn.Parameter:
    """Give a parameter on "meta" memory, wherever modules have it."""
    device = next((b.device for b in model.buffers() if not b.is_meta), torch.device("cpu"))
    empty = torch.empty(parameter.shape, dtype=dtype, device=device)
    found = made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    found.__dict__.update(parameter.__dict__)
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is parameter:
                module._parameters[name] = found
    return found
