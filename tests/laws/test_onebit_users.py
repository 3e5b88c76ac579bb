"""What users do with optimizers that compress, in whatever order: right on all ranks, or a sentence (law 8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.laws.test_onebit import (
    ADAM,
    DILOCO,
    GROUP,
    GROUPS,
    LAMB,
    LOCAL,
    PURE,
    ZERO_ONE,
    advance,
    build,
    collect,
    data,
    make,
    same,
    whole,
)
from torch import nn

from zoo import sim
from zoo.optim import AdamW, OnebitAdam
from zoo.zero import GatheredParameters, ZeroOptimizer

EACH = {"Adam": ADAM, "Lamb": LAMB}
PLACES = [PURE[0], PURE[2], GROUPS[1]]


def own(optimizer: ZeroOptimizer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in optimizer.whole_parameters()}


def alike(found: list[dict[str, torch.Tensor]]) -> bool:
    return all(same(of_rank, found[0]) for of_rank in found)


def change(optimizer: ZeroOptimizer, **options: Any) -> None:
    for group in optimizer.param_groups:
        group.update(options)


# Options that change between steps ------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("way", EACH.values(), ids=EACH)
@pytest.mark.parametrize("placement", PLACES, ids=str)
def test_a_warm_up_that_is_made_longer_is_one_of_all_ranks(way: dict[str, Any], placement: dict[str, Any]) -> None:
    """Two steps of warm-up, two that compress, and two of warm-up again: variances and momenta stay the same on all."""

    def fn(rank: int) -> Any:
        model, optimizer = build(**way, **placement)
        for step in range(4):
            advance(model, optimizer, rank, step)
        change(optimizer, freeze_step=6)
        for step in range(4, 6):
            forecast = optimizer.forecast()
            optimizer.comm.log.reset()
            advance(model, optimizer, rank, step)
            sent = {op: row.wire_bytes for op, row in optimizer.comm.log.ops.items() if row.wire_bytes}
            assert sent == forecast.wire_bytes
        assert optimizer.param_groups[0]["num_variances"] == 4  # what bias correction goes by
        advance(model, optimizer, rank, 6)
        return own(optimizer)

    assert alike(sim.run(4, fn))


def test_a_lamb_whose_warm_up_ends_early_begins_its_factor_with_the_variance() -> None:
    """w begins as v, so that the first factor is 1 whatever step it is."""

    def fn(rank: int) -> None:
        model, optimizer = build(**LAMB | {"freeze_step": 9}, stage=0)
        for step in range(4):
            advance(model, optimizer, rank, step)
        change(optimizer, freeze_step=2)
        advance(model, optimizer, rank, 4)
        state = [s for s in optimizer.inner.state.values() if bool((s["exp_avg_sq"] > 0).any())]
        assert all(bool((s["fresh_sq"] >= 0.9 * s["exp_avg_sq"]).all()) for s in state)

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("placement", PLACES, ids=str)
def test_options_that_change_after_a_backward_are_refused_where_its_gradients_do_not_fit(
    placement: dict[str, Any],
) -> None:
    def fn(rank: int) -> Any:
        model, optimizer = build(**ADAM, **placement)
        for step in range(4):
            advance(model, optimizer, rank, step)
        optimizer.backward(model(data(rank, 4)).square().mean())
        change(optimizer, freeze_step=9)
        with pytest.raises(ValueError, match=r"change options between zero_grad\(\) and backward"):
            optimizer.step()
        optimizer.zero_grad()
        for step in range(4, 7):
            advance(model, optimizer, rank, step)
        return own(optimizer)

    assert alike(sim.run(4, fn))


def test_groups_that_part_later_are_refused_and_can_come_back() -> None:
    def fn(rank: int) -> Any:
        model = make()
        parts = [model[0].parameters(), [*model[2].parameters(), *model[4].parameters()]]
        groups = [{"params": list(part)} for part in parts]
        optimizer = ZeroOptimizer(model, params=groups, stage=0, compressor=GROUP, **ADAM)
        advance(model, optimizer, rank, 0)
        for wrong, words in ((9, "would synchronise in different steps"), (0, "freeze_step=0")):
            optimizer.param_groups[1]["freeze_step"] = wrong
            with pytest.raises(ValueError, match=words):
                advance(model, optimizer, rank, 1)
            optimizer.param_groups[1]["freeze_step"] = 2
            optimizer.step()
            optimizer.zero_grad()
        return own(optimizer)

    assert alike(sim.run(2, fn))


@pytest.mark.parametrize("placement", [PURE[0], GROUPS[1]], ids=str)
def test_local_steps_that_are_turned_off_end_with_an_agreement(placement: dict[str, Any]) -> None:
    def fn(rank: int) -> Any:
        model, optimizer = build(**ZERO_ONE, **placement)
        for step in range(5):
            advance(model, optimizer, rank, step)
        assert optimizer.updater.apart
        change(optimizer, local_step_clipper=1)
        advance(model, optimizer, rank, 5)
        assert not optimizer.updater.apart
        return own(optimizer)

    assert alike(sim.run(4, fn))


def test_a_variance_that_is_updated_again_between_agreements_is_refused() -> None:
    """Momenta of ranks differ there; with the old option the step is the one it would have been."""

    def fn(rank: int, changes: bool) -> Any:
        model, optimizer = build(**ZERO_ONE, stage=0)
        for step in range(8):
            if changes and step == 5:
                assert optimizer.updater.apart
                names = ("var_freeze_step", "var_update_scaler")
                old = {name: optimizer.param_groups[0][name] for name in names}
                change(optimizer, var_freeze_step=50, var_update_scaler=50)
                with pytest.raises(ValueError, match="var_freeze_step=50 was given after 1 steps that each rank made"):
                    advance(model, optimizer, rank, step)
                optimizer.zero_grad()
                change(optimizer, **old)
            advance(model, optimizer, rank, step)
        return own(optimizer)

    changed, plain = (sim.run(2, lambda r, k=k: fn(r, k)) for k in (True, False))
    assert all(same(a, b) for a, b in zip(changed, plain, strict=True))


def test_local_steps_that_are_turned_on_later() -> None:
    def fn(rank: int, later: bool) -> Any:
        model, optimizer = build(**ZERO_ONE | ({"local_step_clipper": 1} if later else {}), stage=0)
        for step in range(8):
            if step == 2:
                change(optimizer, local_step_clipper=2)
            advance(model, optimizer, rank, step)
        return own(optimizer)

    late, always = (sim.run(2, lambda r, k=k: fn(r, k)) for k in (True, False))
    assert all(same(a, b) for a, b in zip(late, always, strict=True))

    def split(rank: int) -> None:
        model, optimizer = build(**ZERO_ONE | {"local_step_clipper": 1}, stage=2)
        advance(model, optimizer, rank, 0)
        change(optimizer, local_step_clipper=2)
        with pytest.raises(NotImplementedError, match="local_step_clipper=1"):
            advance(model, optimizer, rank, 1)

    sim.run(2, split)


def test_an_outer_momentum_that_comes_later_counts() -> None:
    def fn(rank: int, momentum: float) -> Any:
        model, optimizer = build(**LOCAL | {"outer_momentum": 0.0, "outer_nesterov": False}, stage=0)
        for step in range(9):
            if step == 3:
                change(optimizer, outer_momentum=momentum)
            advance(model, optimizer, rank, step)
        return own(optimizer)

    without, more = (sim.run(2, lambda r, m=m: fn(r, m)) for m in (0.0, 0.5))
    assert alike(more)
    assert not same(without[0], more[0])


def test_who_agrees_is_told_by_the_steps_and_not_by_options_that_changed() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(**LOCAL | {"momentum": 0.0}, stage=0)
        for step in range(4):
            advance(model, optimizer, rank, step)
        assert optimizer.updater.apart
        change(optimizer, sync_every=4)  # of which step 4 would have been one
        assert optimizer.updater.apart

    sim.run(2, fn)


# Loading --------------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """One element: ranks that split it have padding, but for one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def state_of(saved: list[Any]) -> Any:
    state, scalars = whole([found for found, *_ in saved]), {k: v for _, found, *_ in saved for k, v in found.items()}

    def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
        return state[name, role].view(-1)[start : start + length]

    return read, scalars


@pytest.mark.matrix
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("before", [AdamW, OnebitAdam])
@pytest.mark.parametrize("placement", [*PURE, GROUPS[2]], ids=str)
def test_ranks_without_elements_go_on_at_the_same_step(placement: dict[str, Any], before: Any, steps: int) -> None:
    adam = {"optimizer": before, "lr": 0.05, "weight_decay": 0.0}
    adam |= {"freeze_step": 2, "compressor": GROUP} if before is OnebitAdam else {}

    def save(rank: int) -> Any:
        model = Tiny()
        optimizer = ZeroOptimizer(model, **adam, **placement)
        for step in range(steps):
            advance(model, optimizer, rank, step)
        saved = collect(optimizer), optimizer.state_scalars(), dict(optimizer.param_groups[0])
        advance(model, optimizer, rank, steps)
        return *saved, own(optimizer)

    saved = sim.run(4, save)
    read, scalars = state_of(saved)

    def load(rank: int) -> Any:
        model = Tiny()
        optimizer = ZeroOptimizer(model, optimizer=OnebitAdam, freeze_step=2, lr=0.05, compressor=GROUP, **placement)
        advance(model, optimizer, rank, 50)  # a state of its own, which counts no more
        change(optimizer, **{k: v for k, v in saved[0][2].items() if k not in ("params", "param_names")})
        optimizer.load_state(read, scalars)
        assert optimizer.inner.num_steps == optimizer.param_groups[0]["num_steps"] == steps
        advance(model, optimizer, rank, steps)
        return own(optimizer)

    loaded = sim.run(4, load)
    assert alike(loaded)
    if before is OnebitAdam:
        assert same(loaded[0], saved[0][3])


def test_a_state_of_torch_goes_on_compressed() -> None:
    """Options that Adam does not have stay; all its steps have updated the variance."""
    model, later = make(), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(3):
        model(data(0, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    later.load_state_dict(model.state_dict())
    frozen = OnebitAdam(later.parameters(), freeze_step=2, weight_decay=0.0)
    later(data(0, 9)).square().mean().backward()
    frozen.step()  # which the state that is loaded knows nothing of
    frozen.zero_grad()
    later.load_state_dict(model.state_dict())
    frozen.load_state_dict(optimizer.state_dict())
    before = [frozen.state[p]["exp_avg_sq"].clone() for p in later.parameters()]
    later(data(0, 3)).square().mean().backward()
    frozen.step()
    group = frozen.param_groups[0]
    assert (frozen.num_steps, group["freeze_step"], group["lr"], group["num_variances"]) == (4, 2, 0.01, 3)
    assert all(torch.equal(frozen.state[p]["exp_avg_sq"], v) for p, v in zip(later.parameters(), before, strict=True))
    state = frozen.state[later[0].weight]
    unbiased = (state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8
    want = model[0].weight.detach() - 0.01 * state["exp_avg"] / (1 - 0.9**4) / unbiased
    torch.testing.assert_close(later[0].weight.detach(), want)


# Writing --------------------------------------------------------------------------------------------------------------


def written(way: dict[str, Any], placement: dict[str, Any], at: int, gathered: bool) -> Any:
    def fn(rank: int) -> Any:
        model, optimizer = build(**way, **placement)
        for step in range(at):
            advance(model, optimizer, rank, step)
        weight = model[0].weight
        if gathered:
            with GatheredParameters(weight, modifier_rank=0):
                if rank == 0:
                    weight.data.fill_(7.0)
        else:
            with torch.no_grad():
                weight.fill_(7.0)
        change(optimizer, lr=0.0)
        for step in range(at, at + 6):
            advance(model, optimizer, rank, step)
        return own(optimizer)["0.weight"], [dict(s) for s in optimizer.inner.state.values()]

    return sim.run(4, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("placement", [PURE[0], GROUPS[1]], ids=str)
def test_what_is_written_where_ranks_agree_stays(placement: dict[str, Any], gathered: bool) -> None:
    """Also where an outer optimizer would take it for what the ranks have moved, and go on along it."""
    local = LOCAL | {"momentum": 0.0, "outer_momentum": 0.0, "outer_nesterov": False, "outer_lr": 0.5}
    for way in (ZERO_ONE, local):
        for value, _ in written(way, placement, 0 if way is ZERO_ONE else 3, gathered):
            torch.testing.assert_close(value, torch.full_like(value, 7.0))


@pytest.mark.matrix
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("way", [ZERO_ONE, LOCAL, DILOCO], ids=["ZeroOne", "LocalSGD", "DiLoCo"])
def test_what_is_written_between_agreements_is_refused(way: dict[str, Any], gathered: bool) -> None:
    with pytest.raises(sim.RankError, match="cannot be written to between two steps"):
        written(way, PURE[0], 5, gathered)
