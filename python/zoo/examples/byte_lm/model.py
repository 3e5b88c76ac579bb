"""A byte-level GPT: pre-norm blocks, causal attention, tied head.

Shape suffixes: B batch, T time, C width, H heads, V = 256 byte values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of a :class:`ByteGPT`.

    ``layers`` blocks of width ``width`` with ``heads`` attention heads each; windows of at most ``context`` bytes.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"the byte model got {name}={getattr(self, name)}; it must be at least 1.")
        if self.width % self.heads:
            raise ValueError(
                f"the byte model got width={self.width} and heads={self.heads}; the width must be a multiple of the "
                f"heads."
            )


class Block(nn.Module):
    """``x + Attention(LN(x))``, then ``x + MLP(LN(x))`` with ``MLP(h) = W2 GELU(W1 h)``; (B, T, C) to (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        out: torch.Tensor = x + self.narrow(F.gelu(self.widen(self.norm_mlp(x)), approximate="tanh"))
        return out


class ByteGPT(nn.Module):
    """p(next byte | the bytes before it) = softmax(E LN(h)) with h the last block's output, E the token embedding.

    Args:
        config: the size.
        seed: of the initial weights: N(0, 0.02^2), the two projections back into the residual stream
            N(0, 0.02^2 / (2 layers)), biases 0, norms 1.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(NUM_BYTES, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTES, bias=False)
        self.head.weight = self.token.weight
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        back = 0.02 / math.sqrt(2 * self.config.layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    into_residual = name.endswith(("project.weight", "narrow.weight"))
                    parameter.normal_(0.0, back if into_residual else 0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, T, V) of the bytes after ``x`` (B, T) int64, or, given them as ``y``, the mean loss in nats."""
        logits = self.logits(x)
        if y is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) byte values to (B, T, V)."""
        time = x.shape[1]
        if time > self.config.context:
            raise ValueError(f"the byte model got windows of {time} bytes; its context is {self.config.context}.")
        h = self.token(x) + self.position(torch.arange(time, device=x.device))
        for block in self.blocks:
            h = block(h)
        out: torch.Tensor = self.head(self.norm(h))
        return out


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, num_bytes: int, *, context: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """``prompt`` continued by ``num_bytes`` bytes drawn from softmax(logits / temperature).

    A collective where the model's parameters are sharded: every rank calls it with the same arguments, and all ranks
    run the same number of forward passes.
    """
    if not prompt:
        raise ValueError("generate got an empty prompt; give at least one byte to continue.")
    if temperature <= 0:
        raise ValueError(f"generate got temperature={temperature}; it must be positive.")
    device = next(iter(model.parameters())).device
    generator = torch.Generator().manual_seed(seed)
    values = list(prompt)
    for _ in range(num_bytes):
        x = torch.tensor([values[-context:]], dtype=torch.int64, device=device)
        odds = torch.softmax(model(x)[0, -1].float().cpu() / temperature, dim=-1)
        values.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(values)
