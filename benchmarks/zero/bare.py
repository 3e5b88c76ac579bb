"""The floor: gathers and reduce-scatters by hand around given modules, in plain torch, as little of it as works.

No error handling, no prefetch, no tied weights, no accumulation: what a sharded data-parallel step cannot do without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class BareUnit:
    """One module's parameters in a flat buffer (P,), of which every rank keeps P / N between uses."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.parameters = [p for module in modules for p in module.parameters()]
        numel = sum(p.numel() for p in self.parameters)
        padded = -(-numel // self.size) * self.size
        self.full = torch.zeros(padded)
        self.grads: torch.Tensor | None = None
        self.views, offset = [], 0
        for p in self.parameters:
            view = self.full[offset : offset + p.numel()].view_as(p)
            p.data = view.copy_(p.data)
            self.views.append((offset, p.shape))
            p.register_post_accumulate_grad_hook(self._accumulated)
            offset += p.numel()
        self.shard = nn.Parameter(self.full.chunk(self.size)[self.rank].clone())
        self.storage, self.num_bytes = self.full.untyped_storage(), self.full.nbytes
        self.num_missing = len(self.parameters)
        self.release()

    def gather(self) -> None:
        """All-gather the parameters if they are not here."""
        if self.storage.nbytes() == 0:
            self.storage.resize_(self.num_bytes)
            dist.all_gather_into_tensor(self.full, self.shard.data)

    def release(self) -> None:
        """Free them."""
        self.storage.resize_(0)

    def _open_grads(self, _: Any) -> None:
        self.gather()
        if self.grads is None:
            self.grads = torch.zeros(self.full.numel())
            for p, (offset, shape) in zip(self.parameters, self.views, strict=True):
                p.grad = self.grads[offset : offset + p.numel()].view(shape)

    def _accumulated(self, _: torch.Tensor) -> None:
        self.num_missing -= 1
        if self.num_missing == 0 and self.grads is not None:
            self.num_missing = len(self.parameters)
            self.shard.grad = torch.empty_like(self.shard)
            dist.reduce_scatter_tensor(self.shard.grad, self.grads)
            self.shard.grad /= self.size
            for p in self.parameters:
                p.grad = None
            self.grads = None
            self.release()

    def hook(self, module: nn.Module) -> None:
        """Gather around the module's forward, and again before its backward."""
        module.register_forward_pre_hook(lambda *_: self.gather())

        def after(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(self._open_grads)
            self.release()

        module.register_forward_hook(after)


def bare_loop(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[nn.Module, list[nn.Parameter]]:
    """Hook the blocks as one unit each and the rest as one more; returns the model and the shards to optimize."""
    units = []
    for block in blocks:
        unit = BareUnit([block])
        unit.hook(block)
        units.append(unit)
    inside = {id(p) for block in blocks for p in block.parameters()}
    if rest := [m for m in model.children() if any(id(p) not in inside for p in m.parameters())]:
        unit = BareUnit(rest)
        model.register_forward_pre_hook(lambda *_: unit.gather())
        model.register_forward_hook(lambda _, __, output: output.register_hook(unit._open_grads) and None)
        units.append(unit)
    return model, [unit.shard for unit in units]
