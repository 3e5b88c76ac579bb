"""What the optimizers promise beside the laws: bad input, loss scaling, states, and a model's odd corners."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

import zoo.optim
from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.config import ConfigError
from zoo.zero import LossScaler, Stage0Optimizer, Stage1Optimizer, Stage2Optimizer, Stage3Optimizer, ZeroOptimizer

ALL = [Stage0Optimizer, Stage1Optimizer, Stage2Optimizer, Stage3Optimizer]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


class Whole(torch.optim.SGD):
    """Not elementwise: divides by the norm of the whole tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm())
        super().step()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"clip_norm": -1.0}, ValueError, "clip_norm=-1.0"),
        ({"clip_norm": math.nan}, ValueError, "clip_norm=nan"),
        ({"loss_scale": "high"}, ValueError, "loss_scale='high'"),
        ({"loss_scale": -2.0}, ValueError, "scale=-2.0"),
        ({"stage": 4}, ValueError, "stage"),
        ({"reduce_bucket_size": -1}, ValueError, "reduce_bucket_size"),
        ({"lr": math.inf}, ValueError, "lr is inf: .* finite number"),
        ({"optimizer": torch.optim.SGD, "lr": torch.tensor(math.nan)}, ValueError, "lr is nan"),
        ({"optimizer": torch.optim.LBFGS}, NotImplementedError, "LBFGS"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)}, ValueError, "not in the model"),
        ({"optimizer": 3}, ValueError, "optimizer=3 is a int; pass a class"),
        ({"optimizer": "NoSuch"}, ValueError, "NoSuch"),
        ({"units": [nn.Linear(2, 2)]}, ValueError, "not part of the model"),
        ({"nonsense": 3}, TypeError, "nonsense"),
    ],
)
def test_bad_options_say_what_is_wrong(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ZeroOptimizer(small(), **{"stage": 2, **options})


def test_a_rate_of_a_group_that_is_not_finite_is_named() -> None:
    model = small()
    with pytest.raises(ValueError, match="lr of parameter group 1 is inf"):
        Stage1Optimizer(model, params=[{"params": model[0].parameters()},
                                       {"params": model[2].parameters(), "lr": math.inf}])  # fmt: skip
    instance = torch.optim.AdamW(model.parameters())
    instance.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr of parameter group 0 is nan"):
        Stage1Optimizer(model, optimizer=instance)


def test_other_elements_are_on_other_ranks() -> None:
    def fn(rank: int) -> None:
        Stage2Optimizer(small(), optimizer=Whole, lr=0.1)

    with pytest.raises(sim.RankError, match=r"Whole needs the parameters.*other elements"):
        sim.run(2, fn)


def test_bad_models_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        Stage2Optimizer(nn.Tanh())
    frozen = small().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        Stage2Optimizer(frozen)
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device"):
        Stage2Optimizer(nn.Sequential(nn.Linear(2, 2, device="meta")))
    model = small()
    Stage2Optimizer(model)
    with pytest.raises(ValueError, match=r"'0\.weight' is a ZeroParameter.*once"):
        Stage2Optimizer(model)
    listed = nn.ModuleList([small()])
    with pytest.raises(ValueError, match="ModuleList: it is never called"):
        Stage3Optimizer(nn.Sequential(listed), units=[nn.ModuleList])


def test_bad_groups_say_what_is_wrong() -> None:
    model = small()
    with pytest.raises(ValueError, match=r"2 trainable.*2\.weight"):
        Stage1Optimizer(model, params=[{"params": list(model[0].parameters())}])
    with pytest.raises(ValueError, match=r"'0\.weight' more than once"):
        Stage1Optimizer(model, params=[{"params": model.parameters()}, {"params": [model[0].weight]}])
    with pytest.raises(ValueError, match="not in the model"):
        Stage1Optimizer(model, params=[nn.Parameter(torch.ones(2))])
    optimizer = Stage1Optimizer(model)
    with pytest.raises(NotImplementedError, match="at construction"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_ranks_with_different_models_are_told_at_construction() -> None:
    def fn(rank: int) -> None:
        Stage2Optimizer(nn.Linear(3, 3 + rank // 2), lr=0.1)

    with pytest.raises(sim.RankError) as caught:
        sim.run(3, fn)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    assert "the parameters and their groups: " in str(caught.value)
    assert "'weight' is (3, 3) float32 on ranks 0, 1, (4, 3) float32 on rank 2, and 1 more differ" in str(caught.value)


def test_values_of_rank_0_are_everyones() -> None:
    def fn(rank: int) -> torch.Tensor:
        model = nn.Linear(3, 3)
        torch.manual_seed(rank)
        nn.init.normal_(model.weight)
        return ZeroOptimizer(model, stage=rank * 0 + 3, lr=0.1).consolidated_parameters()["weight"]

    first, *others = sim.run(4, fn)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.matrix
@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("world", [1, 3])
def test_fp16_skips_the_step_on_all_ranks_when_one_overflows(cls: type[ZeroOptimizer], world: int) -> None:
    def fn(rank: int) -> list[Any]:
        model = small().half()
        scaler = LossScaler(scale=2.0**10, hysteresis=1)
        optimizer = cls(model, lr=0.01, loss_scale=scaler, clip_norm=1.0)
        seen: list[Any] = []
        for step in range(3):
            before = optimizer.consolidated_parameters()
            factor = 1e6 if step == 1 and rank == world - 1 else 1.0
            optimizer.backward(model(data(rank, step).half()).float().square().mean() * factor)
            optimizer.step()
            optimizer.zero_grad()
            after = optimizer.consolidated_parameters()
            changed = any(not torch.equal(before[n], after[n]) for n in before)
            seen.append((optimizer.skipped, changed, optimizer.loss_scale))
        assert optimizer.num_skipped == 1
        return seen

    for seen in sim.run(world, fn):
        assert seen == [(False, True, 1024.0), (True, False, 512.0), (False, True, 512.0)]


def test_a_static_scale_changes_nothing_but_rounding() -> None:
    def fn(rank: int, scale: float | None) -> dict[str, torch.Tensor]:
        model = small()
        optimizer = Stage2Optimizer(model, optimizer=torch.optim.SGD, lr=0.1, loss_scale=scale, clip_norm=0.1)
        for step in range(3):
            optimizer.backward(model(data(rank, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    plain = sim.run(2, lambda rank: fn(rank, None))
    scaled = sim.run(2, lambda rank: fn(rank, 1024.0))
    for name, value in plain[0].items():
        torch.testing.assert_close(scaled[1][name], value, rtol=1e-6, atol=1e-7)


@examples(times=5)
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_the_loss_scaler_follows_its_definition(
    overflows: list[bool], window: int, hysteresis: int, back: bool
) -> None:
    scaler = LossScaler(scale=64.0, window=window, hysteresis=hysteresis, consecutive_hysteresis=back, min_scale=1.0)
    scale, lives, run = 64.0, hysteresis, 0
    for overflow in overflows:
        scaler.update(overflow=overflow)
        if overflow:
            run = 0
            if lives == 1:
                scale = max(scale / 2, 1.0)
            else:
                lives -= 1
        else:
            run += 1
            lives = hysteresis if back else lives
            if run % window == 0:
                scale, lives = scale * 2, hysteresis
        assert scaler.scale == scale
        again = LossScaler(window=window, hysteresis=hysteresis)
        again.load(scaler.state())
        assert (again.scale, again.good_steps, again.lives) == (scaler.scale, scaler.good_steps, scaler.lives)


@given(
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stages=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cls=st.sampled_from([torch.optim.AdamW, zoo.optim.AdamW]),
    num_steps=st.sampled_from([0, 2]),
)
def test_state_moves_between_placements(
    worlds: tuple[int, int], stages: tuple[int, int], dtype: torch.dtype, cls: Any, num_steps: int
) -> None:
    """save → load → save gives the same logical state, at any other world size and stage."""

    def build(stage: int) -> tuple[nn.Module, ZeroOptimizer]:
        model = small().to(dtype)
        model[0].bias.requires_grad_(False)
        return model, ZeroOptimizer(
            model, stage=stage, optimizer=cls, lr=0.01, param_persistence_threshold=5, reduce_bucket_size=20
        )

    def collect(optimizer: ZeroOptimizer) -> tuple[dict[Any, torch.Tensor], dict[str, float]]:
        slices = {(s.name, s.role, s.start): s.tensor.float().clone() for s in optimizer.state_slices()}
        return slices, optimizer.state_scalars()

    def save(rank: int) -> Any:
        model, optimizer = build(stages[0])
        for step in range(num_steps):
            model(data(rank, step).to(dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return collect(optimizer)

    def whole(parts: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
        logical: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
        for slices, _ in parts:
            for (name, role, start), tensor in slices.items():
                assert start not in logical.setdefault((name, role), {}), "two ranks own one element"
                logical[name, role][start] = tensor
        return {key: torch.cat([pieces[s] for s in sorted(pieces)]) for key, pieces in logical.items()}

    saved = sim.run(worlds[0], save)
    state = whole(saved)
    scalars = {k: v for _, s in saved for k, v in s.items()}
    moments = {"exp_avg", "exp_avg_sq"} if num_steps else set()
    assert {role for _, role in state} == {"parameter"} | moments
    trained = ("0.weight", "2.weight", "2.bias") if num_steps else ()
    assert {k: float(v) for k, v in scalars.items()} == {f"step/{n}": 2.0 for n in trained}
    if dtype is torch.bfloat16:  # more digits than bf16 has, which only a master keeps
        state = {k: v + 1e-4 if k[1] == "parameter" and k[0] != "0.bias" else v for k, v in state.items()}

    def load(rank: int) -> Any:
        _, optimizer = build(stages[1])
        optimizer.load_state(lambda name, role, start, length: state[name, role][start : start + length], scalars)
        live = optimizer.consolidated_parameters(torch.float32)
        for name, value in live.items():
            assert torch.equal(value.flatten(), state[name, "parameter"].to(dtype).float())
        return collect(optimizer)

    loaded = sim.run(worlds[1], load)
    again = whole(loaded)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[k], state[k]) for k in state)
    assert {k: v for _, s in loaded for k, v in s.items()} == scalars


@pytest.mark.matrix
@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("frozen", [False, True])
def test_state_dict_continues_exactly(cls: type[ZeroOptimizer], frozen: bool) -> None:
    def fn(rank: int) -> None:
        def train(model: nn.Module, optimizer: ZeroOptimizer, steps: range) -> None:
            for step in steps:
                model(data(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        model = small()
        model[0].requires_grad_(not frozen)
        optimizer = cls(model, lr=0.01)
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
        optimizer.param_groups[0]["lr"] = 0.01
        train(model, optimizer, range(2, 4))
        fresh = small()
        fresh[0].requires_grad_(not frozen)
        if frozen:
            fresh[0].weight.data.zero_()
        second = cls(fresh, lr=0.5)
        second.load_state_dict(saved)
        train(fresh, second, range(2, 4))
        first, then = optimizer.consolidated_parameters(), second.consolidated_parameters()
        assert all(torch.equal(first[n], then[n]) for n in first)
        saved["world_size"] = 7
        with pytest.raises(ValueError, match="of 7"):
            second.load_state_dict(saved)

    sim.run(2, fn)


@pytest.mark.parametrize("cls", ALL)
def test_torch_schedulers_drive_the_learning_rate(cls: type[ZeroOptimizer]) -> None:
    model, plain = small(), small()
    optimizer = cls(model, optimizer=torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, reference)]
    for step in range(3):
        for m, o in ((model, optimizer), (plain, reference)):
            m(data(0, step)).square().mean().backward()
            o.step()
            o.zero_grad()
        for schedule in schedules:
            schedule.step()
    expected = dict(plain.named_parameters())
    for name, value in optimizer.consolidated_parameters().items():
        torch.testing.assert_close(value, expected[name].detach())


@pytest.mark.parametrize("cls", ALL)
def test_a_retained_graph_can_be_gone_through_twice(cls: type[ZeroOptimizer]) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        model = small()
        optimizer = cls(model, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0)
        loss = model(data(rank)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return optimizer.consolidated_parameters()

    plain = small()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rank in range(2):
        plain(data(rank)).square().mean().backward()
    reference.step()
    expected = dict(plain.named_parameters())
    for got in sim.run(2, fn):
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name].detach())


@pytest.mark.parametrize("cls", ALL)
def test_forwards_that_nobody_goes_back_through_do_no_harm(cls: type[ZeroOptimizer]) -> None:
    def fn(rank: int, disturb: bool) -> dict[str, torch.Tensor]:
        model = small()
        optimizer = cls(model, lr=0.1, param_persistence_threshold=0)
        kept = []
        for step in range(3):
            if disturb:
                kept.append(model(data(rank, 9)))
                model(data(rank, 8))
                with torch.no_grad():
                    model.eval()(data(rank, 7))
                model.train()
                with pytest.raises(RuntimeError):
                    model(torch.ones(2, 99))
            model(data(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    plain, disturbed = (sim.run(2, lambda rank, d=d: fn(rank, d)) for d in (False, True))
    for name, value in plain[0].items():
        assert torch.equal(disturbed[0][name], value)


def test_wrong_types_in_the_config_section_are_named() -> None:
    from zoo.config import load

    for value, word in (({"stge": 1}, "stage"), ({"stage": "two"}, "stage"), ({"stage": 9}, "stage")):
        with pytest.raises(ConfigError, match=word):
            load({"train_batch_size": 1, "zero_optimization": value}, world_size=1)


def test_a_rank_that_dies_mid_step_is_an_error_on_the_others() -> None:
    def fn(rank: int) -> None:
        model = small()
        optimizer = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0)
        for step in range(3):
            model(data(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(sim.RankError, match="rank 1"):
        sim.run(3, fn, faults=[sim.Crash(rank=1, at=5)])


@pytest.mark.parametrize("cls", ALL)
def test_unused_parameters_are_an_error_where_that_is_asked_for(cls: type[ZeroOptimizer]) -> None:
    def fn(rank: int) -> None:
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
        model.forward = lambda x, both: model["other"](model["used"](x)) if both else model["used"](x)  # type: ignore
        optimizer = cls(model, lr=0.1, ignore_unused_parameters=False, param_persistence_threshold=0)
        with optimizer.no_sync():
            model(data(rank), False).sum().backward()
        model(data(rank), True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"2 trainable parameter\(s\) got no gradient.*other\.bias, other\.weight"):
            model(data(rank), False).sum().backward()
        optimizer.zero_grad()
        model(data(rank), True).sum().backward()
        optimizer.step()

    sim.run(2, fn)


def test_states_go_away_and_come_back() -> None:
    def fn(rank: int) -> None:
        model = small()
        optimizer = Stage3Optimizer(model, optimizer=zoo.optim.AdamW, lr=0.1, param_persistence_threshold=0)
        model(data(rank)).square().mean().backward()
        optimizer.step()
        before = optimizer.state_dict()["slices"]
        elements = sum(b.layout.size // 2 for b in optimizer.buckets)
        assert optimizer.offload_states(["optim_states"]) == 8 * elements
        with pytest.raises(ValueError, match="call reload_states"):
            optimizer.step()
        optimizer.reload_states()
        assert optimizer.offload_states() == 16 * elements  # parameters and gradients too
        optimizer.reload_states()
        after = optimizer.state_dict()["slices"]
        assert all(torch.equal(before[key], after[key]) for key in before)
        with pytest.raises(ValueError, match="include has 'states'; allowed are 'optim_states'"):
            optimizer.offload_states(["states"])
        with pytest.raises(ValueError, match="at stage 0"):
            ZeroOptimizer(small(), stage=0, lr=0.1).offload_states()

    sim.run(2, fn)
