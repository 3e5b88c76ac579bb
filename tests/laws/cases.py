"""Models and training runs drawn by hypothesis, and the one-process run they must equal.

Every rank gets data of its own, and every run is described by a :class:`Case`, so that a failing one can be replayed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import zoo.optim
from zoo.zero import ZeroOptimizer

# Those whose step is a smooth function of the gradient; tests/optim has the battery of all.
OPTIMIZERS = ["AdamW", "SGD", "Adagrad", "RMSprop", "zoo.AdamW", "zoo.SGD", "zoo.Adagrad"]


@dataclass(frozen=True)
class Case:
    world: int = 2
    width: int = 5
    hidden: int = 7
    num_blocks: int = 2
    tied: bool = False
    shared_block: bool = False
    frozen: tuple[int, ...] = ()
    silent_ranks: tuple[int, ...] = ()  # ranks whose loss does not depend on the first block's branch
    odd_shapes: bool = False
    output: str = "tensor"
    recompute: str = "none"
    two_groups: bool = False
    optimizer: str = "AdamW"
    clip_norm: float = 0.0
    accumulation: str = "one"  # one, backwards, no_sync, forwards_first
    num_steps: int = 2
    bucket_size: int = 60
    threshold: int = 0
    prefetch: int | None = None
    keep: int | None = None
    overlap: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn, max_world: int = 8, dtype: torch.dtype = torch.float32) -> Case:
    world = draw(st.integers(1, max_world))
    num_blocks = draw(st.integers(1, 3))
    recompute = draw(st.sampled_from(["none", "none", "non_reentrant", "reentrant"]))
    # torch's re-entrant checkpointing passes gradients only through tensors and tuples of them, and a block that it
    # does not recompute on some ranks is not gathered there: at stage 3 that is a divergence of the ranks' programs.
    kinds = ["tensor", "tuple"] if recompute == "reentrant" else ["tensor", "tuple", "dict", "dataclass"]
    silent = draw(st.sets(st.integers(0, world - 1), max_size=world))
    # A single block is no repeated one: its layers are units of their own. Ranks that recompute it gather them
    # forwards, a rank that does not backwards, which is a divergence too.
    if recompute == "non_reentrant" and num_blocks == 1:
        silent = set()
    return Case(
        world=world,
        width=draw(st.sampled_from([1, 2, 5, 16])),
        hidden=draw(st.sampled_from([1, 3, 7, 32])),
        num_blocks=num_blocks,
        tied=draw(st.booleans()),
        shared_block=draw(st.booleans()),
        frozen=tuple(draw(st.sets(st.integers(0, num_blocks - 1), max_size=num_blocks))),
        silent_ranks=() if recompute == "reentrant" else tuple(silent),
        odd_shapes=draw(st.booleans()),
        output=draw(st.sampled_from(kinds)),
        recompute=recompute,
        two_groups=draw(st.booleans()),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        clip_norm=draw(st.sampled_from([0.0, 0.05, 100.0])),
        accumulation=draw(st.sampled_from(["one", "backwards", "no_sync", "forwards_first"])),
        bucket_size=draw(st.sampled_from([1, 60, 10**6])),
        threshold=draw(st.sampled_from([0, 16, 10**6])),
        prefetch=draw(st.sampled_from([None, 0, 10**6])),
        keep=draw(st.sampled_from([None, 0, 10**6])),
        overlap=draw(st.booleans()),
        dtype=dtype,
        seed=draw(st.integers(0, 3)),
    )


@dataclass
class Result:
    hidden: torch.Tensor
    extra: list[torch.Tensor]


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.kind = case.output
        self.norm = nn.LayerNorm(case.width)
        self.up = nn.Linear(case.width, case.hidden)
        self.down = nn.Linear(case.hidden, case.width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        if self.kind == "tuple":
            return y, [x.mean()]
        if self.kind == "dict":
            return {"hidden": y, "note": "text"}
        if self.kind == "dataclass":
            return Result(y, [x.mean()])
        return y


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embed = nn.Embedding(11, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.num_blocks))
        self.head = nn.Linear(case.width, 11)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.odd_shapes:
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.nothing = nn.Parameter(torch.empty(0, 3))
        for index in case.frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, tokens: torch.Tensor, rank: int) -> torch.Tensor:
        case = self.case
        x = self.embed(tokens)
        order = list(self.blocks) + ([self.blocks[0]] if case.shared_block else [])
        for position, block in enumerate(order):
            if case.recompute == "none":
                y = block(x)
            else:
                y = checkpoint(block, x, use_reentrant=case.recompute == "reentrant")
            if isinstance(y, (tuple, dict)):
                y = y["hidden"] if isinstance(y, dict) else y[0]
            elif isinstance(y, Result):
                y = y.hidden
            if not (position == 0 and rank in case.silent_ranks):
                x = x + y
        if case.odd_shapes:
            x = x * self.scale + self.nothing.sum()
        out: torch.Tensor = self.head(x)
        return out


def make_model(case: Case) -> Model:
    torch.manual_seed(case.seed)
    return Model(case).to(case.dtype)


def groups_of(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not case.two_groups:
        return [{"params": [p for _, p in named]}]
    matrices = [p for _, p in named if p.ndim >= 2]
    others = [p for _, p in named if p.ndim < 2]
    return [{"params": matrices}, {"params": others, "lr": 0.003, "weight_decay": 0.0}]


def optimizer_of(case: Case) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    # eps is large, so that an element with a tiny gradient does not turn rounding errors into whole steps.
    options: dict[str, dict[str, Any]] = {
        "AdamW": {"lr": 0.01, "eps": 1e-2},
        "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        "Adagrad": {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.01},
        "RMSprop": {"lr": 0.003, "eps": 1e-2, "weight_decay": 0.01},
    }
    package, _, name = case.optimizer.rpartition(".")
    return getattr(zoo.optim if package else torch.optim, name), options[name]


def num_micro(case: Case) -> int:
    return 1 if case.accumulation == "one" else 2


def batch(case: Case, rank: int, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank + 7)
    return (
        torch.randint(0, 11, (2, 3), generator=generator),
        torch.randint(0, 11, (2, 3), generator=generator),
    )


def loss_of(model: nn.Module, case: Case, rank: int, step: int, micro: int) -> torch.Tensor:
    tokens, targets = batch(case, rank, step, micro)
    logits = model(tokens, rank)
    return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).to(logits.dtype) / num_micro(case)


def train_zero(case: Case, stage: int, rank: int, **options: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Train on one rank; returns all parameters and, for each step, (loss, gradient norm)."""
    model = make_model(case)
    cls, arguments = optimizer_of(case)
    optimizer = ZeroOptimizer(
        model,
        stage=stage,
        optimizer=cls,
        params=groups_of(model, case),
        clip_norm=case.clip_norm,
        reduce_bucket_size=case.bucket_size,
        param_persistence_threshold=case.threshold,
        prefetch_bucket_size=case.prefetch,
        max_live_parameters=case.keep,
        overlap_comm=case.overlap,
        **{**arguments, **options},
    )
    history = []
    for step in range(case.num_steps):
        losses = accumulate(model, optimizer, case, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        history.append((losses, optimizer.grad_norm))
    return optimizer.consolidated_parameters(), history


def accumulate(model: nn.Module, optimizer: ZeroOptimizer, case: Case, rank: int, step: int) -> list[float]:
    micros = range(num_micro(case))
    if case.accumulation == "forwards_first":
        losses = [loss_of(model, case, rank, step, m) for m in micros]
        optimizer.backward(torch.stack(losses).sum())
        return [float(x.detach()) for x in losses]
    seen = []
    for m in micros:
        wait = case.accumulation == "no_sync" and m < len(micros) - 1
        with optimizer.no_sync() if wait else contextlib.nullcontext():
            loss = loss_of(model, case, rank, step, m)
            optimizer.backward(loss)
        seen.append(float(loss.detach()))
    return seen


def train_reference(case: Case) -> dict[str, torch.Tensor]:
    """One process that sees the data of all ranks, plain torch. No gradient counts as a zero gradient."""
    model = make_model(replace(case, recompute="none"))
    cls, arguments = optimizer_of(case)
    optimizer = cls(groups_of(model, case), **arguments)
    trainable = [p for p in model.parameters() if p.requires_grad]
    for step in range(case.num_steps):
        for p in trainable:
            p.grad = torch.zeros_like(p)
        for rank in range(case.world):
            for m in range(num_micro(case)):
                (loss_of(model, case, rank, step, m) / case.world).backward()
        if case.clip_norm:
            torch.nn.utils.clip_grad_norm_(trainable, case.clip_norm)
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}
