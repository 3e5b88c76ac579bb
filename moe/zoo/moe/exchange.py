"""Expert parallelism: rows go to the rank that has their expert, and their outputs come back.

An exchange is a pair of operations, ``start`` and ``finish``, with anything in between; what ``start`` returns is a
*ticket* for ``finish``: a number that says which message is meant. Gradients take the way back in the same manner:
the gradient of the ticket is the ticket of the message that carries the gradients. So what stands between the two in
forward also runs while the gradients travel. Being operations with fakes, they break no graph of a compiler.

Legend: N expert-parallel ranks, L experts of each; R rows, D.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zoo.comm import Communicator, Handle

Tensor = torch.Tensor

_numbers = itertools.count(1)
_comms: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_of_mesh: dict[tuple[int, tuple[str, ...]], tuple[Communicator, int]] = {}
_on_the_way: dict[int, tuple[Handle, Tensor, Tensor]] = {}


def known_as(comm: Communicator) -> int:
    """The number by which operations find ``comm``, as long as it exists."""
    number = next(_numbers)
    _comms[number] = comm
    return number


def along(mesh: Any, axes: Sequence[str]) -> tuple[Communicator, int]:
    """The ranks along axes of a DeviceMesh, and the number of their communicator: one for all layers that ask with the
    same mesh, kept as long as that. Collective over the mesh the first time."""
    key = id(mesh), tuple(axes)  # equal meshes may not have lived equally long on all ranks
    if key not in _of_mesh:
        comm = Communicator.of_axes(mesh, axes)
        _of_mesh[key] = comm, known_as(comm)
        weakref.finalize(mesh, _of_mesh.pop, key, None).atexit = False
    return _of_mesh[key]


def drop(tickets: Iterable[Tensor]) -> None:
    """Forget messages that nobody will wait for."""
    for ticket in tickets:
        _on_the_way.pop(int(ticket), None)


def ranks_of(comm: int) -> int:
    """How many ranks it has."""
    return _comms[comm].size


def sum_over(t: Tensor, comm: int) -> Tensor:
    """The sum of (n,) of every rank; without a gradient. Collective."""
    found: Tensor = torch.ops.zoo_moe.sum_over(t.detach(), comm)
    return found


def exchange_counts(counts: Tensor, comm: int, chunks: int = 1) -> tuple[Tensor, Tensor]:
    """What each rank will get. Collective, and the one readback of a layer on a GPU.

    Args:
        counts: (C·N·L,) int64: rows for each expert, chunk by chunk and in each rank by rank.
        comm: see :func:`known_as`.
        chunks: C.

    Returns:
        (C, N, L) int64: rows that come for each expert here, by chunk and sender; and (C, 2, N) int64 on the CPU: rows
        that go to each rank, and that come from it.
    """
    found: tuple[Tensor, Tensor] = torch.ops.zoo_moe.exchange_counts(counts, comm, chunks)
    return found


def start(x: Tensor, splits: Tensor, *, comm: int, back: bool = False) -> Tensor:
    """Begin to send rows; returns the ticket.

    Args:
        x: (R, D): those that go to rank 0 first; rows after the last one stay here.
        splits: (2, N), of :func:`exchange_counts`.
        back: rows that came go back to where they came from.
    """
    found: Tensor = torch.ops.zoo_moe.exchange_start(x, splits, comm, back)
    return found


def finish(ticket: Tensor, x: Tensor, splits: Tensor, *, comm: int, back: bool = False, num_rows: int = -1) -> Tensor:
    """Wait for what the other ranks have sent; (``num_rows``, D), rows of rank 0 first, and 0 after the last one.

    Args:
        ticket, x, splits, back: what :func:`start` returned and got.
        num_rows: -1: as many as come.
    """
    found: Tensor = torch.ops.zoo_moe.exchange_finish(ticket, x, splits, comm, back, num_rows)
    return found


@torch.library.custom_op("zoo_moe::sum_over", mutates_args=())
def _sum_over(t: Tensor, comm: int) -> Tensor:
    total = t.clone(memory_format=torch.contiguous_format)
    _comms[comm].all_reduce(total).wait()
    return total


@_sum_over.register_fake
def _(t: Tensor, comm: int) -> Tensor:
    return torch.empty_like(t)


@torch.library.custom_op("zoo_moe::exchange_counts", mutates_args=())
def _counts(counts: Tensor, comm: int, chunks: int) -> tuple[Tensor, Tensor]:
    group = _comms[comm]
    mine = counts.view(chunks, group.size, -1)
    given = mine.transpose(0, 1).contiguous()  # what goes to one rank lies together
    come = torch.empty_like(given)
    group.all_to_all(come.view(-1), given.view(-1), label="counts of experts").wait()
    come = come.transpose(0, 1).contiguous()
    return come, torch.stack([mine.sum(-1), come.sum(-1)], 1).cpu()


@torch.library.custom_op("zoo_moe::exchange_start", mutates_args=())
def _start(x: Tensor, splits: Tensor, comm: int, back: bool) -> Tensor:
    goes, comes = reversed(splits.tolist()) if back else splits.tolist()
    given = x[: sum(goes)].contiguous()
    out = x.new_empty(sum(comes), x.shape[1])
    handle = _comms[comm].all_to_all_uneven(out, given, comes, goes, label="rows of experts")
    number = next(_numbers)
    _on_the_way[number] = handle, out, given
    return torch.tensor(float(number), dtype=torch.float64)


@torch.library.custom_op("zoo_moe::exchange_finish", mutates_args=())
def _finish(ticket: Tensor, x: Tensor, splits: Tensor, comm: int, back: bool, num_rows: int) -> Tensor:
    handle, out, _ = _on_the_way.pop(int(ticket))
    handle.wait()
    if num_rows in (-1, len(out)):
        return out
    return torch.cat([out, out.new_zeros(num_rows - len(out), out.shape[1])])


@_counts.register_fake
def _(counts: Tensor, comm: int, chunks: int) -> tuple[Tensor, Tensor]:
    size = _comms[comm].size
    come = counts.new_empty(chunks, size, counts.shape[0] // (chunks * size))
    return come, counts.new_empty(chunks, 2, size, device="cpu")


@_start.register_fake
def _(x: Tensor, splits: Tensor, comm: int, back: bool) -> Tensor:
    return torch.empty((), dtype=torch.float64, device="cpu")


@_finish.register_fake
def _(ticket: Tensor, x: Tensor, splits: Tensor, comm: int, back: bool, num_rows: int) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size() if num_rows == -1 else num_rows
    return x.new_empty(rows, x.shape[1])


def _start_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, splits, ctx.comm, ctx.back = inputs
    ctx.keeps = _comms.get(ctx.comm)  # the layer may get another mesh before the gradient comes
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(splits)
    ctx.like = x.new_empty(0, x.shape[1])


def _start_backward(ctx: Any, ticket: Tensor) -> tuple[Any, ...]:
    (splits,) = ctx.saved_tensors
    gradient = finish(ticket, ctx.like, splits, comm=ctx.comm, back=not ctx.back, num_rows=ctx.num_rows)
    return gradient, None, None, None


def _finish_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, splits, ctx.comm, ctx.back, _ = inputs
    ctx.keeps = _comms.get(ctx.comm)
    ctx.save_for_backward(splits)


def _finish_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (splits,) = ctx.saved_tensors
    return start(gradient.contiguous(), splits, comm=ctx.comm, back=not ctx.back), None, None, None, None, None


_start.register_autograd(_start_backward, setup_context=_start_context)
_finish.register_autograd(_finish_backward, setup_context=_finish_context)
