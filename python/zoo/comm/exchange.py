"""All-to-all as a step of autograd: tensors that are split along one dim become split along another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zoo.comm.communicator import Communicator


def exchange(
    tensors: Sequence[torch.Tensor], comm: Communicator, *, split_dim: int, join_dim: int, label: str = ""
) -> tuple[torch.Tensor, ...]:
    """Cut each tensor along ``split_dim``, send piece r to rank r, join what arrives in rank order along ``join_dim``.

    With P ranks, a tensor with sizes (…, s, …, j, …) in these dims becomes (…, s/P, …, jP, …). If every rank holds the
    r-th part of a tensor along ``join_dim``, every rank then holds all of it there and the r-th part along
    ``split_dim``. All tensors travel in one message, and so do their gradients, which take the way back; the ranks must
    hold equal sizes. Can be differentiated any number of times.

    Args:
        tensors: of one dtype and device; sizes may differ.
        label: what this is, for the communicator's check.

    Raises:
        ValueError: P does not divide a size along ``split_dim``, the two dims are one, dtypes differ, or ``tensors`` is
            one tensor.
    """
    if isinstance(tensors, torch.Tensor):
        raise ValueError(
            f"exchange got one tensor of shape {tuple(tensors.shape)}; it takes several: give (tensor,), and take the "
            "first of what comes back."
        )
    for tensor in tensors:
        ndim = tensor.ndim
        if not (-ndim <= split_dim < ndim and -ndim <= join_dim < ndim) or (split_dim - join_dim) % ndim == 0:
            raise ValueError(
                f"exchange got split_dim={split_dim} and join_dim={join_dim} for a tensor of shape "
                f"{tuple(tensor.shape)}; it takes two different dims of it."
            )
        if tensor.shape[split_dim] % comm.size:
            raise ValueError(
                f"exchange got a tensor of shape {tuple(tensor.shape)} to split along dim {split_dim} over "
                f"{comm.size} ranks; {comm.size} must divide {tensor.shape[split_dim]}."
            )
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise ValueError(f"exchange got tensors of {kinds}; what travels in one message has one dtype and device.")
    if comm.size == 1 or not tensors:
        return tuple(tensors)
    out: tuple[torch.Tensor, ...] = _Exchange.apply(comm, split_dim, join_dim, label, *tensors)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, split_dim: int, join_dim: int, label: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way = comm, split_dim, join_dim, label
        return _move(tensors, comm, split_dim, join_dim, label)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        comm, split_dim, join_dim, label = ctx.way
        back = _Exchange.apply(comm, join_dim, split_dim, f"gradient of {label}" if label else "", *grads)
        return (None, None, None, None, *back)


def _move(
    tensors: Sequence[torch.Tensor], comm: Communicator, split_dim: int, join_dim: int, label: str
) -> tuple[torch.Tensor, ...]:
    # Row r of the message is what goes to rank r: its piece of every tensor, one after the other.
    size = comm.size
    pieces = [torch.stack(t.chunk(size, dim=split_dim)) for t in tensors]
    message = torch.cat([piece.reshape(size, -1) for piece in pieces], dim=1)
    arrived = torch.empty_like(message)
    comm.all_to_all(arrived.view(-1), message.view(-1), label=label).wait()
    joined = []
    columns = torch.split(arrived, [piece[0].numel() for piece in pieces], dim=1)
    for piece, column in zip(pieces, columns, strict=True):
        dim = join_dim % (piece.ndim - 1)
        joined.append(column.reshape(piece.shape).movedim(0, dim).flatten(dim, dim + 1))
    return tuple(joined)
