"""Models of the tests of whole graphs: a small transformer with what makes graphs hard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 8, 19


@dataclass(frozen=True)
class Shape:
    """What a model is like: how many blocks; the head is the embedding; the first block is frozen; blocks are
    recomputed; one block runs twice."""

    blocks: int = 3
    tied: bool = False
    frozen: bool = False
    recomputed: bool = False
    repeated: bool = False


class Block(nn.Module):
    """Attention and two layers, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return out


class Model(nn.Module):
    """Tokens → the mean loss of the next one, and the logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shape = shape
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        if shape.frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.recomputed and self.training else block(x)
        if self.shape.repeated:
            x = self.blocks[1](x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def batch(step: int, rank: int, length: int = 6) -> Any:
    """Tokens of one rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (2, length), generator=generator)
