"""Gradients of parameters that are whole on every rank, for loops without a ZeRO optimizer."""

from __future__ import annotations

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.layout import split_of
from zoo.tensor.layers import part_of
from zoo.tensor.plans import AXIS


@torch.no_grad()
def sum_gradients(model: nn.Module, *, axis: str | None = None) -> None:
    """Add up over ranks the gradients of which each rank has a summand: of keys and values that several ranks need, of
    norms of heads, of what sees a share of the tokens.

    For a split model under a plain torch optimizer, once between ``backward`` and ``step``; ``zoo.zero`` does it by
    itself. Collective over the axis. A parameter without a gradient on some ranks gets that of the others; one that
    asks for none is left out.

    ``torch.nn.utils.clip_grad_norm_`` takes this rank's parts for the whole model, so that each rank is clipped by
    another number: see :func:`gradient_norm`.

    Args:
        axis: along which the model is split; None: it says so itself.

    Raises:
        ValueError: it is split along another one.
    """
    comm, axis = _split(model, axis)
    if comm is None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and axis in split_of(parameter).partial:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad.contiguous()
            comm.all_reduce(grad).wait()
            parameter.grad = grad


@torch.no_grad()
def gradient_norm(model: nn.Module, *, axis: str | None = None) -> torch.Tensor:
    """√ Σ g² over all gradients g of the whole model: the same number on all ranks, whatever the degree.

    After :func:`sum_gradients`, and before ``torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)``.
    Collective over the axis. A tensor (), in fp32 at least. Parts of ranks do not overlap in a model that was split
    with ``training=True``. ``axis``: as above.
    """
    comm, axis = _split(model, axis)
    # Of what all ranks have alike, and of parts.
    squares = [torch.zeros((), dtype=torch.float32) for _ in range(2)]
    for parameter in model.parameters():
        if parameter.grad is not None:
            dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
            square = torch.linalg.vector_norm(parameter.grad, dtype=dtype).square()
            in_parts = int(axis in split_of(parameter).axes)
            squares[in_parts] = squares[in_parts].to(square.device) + square
    if comm is not None:
        parts = squares[1].double()  # of one dtype on ranks whose parameters lack other gradients
        comm.all_reduce(parts).wait()
        squares[1] = parts.to(squares[1].dtype)
    return (squares[0].to(squares[1].device) + squares[1]).sqrt()


def _split(model: nn.Module, axis: str | None) -> tuple[Communicator | None, str]:
    """The ranks that have parts of ``model``, None where it is whole, and the axis along which they do."""
    layers = [(module, part) for module in model.modules() if (part := part_of(module)) is not None]
    if not layers:
        return None, axis or AXIS
    said = [split_of(parameter) for module, _ in layers for parameter in module.parameters(recurse=False)]
    axes = sorted({name for one in said for name in (*one.axes, *one.partial)})
    if len(axes) > 1 if axis is None else axis not in axes:
        raise ValueError(
            f"the model is split along {', '.join(map(repr, axes))}, and axis={axis!r} is asked for; give the one of "
            "zoo.tensor.split."
        )
    return layers[0][1].region.comm, axis or axes[0]
