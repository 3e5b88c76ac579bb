"""What is routed: sizes, weights that all contenders share, and tokens whose routing is known.

Legend: T tokens, D hidden size, H intermediate size, E experts, k choices of a token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

Tensor = torch.Tensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROUTINGS = ("even", "most", "all")
"""Experts are used evenly; 9 of 10 tokens go to the same k experts and the others evenly; all go to the same k."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one layer of SwiGLU experts."""

    tokens: int = 4096
    width: int = 512
    hidden: int = 1024
    experts: int = 8
    k: int = 2
    dtype: str = "bf16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of tokens and weights."""
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.torch_dtype.itemsize

    @property
    def rows(self) -> int:
        """T·k."""
        return self.tokens * self.k

    @property
    def weight_bytes(self) -> int:
        """Of all experts."""
        return 3 * self.experts * self.width * self.hidden * self.itemsize

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Weights:
    """Of one layer."""

    router: Tensor
    """(E, D): the first E numbers of a token are its logits."""
    up: Tensor
    """(E, D, 2H): G first."""
    down: Tensor
    """(E, H, D)."""

    @classmethod
    def of(cls, shape: Shape, seed: int = 0) -> Weights:
        """The same for the same sizes."""
        generator = torch.Generator().manual_seed(seed)
        size, wide, hidden, dtype = shape.experts, shape.width, shape.hidden, shape.torch_dtype
        up = torch.randn(size, wide, 2 * hidden, generator=generator) * wide**-0.5
        down = torch.randn(size, hidden, wide, generator=generator) * hidden**-0.5
        return cls(torch.eye(size, wide).to(dtype), up.to(dtype), down.to(dtype))


def choices(shape: Shape, routing: str, seed: int = 0) -> Tensor:
    """(T, k): the experts of each token, the first choice first."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.randperm(shape.tokens, generator=generator)
    turns = turn if routing == "even" else turn // 10  # each tenth token takes the next turn
    even = (turns.unsqueeze(1) * shape.k + torch.arange(shape.k)) % shape.experts
    if routing == "even":
        return even
    same = torch.arange(shape.k).expand(shape.tokens, -1)
    if routing == "all":
        return same
    return torch.where((turn % 10 == 0).unsqueeze(1), even, same)


def tokens(shape: Shape, routing: str, seed: int = 0) -> Tensor:
    """(T, D), which the router of :class:`Weights` sends where ``routing`` says."""
    if shape.experts > shape.width:
        raise ValueError(f"{shape.experts} experts and tokens of {shape.width} numbers; at least one for each expert.")
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(shape.tokens, shape.width, generator=generator)
    x[:, : shape.experts] = x[:, : shape.experts].clamp(-2, 2) / 16
    logits = (4 - torch.arange(shape.k) / 4).expand(shape.tokens, -1)
    x.scatter_(1, choices(shape, routing, seed), logits)
    return x.to(shape.torch_dtype)


def gradient(shape: Shape, seed: int = 0) -> Tensor:
    """(T, D): of the output."""
    generator = torch.Generator().manual_seed(seed + 2)
    return torch.randn(shape.tokens, shape.width, generator=generator).to(shape.torch_dtype)
