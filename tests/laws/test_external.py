"""Law 2 with external parameters: used anywhere in the forward, training equals one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo import sim
from zoo.zero import (
    GatheredParameters,
    Init,
    PartitionedAccessError,
    Stage2Optimizer,
    Stage3Optimizer,
    ZeroOptimizer,
    register_external_parameter,
    unregister_external_parameter,
)

WIDTH = 5


@dataclass(frozen=True)
class Uses:
    """Who uses what: (user, owner) of blocks; -1 is the model itself as a user, the holder as an owner."""

    pairs: tuple[tuple[int, int], ...] = ((-1, 0),)
    tied_head: bool = True
    returns: bool = False
    num_blocks: int = 3
    world: int = 2
    stage: int = 3
    overlap: bool = True
    recompute: str = "none"
    size: int = 1
    keep: int | None = None
    prefetch: int | None = None
    by_hand: bool = False
    frozen: int | None = None
    accumulate: bool = False
    init: bool = False
    silent: bool = False


@st.composite
def drawn_uses(draw: st.DrawFn) -> Uses:
    num_blocks = draw(st.integers(1, 4))
    pair = st.tuples(st.integers(-1, num_blocks - 1), st.integers(-1, num_blocks - 1))
    by_hand, silent = draw(st.booleans()), draw(st.booleans())
    stage = draw(st.sampled_from([3, 3, 3, 0, 1, 2]))
    recompute = draw(st.sampled_from(["none", "none", "non_reentrant", "reentrant"]))
    return Uses(
        pairs=tuple(draw(st.lists(pair, max_size=4))),
        tied_head=draw(st.booleans()),
        # torch's re-entrant checkpointing makes a parameter that the function returns an inner node of the graph.
        returns=recompute != "reentrant" and draw(st.booleans()),
        num_blocks=num_blocks,
        world=draw(st.integers(1, 3)),
        stage=stage,
        overlap=draw(st.booleans()),
        recompute=recompute,
        size=draw(st.sampled_from([1, 70, 10**6])),
        keep=draw(st.sampled_from([None, 0])),
        prefetch=draw(st.sampled_from([None, 0, 10**6])),
        by_hand=stage < 3 or by_hand or silent,  # what only some ranks use cannot be found
        frozen=draw(st.sampled_from([None, None, 0])),
        accumulate=draw(st.booleans()),
        init=draw(st.booleans()),
        silent=silent,
    )


class Block(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.returns = returns
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.others: list[nn.Parameter] = []  # a plain list: the block does not own them

    def forward(self, x: torch.Tensor) -> Any:
        for other in self.others:
            x = torch.tanh(F.linear(x, other))
        y = x + torch.tanh(self.inner(x))
        return (y, self.inner.bias) if self.returns else y


class Model(nn.Module):
    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self.uses = uses
        self.embed = nn.Embedding(7, WIDTH)
        self.holder = nn.Linear(WIDTH, WIDTH)  # is never called
        self.blocks = nn.ModuleList(Block(uses.returns) for _ in range(uses.num_blocks))
        self.head = nn.Linear(WIDTH, 7)
        if uses.frozen is not None:
            self.blocks[uses.frozen].inner.weight.requires_grad_(False)
        for user, owner in uses.pairs:
            if user >= 0 and user != owner:
                self.blocks[user].others.append(self.weight_of(owner))
        if uses.by_hand:
            for user, owner in uses.pairs:
                register_external_parameter(self.blocks[user] if user >= 0 else self, self.weight_of(owner))
            register_external_parameter(self, self.embed.weight)
            for block in self.blocks if uses.returns else []:
                register_external_parameter(self, block.inner.bias)

    def weight_of(self, owner: int) -> nn.Parameter:
        return self.holder.weight if owner < 0 else self.blocks[owner].inner.weight

    def forward(self, tokens: torch.Tensor, rank: int) -> torch.Tensor:
        uses = self.uses
        x = self.embed(tokens)
        for user, owner in uses.pairs:
            if user < 0 and not (uses.silent and rank == 0):
                x = x + torch.tanh(F.linear(x, self.weight_of(owner)))
        for block in self.blocks:
            if uses.recompute == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=uses.recompute == "reentrant")
            if isinstance(x, tuple):
                x = x[0] * (1 + x[1])
        out: torch.Tensor = F.linear(x, self.embed.weight) if uses.tied_head else self.head(x)
        return out


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, targets = (torch.randint(0, 7, (2, 3), generator=generator) for _ in range(2))
    return F.cross_entropy(model(tokens, rank).flatten(0, 1), targets.flatten())


def build(uses: Uses, rank: int) -> Model:
    torch.manual_seed(rank)
    return Model(uses)


def train(uses: Uses, rank: int) -> dict[str, torch.Tensor]:
    with Init(enabled=uses.init, dtype=torch.float64):
        model = build(uses, rank)
    optimizer = ZeroOptimizer(
        model.double(), stage=uses.stage, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, overlap_comm=uses.overlap,
        reduce_bucket_size=uses.size, param_persistence_threshold=0, max_live_parameters=uses.keep,
        prefetch_bucket_size=uses.prefetch,
    )  # fmt: skip
    for step in range(3):
        with torch.no_grad():
            loss_of(model, rank, 50 + step)
        for micro in range(1 + uses.accumulate):
            loss_of(model, rank, step + 10 * micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(b.leases or b.active for b in optimizer.buckets)
    return optimizer.consolidated_parameters()


def reference(uses: Uses) -> dict[str, torch.Tensor]:
    model = build(Uses(**{**uses.__dict__, "recompute": "none"}), 0).double()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    for step in range(3):
        for p in trainable:
            p.grad = torch.zeros_like(p)
        for rank in range(uses.world):
            for micro in range(1 + uses.accumulate):
                (loss_of(model, rank, step + 10 * micro) / uses.world).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.dear
@examples(times=2)
@given(uses=drawn_uses())
@example(uses=Uses())
@example(uses=Uses(pairs=((0, 2), (2, 0), (1, -1)), returns=True, size=70))
@example(uses=Uses(pairs=((0, 2), (-1, -1)), recompute="non_reentrant", keep=0))
@example(uses=Uses(pairs=((0, 2), (-1, 1)), recompute="reentrant", by_hand=True, stage=2))
def test_external_uses_train_as_one_process_does(uses: Uses) -> None:
    check(uses)


def check(uses: Uses) -> None:
    # fp64; only the order of additions separates the two.
    expected = reference(uses)
    for found in sim.run(uses.world, lambda rank: train(uses, rank)):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_automatic_and_manual_registration_are_the_same_and_can_be_undone() -> None:
    def fn(rank: int) -> None:
        model = build(Uses(pairs=((0, 2),), tied_head=False), 0)
        opt = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1)
        weight = model.blocks[2].inner.weight
        with pytest.raises(ValueError, match="not registered"):
            unregister_external_parameter(model.blocks[0], weight)
        register_external_parameter(model.blocks[0], weight)
        unregister_external_parameter(model.blocks[0], weight)
        loss_of(model, rank, 0).backward()  # finds it again
        unregister_external_parameter(model.blocks[0], weight)
        with GatheredParameters([weight], fwd_module=model.blocks[0]):
            pass
        unregister_external_parameter(model.blocks[0], weight)
        with pytest.raises(ValueError, match=r"Tensor.*nn\.Parameter"):
            register_external_parameter(model, torch.ones(2))
        with pytest.raises(ValueError, match="not part of the model"):
            register_external_parameter(nn.Linear(2, 2), weight)
        opt.step()

    sim.run(2, fn)


def test_what_cannot_be_found_automatically_is_an_error_that_says_how_to_mend_it() -> None:
    def fn(rank: int) -> None:
        model = build(Uses(pairs=((0, 2),), tied_head=False), 0)
        opt = Stage2Optimizer(model, lr=0.1, reduce_bucket_size=1)
        loss_of(model, rank, 0).backward()
        opt.step()

    with pytest.raises(sim.RankError, match=r"blocks\.2.*register_external_parameter"):
        sim.run(2, fn)


def test_what_only_some_ranks_use_is_an_error_unless_it_is_registered() -> None:
    uses = Uses(tied_head=False, silent=True)
    # Messages between two ranks that do not meet are no divergence of a group: over them it is a wait for ever.
    with pytest.raises((sim.DivergenceError, sim.DeadlockError, sim.RankError)):
        sim.run(2, lambda rank: train(uses, rank))


def test_outside_of_a_forward_touching_stays_an_error() -> None:
    model = build(Uses(), 0)
    opt = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0)
    loss_of(model, 0, 0)
    with pytest.raises(PartitionedAccessError, match=r"embed\.weight.*register_external_parameter"):
        F.linear(torch.ones(1, WIDTH), model.embed.weight)
    opt.close()
