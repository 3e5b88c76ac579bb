"""What is trained: a byte-level GPT as a list of layers, the same for every contender."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from benchmarks.zero.workloads import Block, byte_batch, cross_entropy
from torch import nn

__all__ = ["Batch", "Layer", "Shape", "cross_entropy"]

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT of ``layers`` blocks on bytes, trained on ``micro_batches`` of ``batch`` sequences a step."""

    layers: int = 8
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 2
    micro_batches: int = 8

    def record(self) -> dict[str, int]:
        """As JSON."""
        return asdict(self)

    def arguments(self, number: int) -> tuple[Any, ...]:
        """Of :class:`Layer`."""
        return number, self.layers, self.width, self.heads, self.context

    def model(self) -> nn.Sequential:
        """All layers."""
        return nn.Sequential(*[Layer(*self.arguments(number)) for number in range(self.layers)])

    def data(self, step: int) -> list[Batch]:
        """The micro-batches of a step, the same on every rank."""
        return [byte_batch(m, step, self.batch, self.context) for m in range(self.micro_batches)]


class Layer(nn.Module):
    """One block; the first one also embeds, the last one also makes logits. Weights depend on its number alone."""

    def __init__(self, number: int, num_layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        first, last = number == 0, number == num_layers - 1
        self.tokens = nn.Embedding(256, width) if first else None
        self.positions = nn.Embedding(context, width) if first else None
        self.block = Block(width, heads)
        self.norm = nn.LayerNorm(width) if last else None
        self.head = nn.Linear(width, 256, bias=False) if last else None
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) bytes or (B, T, D) → (B, T, D) or (B, T, 256)."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        x = self.block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))
