"""Two bytes a number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo.comm.compression import Codec


class Half(Codec):
    """C(c) = bf16(c), rounded to nearest: 2 bytes an element, padded to a multiple of 4. It keeps no state."""

    name = "half"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """No options."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def wire_bytes(self, numel: int) -> int:
        """2 n, rounded up to 4 bytes."""
        return -(-2 * numel // 4) * 4

    def encode_(self, c: torch.Tensor, error: torch.Tensor | None, wire: torch.Tensor) -> None:
        """c ← c + error; ``wire`` ← bf16(c)."""
        if error is not None:
            c.add_(error)
        wire[: 2 * c.numel()].view(torch.bfloat16).copy_(c)

    def decode_(self, out: torch.Tensor, wire: torch.Tensor, *, add: bool = False) -> None:
        """``out`` ← what ``wire`` stands for, or that added to it."""
        values = wire[: 2 * out.numel()].view(torch.bfloat16)
        if add:
            out.add_(values)
        else:
            out.copy_(values)
