"""What stochastic rounding draws."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from zoo.parts import drawn


def noise(like: Tensor, *, seed: int, step: int, name: str) -> Tensor:
    """u, shape and dtype of ``like``, uniform in [0, 1): a function of seed, step, the tensor's name and its shape.

    So it is the same on all ranks and when a forward is repeated, and a run that is resumed draws what it would have
    drawn. Devices of different kinds draw different numbers.
    """
    if like.is_meta:
        return torch.empty_like(like)
    dice = torch.Generator(device=like.device)
    dice.manual_seed(drawn(seed, step, zlib.crc32(name.encode())) >> 1)
    return torch.rand(like.shape, generator=dice, dtype=like.dtype, device=like.device)
