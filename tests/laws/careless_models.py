"""Settings under which careless programs run, the models that they train, and their data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint
from hypothesis import strategies as st
from torch import nn

from zoo.moe import Capacity, GroupedExperts, MixtureOfExperts, ModuleExperts, TopKGate

RATE = 2.0**-4
WIDTH = 6


@dataclass(frozen=True)
class Setting:
    stage: int = 0
    world: int = 2
    dtype: torch.dtype = torch.float64
    clip_norm: float = 0.0
    threshold: int = 0
    bucket_size: int = 1
    keep: int | None = 0
    overlap: bool = True
    host: bool = False  # optimizer states in host memory, at stage 3 parameters too
    shard_size: int = -1
    seed: int = 0
    came_in: torch.dtype | None = None  # the model's own dtype, where ``dtype`` is Precision.param
    ep_size: int = 0  # with a layer of experts, which so many ranks share
    grouped: bool = True  # experts as one tensor, or as modules
    recomputes: bool = False  # what the experts computed


@st.composite
def settings_of(draw: st.DrawFn) -> Setting:
    stage = draw(st.integers(0, 3))
    world = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]))
    return Setting(
        stage=stage,
        world=world,
        dtype=dtype,
        came_in=draw(st.sampled_from([None, torch.float32])) if dtype is torch.bfloat16 else None,
        clip_norm=draw(st.sampled_from([0.0, 0.0, 0.5])),
        threshold=draw(st.sampled_from([0, 0, 10, 10**6])),
        bucket_size=draw(st.sampled_from([1, 50, 10**6])),
        keep=draw(st.sampled_from([0, None])),
        overlap=draw(st.booleans()),
        host=draw(st.booleans()) and stage > 0,
        shard_size=draw(st.sampled_from([-1, -1, 1, world])) if stage else -1,
        seed=draw(st.integers(0, 50)),
    )


@st.composite
def settings_with_experts(draw: st.DrawFn) -> Setting:
    """In float64: a token that goes to another expert, because of a rounding, is no small difference."""
    world = draw(st.sampled_from([1, 2, 2, 4]))
    setting = draw(settings_of())
    return replace(
        setting,
        world=world,
        dtype=torch.float64,
        came_in=None,
        shard_size=draw(st.sampled_from([-1, -1, 1, world])) if setting.stage else -1,
        ep_size=draw(st.sampled_from([e for e in (1, 2, 2, 4) if e <= world and (world < 4 or e > 1)])),
        grouped=draw(st.booleans()),
        recomputes=draw(st.booleans()),
    )


class Output:
    """A class that nobody has heard of."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.parts = {"hidden": (hidden, "text")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(torch.tanh(self.inner(x)))


class Model(nn.Module):
    """Attention outside of blocks, blocks with outputs of a class of their own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, silent: bool = False) -> torch.Tensor:
        x = self.first(x)
        y = x.unsqueeze(0)
        x = x + self.attention(y, y, y)[0].squeeze(0)
        for index, block in enumerate(self.blocks):
            hidden = block(x).parts["hidden"][0]
            if not (silent and index == 0):
                x = x + hidden
        return self.last(x)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out

    def piecewise(self, x: torch.Tensor) -> torch.Tensor:
        """The same, called from outside module by module."""
        return self.forward(x)


class Mixed(Model):
    """With a layer of experts before the head, whose values are the same at every ``ep_size``."""

    def __init__(self, setting: Setting, ep_size: int, ep_rank: int) -> None:
        super().__init__()
        experts: Any = GroupedExperts(EXPERTS, WIDTH, 5, activation="silu", ep_size=ep_size, ep_rank=ep_rank)
        if not setting.grouped:
            made = [nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in range(EXPERTS)]
            here = EXPERTS // ep_size
            experts = ModuleExperts(made[ep_rank * here :][:here], EXPERTS, ep_size=ep_size, ep_rank=ep_rank)
        moe = MixtureOfExperts(
            TopKGate(WIDTH, EXPERTS, k=2), experts, capacity=Capacity(factor=0.5, minimum=1),
            shared=nn.Sequential(nn.Linear(WIDTH, WIDTH)), chunks=EXPERTS // ep_size if ep_size > 1 else 1,
        )  # fmt: skip
        self.experts = Experts(moe, setting.recomputes)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.experts(x))
        return out


class Experts(nn.Module):
    """What they give, and the loss that balances them, in one tensor."""

    def __init__(self, moe: MixtureOfExperts, recomputes: bool) -> None:
        super().__init__()
        self.moe, self.recomputes = moe, recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes and x.requires_grad:
            out: torch.Tensor = torch.utils.checkpoint.checkpoint(self.mixed, x, use_reentrant=False)
            return out
        return self.mixed(x)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        found = self.moe(x)
        return x + found.output + found.balance


def model_of(setting: Setting, ep_size: int = 1, ep_rank: int = 0) -> Model:
    return Mixed(setting, ep_size, ep_rank) if setting.ep_size else Model()


EXPERTS = 4
WEIGHTS = ["first.weight", "attention.in_proj_weight", "blocks.1.inner.weight", "head.bias"]


def values_of(name: str, model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    parameter = model.get_parameter(name)
    return (torch.randn(parameter.shape, generator=generator) * 0.3).to(parameter.dtype)


def data(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)
