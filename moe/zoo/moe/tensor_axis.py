"""Tokens that are repeated over tensor-parallel ranks: each dispatches its share, and all get the whole back.

Legend: P tensor-parallel ranks; T tokens, which all of them have.
"""

from __future__ import annotations

from typing import Any

import torch

from zoo.comm import Communicator

Tensor = torch.Tensor


def share_of(num_tokens: int, comm: Communicator) -> tuple[int, int]:
    """[begin, end) of this rank, equally many on each but for the last ones."""
    size = -(-num_tokens // comm.size)
    return min(comm.rank * size, num_tokens), min((comm.rank + 1) * size, num_tokens)


def split_tokens(t: Tensor, comm: Communicator) -> Tensor:
    """This rank's share of (T, …), which is the same on all ranks; the gradient is gathered from all of them."""
    found: Tensor = _Split.apply(t, comm)
    return found


def gather_tokens(t: Tensor, num_tokens: int, comm: Communicator) -> Tensor:
    """(T, …) of every rank's share; the gradient, the same on all ranks, is cut into shares."""
    found: Tensor = _Gather.apply(t, num_tokens, comm)
    return found


def _gathered(t: Tensor, num_tokens: int, comm: Communicator) -> Tensor:
    size = -(-num_tokens // comm.size)
    mine = t.new_zeros(size, *t.shape[1:])
    mine[: len(t)] = t
    whole = t.new_empty(size * comm.size, *t.shape[1:])
    comm.all_gather(whole.view(-1), mine.view(-1), label="tokens of tensor ranks").wait()
    return whole[:num_tokens]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, comm: Communicator) -> Tensor:
        ctx.num_tokens, ctx.comm = len(t), comm
        begin, end = share_of(len(t), comm)
        return t[begin:end].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(gradient, ctx.num_tokens, ctx.comm), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, num_tokens: int, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return _gathered(t, num_tokens, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Split.apply(gradient, ctx.comm), None, None
