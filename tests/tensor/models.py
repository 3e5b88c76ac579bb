"""A small decoder with every way of laying heads out that plans know, and its plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from zoo.tensor import Count, Plan, Rule

WIDTH, DIM = 6, 4


@dataclass(frozen=True)
class Shape:
    """``layout``: "apart" (q, k and v are three matrices), "parts" (all queries, all keys, all values), "heads" (query,
    key and value of each head), "groups" (the queries of a group, their key, their value)."""

    heads: int = 4
    kv: int = 2
    inner: int = 10
    vocab: int = 13
    layers: int = 2
    layout: str = "apart"
    bias: bool = True
    tied: bool = True
    norm: bool = False
    packed: bool = False

    @property
    def heads_of_kv(self) -> int:
        return self.heads if self.layout == "heads" else self.kv


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layout, self.num_heads, self.num_kv = shape.layout, shape.heads, shape.heads_of_kv
        queries, keys = shape.heads * DIM, shape.heads_of_kv * DIM
        if shape.layout == "apart":
            self.q = nn.Linear(WIDTH, queries, bias=shape.bias)
            self.k = nn.Linear(WIDTH, keys, bias=shape.bias)
            self.v = nn.Linear(WIDTH, keys, bias=shape.bias)
        else:
            self.qkv = nn.Linear(WIDTH, queries + 2 * keys, bias=shape.bias)
        self.norm = nn.LayerNorm(DIM) if shape.norm else nn.Identity()
        self.out = nn.Linear(queries, WIDTH, bias=shape.bias)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        each = self.num_heads // self.num_kv
        if self.layout == "apart":
            q, k, v = (f(x).unflatten(-1, (-1, DIM)) for f in (self.q, self.k, self.v))
        elif self.layout == "parts":
            q, k, v = self.qkv(x).unflatten(-1, (-1, DIM)).split([self.num_heads, self.num_kv, self.num_kv], dim=-2)
        elif self.layout == "heads":
            q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, DIM)).unbind(-2)
        else:
            grouped = self.qkv(x).unflatten(-1, (self.num_kv, each + 2, DIM))
            q, k, v = grouped[..., :-2, :].flatten(-3, -2), grouped[..., -2, :], grouped[..., -1, :]
        return q, k.repeat_interleave(each, -2), v.repeat_interleave(each, -2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (h.transpose(-3, -2) for h in self.heads(x))
        mixed = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return out


class Perceptron(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.packed = shape.packed
        self.up = nn.Linear(WIDTH, shape.inner * (2 if shape.packed else 1), bias=shape.bias)
        self.down = nn.Linear(shape.inner, WIDTH, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        if self.packed:
            gate, up = up.chunk(2, dim=-1)
            up = up * torch.tanh(gate)
        out: torch.Tensor = self.down(torch.tanh(up))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.perceptron = Attention(shape), Perceptron(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        out: torch.Tensor = x + self.perceptron(self.second(x))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.words = nn.Embedding(shape.vocab, WIDTH)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.last = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.words.weight
        self.double()

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.hidden(ids))
        return out


def plan_of(shape: Shape) -> Plan:
    at, mlp = "blocks.*.attention", "blocks.*.perceptron"
    if shape.layout == "apart":
        names = [("q", "head dim", "head"), ("k", "kv dim", "kv"), ("v", "kv dim", "kv")]
        attention = [Rule(module=f"{at}.{name}", rows=rows, cut=cut) for name, rows, cut in names]
    else:
        rows, cut = {
            "parts": ("(head kv kv) dim", "head"),
            "heads": ("head part=3 dim", "head"),
            "groups": ("kv (query one=1 one=1) dim", "kv"),
        }[shape.layout]
        attention = [Rule(module=f"{at}.qkv", rows=rows, cut=cut)]
    attention.append(Rule(module=f"{at}.out", columns="head dim", cut="head"))
    attention += [Rule(module=f"{at}.norm", partial=True)] if shape.norm else []
    return Plan(
        name="decoder",
        sizes=(("head", shape.heads), ("kv", shape.heads_of_kv), ("inner", shape.inner), ("vocab", shape.vocab)),
        rules=(
            Rule(module="words", rows="vocab", cut="vocab"),
            *attention,
            Rule(module=f"{mlp}.up", rows="part=2 inner" if shape.packed else "inner", cut="inner"),
            Rule(module=f"{mlp}.down", columns="inner", cut="inner"),
            Rule(module="head", rows="vocab", cut="vocab", gather=True),
        ),
        counts=(
            Count(module=at, attribute="num_heads", dims="head"),
            Count(module=at, attribute="num_kv", dims="kv"),
        ),
        layers="blocks.*",
    )  # fmt: skip
