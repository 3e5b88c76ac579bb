"""A large table of a unit around is released as soon as backward has read it, and not while anybody may read it yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zoo import sim
from zoo.plan import Kind
from zoo.shard import memory
from zoo.shard.runtime.planning import plan_of
from zoo.zero import ZeroOptimizer


class Tied(nn.Module):
    """An embedding that is the head, around four layers.

    Attributes:
        before: of the table and the tokens, added to the loss; it runs before the embedding.
        embeds: the embedding, or what calls it.
        watch: hook on the gradient of the embedding's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(4)])
        self.before: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self.embeds: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.watch: Callable[[torch.Tensor], None] | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        added = self.before(self.embed.weight, tokens) if self.before is not None else torch.zeros(())
        hidden = (self.embeds or self.embed)(tokens)
        if self.watch is not None and hidden.requires_grad:
            hidden.register_hook(self.watch)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.linear(hidden, self.embed.weight).square().mean() + 1e-4 * added


def trained(
    rank: int, use: Callable[[Tied, Any, torch.Tensor], None], *, change: Callable[[Tied], None] | None = None
) -> tuple[list[torch.Tensor], list[int]]:
    """Parameters after three steps; the bytes of the table's values before each backward of the embedding."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = ZeroOptimizer(
        model, stage=3, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=0,
        units=[nn.Linear, Tied],
    )  # fmt: skip
    if change is not None:
        change(model)
    table, found = optimizer.buckets[0].parameters, list[int]()
    watch = model.watch

    def look(gradient: torch.Tensor) -> None:
        found.append(table.full.untyped_storage().nbytes())
        if watch is not None:
            watch(gradient)

    model.watch = look
    for step in range(3):
        use(model, optimizer, torch.arange(12) * 7 + rank + step)
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.gathered():
        return [p.detach().clone() for p in model.parameters()], found


def once(model: Tied, optimizer: Any, tokens: torch.Tensor) -> None:
    model(tokens).backward()


def compare(monkeypatch: pytest.MonkeyPatch, use: Any = once, change: Any = None) -> list[list[int]]:
    """Train with and without release, on two ranks: the same bits; returns what the latter had of the table."""
    monkeypatch.setattr(memory, "POOLED_BYTES", 1 << 40)
    kept = sim.run(2, lambda rank: trained(rank, use, change=change))
    monkeypatch.setattr(memory, "POOLED_BYTES", 0)
    released = sim.run(2, lambda rank: trained(rank, use, change=change))
    for (one, whole), (other, _) in zip(kept, released, strict=True):
        assert all(map(torch.equal, one, other))
        assert set(whole) == {512 * 64 * 4}
    return [found for _, found in released]


def test_the_backward_of_an_embedding_that_is_the_head_needs_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch) == [[0] * 3] * 2


def test_what_a_small_table_takes_serves_the_next_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "POOLED_BYTES", 512 * 64 * 4)
    for _, found in sim.run(2, lambda rank: trained(rank, once)):
        assert found == [512 * 64 * 4] * 3


@pytest.mark.matrix
@pytest.mark.parametrize("saved", ["itself", "a view", "a detached one", "of one that is frozen for a while"])
def test_what_autograd_has_saved_stays(monkeypatch: pytest.MonkeyPatch, saved: str) -> None:
    def before(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        scale = torch.linspace(0, 1, 64).requires_grad_()
        if saved == "itself":
            return (table * scale).square().sum()
        if saved == "a view":
            return (table.t() @ table).sum()
        if saved == "a detached one":
            return (table.detach() * scale).sum()
        table.requires_grad_(False)
        result = (table * scale).sum()
        table.requires_grad_(True)
        return result

    def change(model: Tied) -> None:
        model.before = before

    # What reads it comes last of all.
    assert compare(monkeypatch, change=change) == [[512 * 64 * 4] * 3] * 2


def test_a_graph_that_is_kept_keeps_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(model: Tied, optimizer: Any, tokens: torch.Tensor) -> None:
        loss = model(tokens)
        loss.backward(retain_graph=True)
        loss.backward()

    assert compare(monkeypatch, twice) == [[512 * 64 * 4, 0] * 3] * 2


def test_a_hook_that_reads_the_table_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []

    def change(model: Tied) -> None:
        def watch(gradient: torch.Tensor) -> None:
            seen.append((model.embed.weight.numel(), float(model.embed.weight.double().square().sum())))

        model.watch = watch

    assert compare(monkeypatch, change=change) == [[0] * 3] * 2
    both = len(seen) // 2
    assert both == 6
    assert sorted(seen[:both]) == sorted(seen[both:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_embedding_that_is_computed_again_has_it(monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    def change(model: Tied) -> None:
        unused = torch.zeros((), requires_grad=True)
        model.embeds = lambda tokens: checkpoint(
            lambda tokens, unused: model.embed(tokens) + unused, tokens, unused, use_reentrant=reentrant
        )

    assert compare(monkeypatch, change=change) == [[0] * 3] * 2


def test_several_forwards_that_wait_for_one_backward_gather_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = []

    def both(model: Tied, optimizer: Any, tokens: torch.Tensor) -> None:
        first, second = model(tokens), model(tokens * 3 % 512)
        with optimizer.sharded.record() as actions:
            (first + second).backward()
        gathers.append(sum(a.kind is Kind.UNSHARD and a.bucket == 0 for a in actions))

    found = compare(monkeypatch, both)
    assert [rank[0] for rank in found] == [512 * 64 * 4] * 2
    half = len(gathers) // 2
    assert gathers[:half] == gathers[half:]


def test_a_plan_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "POOLED_BYTES", 0)

    def differs(rank: int) -> tuple[list[Any], list[Any]]:
        model = Tied()
        optimizer = ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=0,
            units=[nn.Linear, Tied],
        )  # fmt: skip
        once(model, optimizer, torch.arange(12))
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.sharded.record() as actions:
            once(model, optimizer, torch.arange(12))
        kinds = Kind.UNSHARD, Kind.PREFETCH, Kind.RESHARD
        done = [(a.kind, a.bucket) for a in actions if a.kind in kinds]
        return done, [(a.kind, a.bucket) for a in plan_of(optimizer.runtime).actions if a.kind in kinds]

    for done, planned in sim.run(2, differs):
        assert done == planned
        assert done.index((Kind.RESHARD, 0)) < len(done) - 1  # before the first layer
