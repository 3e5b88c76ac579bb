"""Compressors to try, and what ranks give."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from zoo.comm.compression import Blockwise, Fp8, OneBit, PowerSGD, RandomK, TopK

COMPRESSORS: dict[str, Any] = {
    "onebit": OneBit(OneBit.Config(group_size=64)),
    "onebit, large groups": OneBit(),
    "onebit, a = 1": OneBit(OneBit.Config(group_size=64, factor=1.0)),
    "onebit, rms": OneBit(OneBit.Config(group_size=64, scale="rms")),
    "onebit by the norm": OneBit(OneBit.Config(scale="norm")),
    "int8": Blockwise(Blockwise.Config(bits=8, group_size=16)),
    "int4": Blockwise(Blockwise.Config(bits=4)),
    "int8, asymmetric": Blockwise(Blockwise.Config(group_size=16, symmetric=False)),
    "int4, asymmetric": Blockwise(Blockwise.Config(bits=4, symmetric=False)),
    "fp8": Fp8(Fp8.Config(group_size=32)),
    "top_k": TopK(TopK.Config(ratio=0.1)),
    "random_k": RandomK(RandomK.Config(ratio=0.2, block=3)),
    "power_sgd": PowerSGD(PowerSGD.Config(rank=2)),
    "power_sgd of rows": PowerSGD(PowerSGD.Config(rank=3, columns=5)),
}
CODECS = [name for name, found in COMPRESSORS.items() if hasattr(found, "encode_")]
NUMELS = st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65, 128, 200, 257, 1000]))


def given(numel: int, rank: int, step: int, seed: int, *, kind: str = "normal") -> torch.Tensor:
    """(n,) fp32, different on each rank and in each step."""
    if kind == "zeros":
        return torch.zeros(numel)
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    x = torch.randn(numel, generator=generator)
    return x * 10.0 ** torch.randint(-6, 6, (numel,), generator=generator) if kind == "spread" else x
