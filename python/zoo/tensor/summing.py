"""Gradients of parameters that are whole on every rank, for loops without a ZeRO optimizer."""

from __future__ import annotations

import torch
from torch import nn

from zoo.layout import split_of
from zoo.tensor.layers import part_of
from zoo.tensor.plans import AXIS


@torch.no_grad()
def sum_gradients(model: nn.Module, *, axis: str = AXIS) -> None:
    """Add up over ranks the gradients of which each rank has a summand: of keys and values that several ranks need, of
    norms of heads, of what sees a share of the tokens.

    For a split model under a plain torch optimizer, once between ``backward`` and ``step``; ``zoo.zero`` does it by
    itself. Collective over the axis. A parameter without a gradient on some ranks gets that of the others; one that
    asks for none is left out.
    """
    comm = next((part.region.comm for module in model.modules() if (part := part_of(module)) is not None), None)
    if comm is None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and axis in split_of(parameter).partial:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad.contiguous()
            comm.all_reduce(grad).wait()
            parameter.grad = grad
