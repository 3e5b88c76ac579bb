"""The gradients of a split model, put together."""

from __future__ import annotations

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.layout import boxes_of, split_of


def whole_gradients(model: nn.Module, comm: Communicator) -> dict[str, torch.Tensor]:
    """By name, of every parameter, on every rank of ``comm``; zeros where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        said = split_of(parameter)
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        if said.partial:
            comm.all_reduce(grad).wait()
        if said.box is not None and said.shape is not None:
            whole, times = grad.new_zeros(said.shape), grad.new_zeros(said.shape)
            for laid in boxes_of(said.box):
                whole[laid.box.ranges] += grad[laid.here.ranges]
                times[laid.box.ranges] += 1
            comm.all_reduce(whole).wait()
            comm.all_reduce(times).wait()
            grad = whole / times
        found[name] = grad
    return found
