"""The model, and ways to checkpoint its blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo.activation_checkpointing import ActivationCheckpointing, ActivationCheckpointingConfig
from zoo.activation_checkpointing.storages import Contiguous, Nvme

Checkpoint = Callable[..., Any]


class Block(nn.Module):
    """A transformer block: attention of 4 heads and a perceptron of 4 times the width, (B, S, D) → (B, S, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Tiny(nn.Module):
    """One product of eight values: what a checkpoint itself costs is all that is seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def contenders(folder: Path, blocks: int) -> dict[str, Checkpoint]:
    """Name → how a block is called."""

    def zoo(**config: Any) -> Checkpoint:
        return ActivationCheckpointing(ActivationCheckpointingConfig(**config)).checkpoint

    return {
        "no checkpoint": lambda function, x: function(x),
        "torch": functools.partial(checkpoint, use_reentrant=False),
        "zoo": zoo(),
        "torch, re-entrant": functools.partial(checkpoint, use_reentrant=True),
        "zoo, re-entrant": zoo(use_reentrant=True),
        "zoo, contiguous": ActivationCheckpointing(storage=Contiguous(blocks)).checkpoint,
        "zoo, NVMe": ActivationCheckpointing(storage=Nvme(folder)).checkpoint,
        "zoo, save matmul": zoo(save=["matmul"]),
    }


def step(blocks: list[nn.Module], how: Checkpoint, x: torch.Tensor) -> None:
    """Forward and backward; gradients of parameters stay and are overwritten."""
    for block in blocks:
        block.zero_grad(set_to_none=True)
    y = x
    for block in blocks:
        y = how(block, y)
    y.square().mean().backward()
