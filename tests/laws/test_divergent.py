"""Law 2 where every rank takes a way of its own through the model (``divergent=True``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import sim
from zoo.comm import Communicator
from zoo.zero import GatheredParameters, ZeroOptimizer, safe_get_full_fp32_param

NUM_BLOCKS, WIDTH, RATE = 4, 5, 0.1


@dataclass(frozen=True)
class Case:
    """``ways[step][rank]``: for each micro-batch of the rank the blocks that it runs, in order; it may have none."""

    ways: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    looks: tuple[tuple[int, ...], ...]  # by step and rank: evaluations before it
    bucket_size: int
    keep: int | None
    threshold: int
    clip_norm: float
    piecewise: bool
    seed: int

    @property
    def world(self) -> int:
        return len(self.ways[0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world, steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    way = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=5).map(tuple)
    of_rank = st.lists(way, max_size=2).map(tuple)
    return Case(
        ways=tuple(tuple(draw(of_rank) for _ in range(world)) for _ in range(steps)),
        looks=tuple(tuple(draw(st.integers(0, 2)) for _ in range(world)) for _ in range(steps)),
        bucket_size=draw(st.sampled_from([1, 70, 10**6])),
        keep=draw(st.sampled_from([0, None])),
        threshold=draw(st.sampled_from([0, 10])),
        clip_norm=draw(st.sampled_from([0.0, 0.05])),
        piecewise=draw(st.booleans()),
        seed=draw(st.integers(0, 20)),
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.double()

    def forward(self, x: torch.Tensor, way: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for index in way:
            x = x + torch.tanh(self.blocks[index](x))
        return x


def data(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


def losses(model: Model, case: Case, step: int, rank: int) -> list[torch.Tensor]:
    run: Any = model.forward if case.piecewise else model
    return [run(data(rank, step, i), way).square().mean() for i, way in enumerate(case.ways[step][rank])]


def build(case: Case, **options: Any) -> tuple[Model, ZeroOptimizer]:
    model = Model()
    return model, ZeroOptimizer(
        model, stage=3, optimizer=torch.optim.SGD, lr=RATE, momentum=0.9, divergent=True, clip_norm=case.clip_norm,
        reduce_bucket_size=case.bucket_size, max_live_parameters=case.keep,
        param_persistence_threshold=case.threshold, **options,
    )  # fmt: skip


def reference(case: Case) -> dict[str, torch.Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step, ways in enumerate(case.ways):
        if not any(ways):
            continue  # nobody has a gradient: no step
        optimizer.zero_grad(set_to_none=False)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for rank in range(case.world):
            for loss in losses(model, case, step, rank):
                (loss / case.world).backward()
        if case.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@given(case=cases())
def test_every_rank_may_take_a_way_of_its_own(case: Case) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(case)
        for step in range(len(case.ways)):
            with torch.no_grad():
                for look in range(case.looks[step][rank]):
                    model(data(rank, 50, look), (look, 3 - look))
            for loss in losses(model, case, step, rank):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    expected = reference(case)
    for got in sim.run(case.world, fn, seed=case.seed):
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


ALIKE = Case((((( 0, 1),), ((1, 0, 1),)),), ((0, 1),), 1, 0, 0, 0.0, False, 0)  # fmt: skip


def test_collectives_of_the_user_come_after_settling() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(ALIKE)
        with torch.no_grad():
            for look in range(1 + 2 * rank):
                model(data(rank, 0, look), (look % 4,))
        optimizer.sharded.settle()
        total = torch.tensor([1.0 + rank])
        Communicator().all_reduce(total).wait()
        assert total.item() == 3.0
        with torch.no_grad():
            for look in range(2 - rank):
                model(data(rank, 0, look), (look % 4,))
        with GatheredParameters(model.blocks[2].weight, modifier_rank=0), torch.no_grad():
            model.blocks[2].weight.fill_(2.0)
        if rank == 0:
            with torch.no_grad():
                model(data(rank, 0, 0), (1,))
        assert bool((safe_get_full_fp32_param(model.blocks[2].weight) == 2.0).all())

    sim.run(2, fn)


def whole_sum(model: Model, optimizer: ZeroOptimizer) -> float:
    with optimizer.sharded.gathered():
        return float(sum(p.detach().sum() for p in model.parameters()))


def closed_sum(model: Model, optimizer: ZeroOptimizer) -> float:
    optimizer.close()
    return float(sum(p.detach().sum() for p in model.parameters()))


def one_by_one(model: Model, optimizer: ZeroOptimizer) -> float:
    return float(sum(value.sum() for _, value in optimizer.whole_parameters()))


def held_sum(model: Model, optimizer: ZeroOptimizer) -> float:
    with GatheredParameters(list(model.parameters())):
        return float(sum(p.detach().sum() for p in model.parameters()))


def loaded_sum(model: Model, optimizer: ZeroOptimizer) -> float:
    optimizer.load_state_dict(optimizer.state_dict())
    return one_by_one(model, optimizer)


@pytest.mark.parametrize("look", [whole_sum, closed_sum, one_by_one, held_sum, loaded_sum])
def test_parameters_are_looked_at_while_only_some_ranks_have_some_whole(look: Any) -> None:
    """A forward without its backward leaves some gathered, on the ranks that ran it."""

    def fn(rank: int) -> float:
        model, optimizer = build(replace(ALIKE, keep=None))
        kept = model(data(0, 0, 0), (0, 1)).sum() if rank == 0 else None
        found: float = look(model, optimizer)
        del kept
        return found

    expected = float(sum(p.detach().sum() for p in Model().parameters()))
    assert sim.run(2, fn) == pytest.approx([expected, expected])


@pytest.mark.parametrize("quantised", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_a_rank_gives_what_it_has_whole_in_the_form_in_which_others_gather_it(quantised: str) -> None:
    def fn(rank: int) -> float:
        model = Model().float()
        model.blocks.requires_grad_(False)
        optimizer = ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=RATE, divergent=True, param_persistence_threshold=0,
            **{quantised: True},
        )  # fmt: skip
        kept = model(data(rank, 0, 0).float(), (0, 1)).sum()  # whole on both until a backward
        if rank == 1:
            optimizer.empty_partition_cache()
            kept = model(data(rank, 0, 0).float(), (0, 1)).sum()
        optimizer.step()
        return float(kept.detach())

    expected = [float(Model().float()(data(rank, 0, 0).float(), (0, 1)).sum().detach()) for rank in range(2)]
    assert sim.run(2, fn) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("by_window", [False, True])
def test_gradients_that_only_some_ranks_have_are_reduced_before_the_step(by_window: bool) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(ALIKE)
        with optimizer.sharded.window() as window:
            for key in range(1 + rank):
                with window.forward(key):
                    loss = losses(model, ALIKE, 0, rank)[0]
                with window.backward(key, reduce=by_window and key == rank):
                    (loss / (1 + rank)).backward()
        if rank and not by_window:
            with torch.no_grad():
                model(data(rank, 0, 0), (2,))  # the others are in reduce() by now
        optimizer.sharded.reduce()
        optimizer.step()
        return optimizer.consolidated_parameters()

    expected = reference(ALIKE)
    for got in sim.run(2, fn):
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_without_it_ranks_that_part_are_told() -> None:
    def fn(rank: int) -> None:
        model = Model()
        ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=RATE, param_persistence_threshold=0, reduce_bucket_size=1
        )
        model(data(rank, 0, 0), (0,) if rank else (0, 1)).sum().backward()

    with pytest.raises((sim.DivergenceError, sim.DeadlockError)):
        sim.run(2, fn)


def test_it_holds_no_more_and_votes_once_a_gather() -> None:
    def fn(rank: int) -> tuple[int, int]:
        model, optimizer = build(ALIKE)
        for loss in losses(model, ALIKE, 0, rank):
            loss.backward()
        optimizer.step()
        assert not any(b.parameters.live for b in optimizer.buckets)
        return optimizer.comm.log.ops["all_gather"].count, optimizer.comm.log.ops["all_reduce"].count

    for gathers, votes in sim.run(2, fn):
        assert votes == gathers + 2  # and one for the end, and one for whether there are gradients


def test_backward_holds_one_unit_after_the_other() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(ALIKE)
        seen: list[int] = []

        def look(*_: Any) -> None:
            seen.append(sum(b.parameters.live for b in optimizer.buckets))

        for module in (model.first, *model.blocks):
            module.register_full_backward_hook(look)
        model(data(rank, 0, 0), (0, 1, 2, 3)).square().mean().backward()
        assert len(seen) == 1 + NUM_BLOCKS
        assert max(seen) <= 2  # the one that was, and the one that is

    sim.run(2, fn)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 2}, "divergent needs stage 3"),
        ({"update_in_backward": True}, "divergent=True with update_in_backward"),
        ({"mics_shard_size": 1}, "divergent=True with mics_shard_size"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ZeroOptimizer(Model(), **{"stage": 3, "lr": 0.1, "divergent": True, **options})


@pytest.mark.parametrize("keep", [0, None])
def test_a_parameter_of_the_model_itself_that_two_of_its_layers_share(keep: int | None) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.again, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.again.weight = self.first.weight
            self.double()

        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            for _ in range(times):
                x = torch.tanh(self.again(x))
            out: torch.Tensor = self.last(x)  # the very tensor that the model returns
            return out

    def fn(rank: int) -> None:
        model = Tied()
        optimizer = ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=RATE, divergent=True, param_persistence_threshold=0,
            reduce_bucket_size=1, max_live_parameters=keep,
        )  # fmt: skip
        model(data(rank, 0, 0), rank).square().mean().backward()
        optimizer.step()
        for name, value in optimizer.consolidated_parameters().items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-10, atol=1e-10)

    plain = Tied()
    for rank in range(2):
        (plain(data(rank, 0, 0), rank).square().mean() / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    sim.run(2, fn)
