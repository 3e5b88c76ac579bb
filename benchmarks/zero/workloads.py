"""The models that are trained, their data and their losses: the same for every contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

WORKER = "benchmarks.zero.worker"
NUM_TINY, TINY_WIDTH = 200, 64


def tiny_model() -> nn.Sequential:
    """200 x Linear(64, 64): all host time, hardly any arithmetic. Orthogonal, so that no gradient becomes denormal."""
    model = nn.Sequential(*[nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(NUM_TINY)])
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    return model


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level GPT: (B, T) bytes -> (B, T, 256) logits."""

    def __init__(self, num_layers: int, width: int, context: int, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Next-byte logits."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained: ``build`` under a fixed seed, ``batch(rank, step)``, ``loss(output, target)``."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]
    num_warmup: int
    num_steps: int

    def model(self) -> nn.Module:
        """The model, the same on every rank and for every contender."""
        torch.manual_seed(0)
        return self.build()


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + 1000 * rank + step)


def tiny_batch(rank: int, step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """(16, 64) inputs and targets of norm about 1 an element."""
    x, y = torch.randn(2, rows, TINY_WIDTH, generator=_generator(rank, step)).unbind()
    return x, y


def byte_batch(rank: int, step: int, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) random bytes and the bytes that follow them; ``y[t] = x[t+1]``."""
    data = torch.randint(0, 256, (batch, context + 1), generator=_generator(rank, step))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over all bytes, in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


GPT_BATCH, GPT_CONTEXT = 1, 128
STATES_CONTEXT = 16


def states_model() -> GPT:
    """Many small blocks, built in bf16 at once: what is gathered for a while is little beside the whole."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return GPT(48, 256, STATES_CONTEXT)
    finally:
        torch.set_default_dtype(torch.float32)


def wide_model() -> GPT:
    """38 M parameters in bf16: a step's arithmetic is small beside moving its states."""
    return GPT(12, 512, GPT_CONTEXT, num_heads=8).bfloat16()


WORKLOADS = {
    "wide": Workload(
        build=wide_model,
        batch=lambda rank, step: byte_batch(rank, step, GPT_BATCH, GPT_CONTEXT),
        loss=cross_entropy,
        blocks=lambda model: list(model.blocks),
        num_warmup=2,
        num_steps=5,
    ),
    "tiny": Workload(
        build=tiny_model, batch=tiny_batch, loss=F.mse_loss, blocks=list, num_warmup=3, num_steps=20,
    ),
    "gpt": Workload(
        build=lambda: GPT(12, 256, GPT_CONTEXT),
        batch=lambda rank, step: byte_batch(rank, step, GPT_BATCH, GPT_CONTEXT),
        loss=cross_entropy,
        blocks=lambda model: list(model.blocks),
        num_warmup=3,
        num_steps=10,
    ),
    "states": Workload(
        build=states_model,
        batch=lambda rank, step: byte_batch(rank, step, 1, STATES_CONTEXT),
        loss=cross_entropy,
        blocks=lambda model: list(model.blocks),
        num_warmup=0,
        num_steps=3,
    ),
}  # fmt: skip


def gpt_workload(*, layers: int, width: int, heads: int, batch: int, context: int) -> Workload:
    """A GPT of this shape; each rank has ``batch`` sequences of ``context`` bytes a step."""
    return Workload(
        build=lambda: GPT(layers, width, context, heads),
        batch=lambda rank, step: byte_batch(rank, step, batch, context),
        loss=cross_entropy,
        blocks=lambda model: list(model.blocks),
        num_warmup=3,
        num_steps=20,
    )


def workload_of(name: str | Mapping[str, int]) -> Workload:
    """One of those above, or the shape of a GPT."""
    return WORKLOADS[name] if isinstance(name, str) else gpt_workload(**name)
