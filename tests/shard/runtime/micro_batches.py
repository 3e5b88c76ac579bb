"""A model whose micro-batches a schedule drives in drawn orders, and the same by hooks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo.zero import ZeroOptimizer

WIDTH = 6


@dataclasses.dataclass(frozen=True)
class Case:
    world: int = 2
    stage: int = 3
    num_blocks: int = 3
    shared: bool = False
    nested: bool = False
    recompute: bool = False
    silent: tuple[int, ...] = ()  # ranks whose loss leaves the first block out
    events: tuple[int, ...] = (0, 1, 0, 2, 1, 2)  # the first of a number is its forward, the second its backward
    each: tuple[int, ...] = ()  # micro-batches that are reduced by themselves
    max_bytes: int | None = None
    bucket_size: int = 1
    threshold: int = 0
    prefetch: int | None = None
    keep: int | None = None
    overlap: bool = True
    host: bool = False
    hpz: bool = False
    seed: int = 0


@st.composite
def orders(draw: st.DrawFn, num_micro: int) -> tuple[int, ...]:
    """Each number twice, in any order."""
    return tuple(draw(st.permutations(sorted([*range(num_micro), *range(num_micro)]))))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world, num_micro = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stage, recompute = draw(st.integers(1, 3)), draw(st.booleans())
    return Case(
        world=world, stage=stage, num_blocks=draw(st.integers(1, 4)), shared=draw(st.booleans()),
        nested=draw(st.booleans()), recompute=recompute,
        silent=() if recompute else tuple(draw(st.sets(st.integers(0, world - 1)))),
        events=draw(orders(num_micro)), each=tuple(draw(st.sets(st.integers(0, num_micro - 1)))),
        max_bytes=draw(st.sampled_from([None, 0, 500, 10**6])), bucket_size=draw(st.sampled_from([1, 60, 10**6])),
        threshold=draw(st.sampled_from([0, 16])), prefetch=draw(st.sampled_from([None, 0, 10**6])),
        keep=draw(st.sampled_from([None, 0, 10**6])), overlap=draw(st.booleans()), host=draw(st.booleans()),
        hpz=draw(st.booleans()) and stage == 3 and world in (2, 4), seed=draw(st.integers(0, 30)),
    )  # fmt: skip


class Block(nn.Module):
    """A unit with parameters of its own, and perhaps a unit within."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.1))
        self.linear: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.nested = nested

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.linear(x)) * self.scale
        return out


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.case = case
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(case.nested) for _ in range(case.num_blocks))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate([*self.blocks, *([self.blocks[0]] if self.case.shared else [])]):
            y = checkpoint(block, x, use_reentrant=False) if self.case.recompute else block(x)
            x = x + (y.detach() if index == 0 and rank in self.case.silent else y)
        out: torch.Tensor = self.last(x)
        return out


def build(case: Case) -> tuple[Model, ZeroOptimizer]:
    model = Model(case)
    options: dict[str, Any] = {}
    if case.host:
        options["offload_optimizer"] = {"device": "cpu"}
        if case.stage == 3:
            options["offload_param"] = {"device": "cpu"}
    if case.hpz:
        options |= {"zero_hpz_partition_size": 2, "ranks_per_node": 2}
    return model, ZeroOptimizer(
        model, stage=case.stage, optimizer=torch.optim.AdamW, lr=0.01, eps=1e-2, reduce_bucket_size=case.bucket_size,
        param_persistence_threshold=case.threshold, prefetch_bucket_size=case.prefetch, max_live_parameters=case.keep,
        overlap_comm=case.overlap, units=[nn.Linear, Block] if case.nested else [nn.Linear], **options,
    )  # fmt: skip


def data(rank: int, micro: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def drive(model: Model, optimizer: ZeroOptimizer, case: Case, rank: int, step: int) -> list[float]:
    losses: dict[int, torch.Tensor] = {}
    seen = []
    with optimizer.sharded.window(max_bytes=case.max_bytes) as window:
        for micro in case.events:
            if micro not in losses:
                with window.forward(micro):
                    losses[micro] = model(data(rank, micro, step), rank).square().mean()
                continue
            with window.backward(micro, reduce=micro in case.each):
                losses[micro].backward()
            seen.append(float(losses[micro].detach()))
    return seen


def hooks(model: Model, optimizer: ZeroOptimizer, case: Case, rank: int, step: int) -> list[float]:
    losses: dict[int, torch.Tensor] = {}
    seen = []
    for micro in case.events:
        if micro not in losses:
            losses[micro] = model(data(rank, micro, step), rank).square().mean()
            continue
        with contextlib.nullcontext() if micro in case.each else optimizer.no_sync():
            losses[micro].backward()
        seen.append(float(losses[micro].detach()))
    return seen


def train(case: Case, run: Callable[..., list[float]], rank: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    model, optimizer = build(case)
    seen = []
    for step in range(2):
        seen.append(run(model, optimizer, case, rank, step))
        optimizer.step()
        optimizer.zero_grad()
        assert not any(b.active or b.leases for b in optimizer.buckets)
    assert case.world == 1 or not any(b.parameters.live for b in optimizer.buckets if b.partitioned)
    return seen, optimizer.consolidated_parameters()
