"""The engine on simulated ranks: accumulation, schedules, precision, checkpoints, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.config import load
from zoo.engine import Engine, initialize

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "seed": 3,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
}


class Net(nn.Module):
    """Regression with a normalisation that keeps buffers, and noise from the random number generator."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)
        self.norm = nn.BatchNorm1d(7, affine=False)
        self.noise = noise

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.noise:
            h = h + self.noise * torch.randn_like(h)
            h = self.norm(h)
        return (self.second(h) - y).square().mean()


def net(noise: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(noise)


def data(count: int = 64) -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=dice)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def start(changes: dict[str, Any] | None = None, noise: float = 0.0) -> Engine:
    torch.set_num_threads(1)
    engine, optimizer, loader, schedule = initialize({**BASE, **(changes or {})}, net(noise), training_data=data())
    assert engine.optimizer is optimizer
    assert engine.dataloader is loader
    assert engine.lr_scheduler is schedule
    return engine


def stage(number: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, "stage3_param_persistence_threshold": 0}}


def test_one_rank_is_plain_torch() -> None:
    engine = start({"scheduler": None})
    losses = [float(engine.train_batch()) for _ in range(5)]
    model, samples = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    order = iter(initialize(BASE, net(), training_data=samples)[2] or ())
    for expected in losses:
        loss = model(*next(order))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_ranks_and_accumulation_change_nothing_but_rounding(number: int, accumulation: int) -> None:
    # A step's samples are the same eight, on one rank at once or dealt out.
    alone = start(stage(0))
    expected = [float(alone.train_batch()) for _ in range(6)]

    def job(rank: int) -> list[float]:
        engine = start({**stage(number), "gradient_accumulation_steps": accumulation})
        losses = [float(engine.train_batch()) for _ in range(6)]
        assert engine.micro_steps == 6 * accumulation
        assert engine.global_steps == 6
        return losses

    for found in sim.run(2, job):
        assert found == pytest.approx(expected, abs=2e-6)


def test_the_three_calls_are_train_batch() -> None:
    def job(rank: int) -> tuple[list[bool], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        whole, parts = (start({**stage(2), "gradient_accumulation_steps": 2}) for _ in range(2))
        boundaries = []
        for _ in range(3):
            whole.train_batch()
        assert parts.dataloader is not None
        for x, y in list(parts.dataloader)[:6]:
            boundaries.append(parts.is_gradient_accumulation_boundary())
            loss = parts(x, y)
            parts.backward(loss)
            parts.step()
        return boundaries, whole.optimizer.consolidated_parameters(), parts.optimizer.consolidated_parameters()

    for boundaries, first, second in sim.run(2, job):
        assert boundaries == [False, True] * 3
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_stages_0_and_1_are_silent_between_boundaries() -> None:
    def job(rank: int) -> list[int]:
        engine = start({**stage(1), "gradient_accumulation_steps": 4})
        assert engine.dataloader is not None
        moved = []
        for x, y in list(engine.dataloader)[:4]:
            before = engine.comm.log.wire_bytes
            engine.backward(engine(x, y))
            moved.append(engine.comm.log.wire_bytes - before)
            engine.step()
        return moved

    for moved in sim.run(2, job):
        assert moved[:3] == [0, 0, 0]


def test_the_schedule_is_stepped_at_boundaries() -> None:
    engine = start({"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4})
    seen = []
    for _ in range(6):
        seen.append(engine.get_lr()[0])
        engine.train_batch()
    assert engine.lr_scheduler is not None
    assert seen == [engine.lr_scheduler.rate(k, 0) for k in range(6)]


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 2, 3])
def test_an_optimizer_instance_and_its_schedule_are_taken(number: int) -> None:
    changes = {**stage(number), "optimizer": None, "scheduler": None}

    def job(rank: int) -> list[float]:
        model = net()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        engine, *_ = initialize(
            {**BASE, **changes}, model, training_data=data(), optimizer=inner, lr_scheduler=lambda _: schedule
        )
        return [float(engine.train_batch()) for _ in range(4)]

    def expected(rank: int) -> list[float]:
        engine, *_ = initialize(
            {**BASE, **stage(number), "scheduler": None}, net(), training_data=data(),
            lr_scheduler=lambda zero: torch.optim.lr_scheduler.StepLR(zero, 1, 0.5),
        )  # fmt: skip
        return [float(engine.train_batch()) for _ in range(4)]

    assert sim.run(2, job) == [pytest.approx(losses, abs=1e-5) for losses in sim.run(2, expected)]
    model = net()
    with pytest.raises(ValueError, match=r"lr=0\.01, weight_decay=0\.01 came with it"):
        initialize(BASE, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_evaluation_leaves_no_trace() -> None:
    engine = start(noise=0.5)
    engine.train_batch()
    before = {name: b.clone() for name, b in engine.module.named_buffers()}
    batch = next(iter(engine.dataloader or ()))
    engine.module.train()
    loss = engine.eval_batch(batch)
    assert not loss.requires_grad
    assert engine.module.training
    assert all(torch.equal(before[name], b) for name, b in engine.module.named_buffers())


def test_bfloat16_learns() -> None:
    def job(rank: int) -> list[float]:
        engine = start({**stage(3), "bf16": {"enabled": True, "auto_cast": True}})
        assert next(engine.module.parameters()).dtype is torch.bfloat16
        return [float(engine.train_batch()) for _ in range(40)]

    losses = sim.run(2, job)[0]
    assert isinstance(losses, list)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_an_overflow_skips_the_step_and_the_schedule() -> None:
    config = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 40, "hysteresis": 1}}
    engine = start(config)
    engine.train_batch()
    assert (engine.global_steps, engine.skipped_steps) == (1, 1)
    assert engine.lr_scheduler is not None
    assert engine.lr_scheduler.last_step == 0
    assert engine.optimizer.loss_scale == 2.0**39
    for _ in range(40):
        engine.train_batch()
    assert engine.skipped_steps < engine.global_steps


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _train(engine: Engine, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_resuming_is_never_having_stopped_to_the_last_bit(tmp_path: Path, number: int) -> None:
    def first(rank: int) -> list[float]:
        engine = start(stage(number), noise=0.3)
        torch.manual_seed(50 + rank)
        losses = _train(engine, 5)
        engine.save_checkpoint(tmp_path, client_state={"note": "five"})
        return losses

    def second(rank: int) -> list[float]:
        engine = start(stage(number), noise=0.3)
        path, client = engine.load_checkpoint(tmp_path)
        assert path.endswith("global_step5")
        assert client == {"note": "five"}
        assert engine.global_steps == 5
        return _train(engine, 7)

    def seeded(rank: int) -> list[float]:
        engine = start(stage(number), noise=0.3)
        torch.manual_seed(50 + rank)
        return _train(engine, 12)

    expected, head, tail = sim.run(2, seeded), sim.run(2, first), sim.run(2, second)
    for rank in range(2):
        assert head[rank] + tail[rank] == expected[rank]


@pytest.mark.matrix
@pytest.mark.parametrize(("writers", "wrote"), [(1, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize(("readers", "reads"), [(2, 0), (4, 2), (1, 3)])
def test_any_stage_and_world_size_continues_any_other(
    tmp_path: Path, writers: int, wrote: int, readers: int, reads: int
) -> None:
    expected = _train(start(), 9)

    def first(rank: int) -> None:
        engine = start(stage(wrote))
        _train(engine, 4)
        engine.save_checkpoint(tmp_path)

    def second(rank: int) -> list[float]:
        engine = start(stage(reads))
        engine.load_checkpoint(tmp_path)
        return _train(engine, 5)

    sim.run(writers, first)
    for found in sim.run(readers, second):
        assert found == pytest.approx(expected[4:], abs=5e-6)


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def job(rank: int) -> str:
        engine = start(stage(3))
        engine.train_batch()
        engine.save_checkpoint(tmp_path)
        other, *_ = initialize({**BASE, **stage(3)}, nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 1)))
        with pytest.raises(ValueError, match="no such tensor"):
            other.load_checkpoint(tmp_path)
        return "ok"

    assert sim.run(2, job) == ["ok", "ok"]


def test_the_options_of_a_checkpoint_say_which_states_are_loaded(tmp_path: Path) -> None:
    def job(rank: int) -> str:
        engine, again = (
            start({**stage(2), "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": momentum}}})
            for momentum in (0.9, 0.0)
        )
        _train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = _train(engine, 2)
        again.load_checkpoint(tmp_path)
        assert again.optimizer.param_groups[0]["momentum"] == 0.9
        assert _train(again, 2) == expected
        return "ok"

    assert sim.run(2, job) == ["ok", "ok"]


def test_no_checkpoint_in_the_middle_of_a_step(tmp_path: Path) -> None:
    engine = start({"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4})
    engine.backward(engine(*next(iter(engine.dataloader or ()))))
    engine.step()
    with pytest.raises(ValueError, match="1 of 2 micro-batches"):
        engine.save_checkpoint(tmp_path)


def test_torchs_own_schedulers_resume(tmp_path: Path) -> None:
    def make() -> Engine:
        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

        return initialize(BASE, net(), training_data=data(), lr_scheduler=schedule)[0]

    engine = make()
    _train(engine, 3)
    engine.save_checkpoint(tmp_path)
    expected = [*_train(engine, 3), *engine.get_lr()]
    again = make()
    again.load_checkpoint(tmp_path)
    assert [*_train(again, 3), *again.get_lr()] == expected


@pytest.mark.parametrize("kind", ["multi", "nested", "lambda", "subclass"])
def test_schedulers_with_state_that_is_not_json_resume(tmp_path: Path, kind: str) -> None:
    """Milestones are a Counter of ints: keys that JSON turns into strings are never reached again."""
    torchs = torch.optim.lr_scheduler

    class WithFunction(torchs.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.rate = lambda k: 0.01 / (k + 1)
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:  # type: ignore[override]
            return [self.rate(self.last_epoch) for _ in self.optimizer.param_groups]

    def schedule(optimizer: Any) -> Any:
        if kind == "multi":
            return torchs.MultiStepLR(optimizer, milestones=[2, 4, 5], gamma=0.1)
        if kind == "nested":
            parts = [torchs.ConstantLR(optimizer), torchs.MultiStepLR(optimizer, milestones=[1, 3])]
            return torchs.SequentialLR(optimizer, parts, milestones=[2])
        return torchs.LambdaLR(optimizer, lambda k: 0.5**k) if kind == "lambda" else WithFunction(optimizer)

    def make() -> Engine:
        return initialize(BASE, net(), training_data=data(), lr_scheduler=schedule)[0]

    def rates(engine: Engine) -> list[Any]:
        return [(float(engine.train_batch()), engine.get_lr()) for _ in range(4)]

    engine, again = make(), make()
    _train(engine, 3)
    engine.save_checkpoint(tmp_path)
    expected = rates(engine)
    again.load_checkpoint(tmp_path)
    assert rates(again) == expected
    if kind == "multi":
        assert expected[-1][1] == pytest.approx([0.01 * 0.1**3])


def test_the_options_of_parameter_groups_keep_their_types(tmp_path: Path) -> None:
    engine, again = start(), start()
    group = engine.optimizer.param_groups[0]
    group.update(betas=(0.8, 0.9), note={1: (2,)})
    engine.save_checkpoint(tmp_path, client_state={"best": (1, 2.5), 3: "three"})
    _, client = again.load_checkpoint(tmp_path)
    assert client == {"best": (1, 2.5), 3: "three"}
    found = again.optimizer.param_groups[0]
    assert found["betas"] == (0.8, 0.9)
    assert found["note"] == {1: (2,)}


def test_state_that_cannot_be_kept_exactly_is_refused_when_saving(tmp_path: Path) -> None:
    engine = start()
    with pytest.raises(ValueError, match=r"meta\.client\.it is of the type .*Net, which a checkpoint cannot"):
        engine.save_checkpoint(tmp_path, client_state={"it": net()})
    engine.optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(ValueError, match=r"meta\.engine\.param_groups\[0\]\.odd is of the type object"):
        engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn])
def test_buffers_of_every_dtype_resume(tmp_path: Path, dtype: torch.dtype) -> None:
    def make(values: list[int]) -> Engine:
        model = net()
        model.register_buffer("table", torch.tensor(values, dtype=torch.uint8).to(dtype))
        return initialize(BASE, model, training_data=data())[0]

    engine, again = make([1, 2, 3]), make([0, 0, 0])
    engine.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path)
    table = again.module.table
    assert table.dtype is dtype
    assert table.float().tolist() == [1, 2, 3]


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": {"type": "AdamV"}}, "did you mean 'Ada"),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
            "optimizer.params.learning_rate: unknown key; known: lr, betas",
        ),
        ({"optimizer": None}, "there is no optimizer"),
        ({"scheduler": {"type": "WarmLR"}}, "did you mean 'WarmupLR'"),
        ({"train_batch_size": 9, "gradient_accumulation_steps": 2}, "not a multiple"),
        ({"train_batch_size": 128}, "fewer than one micro-batch"),
    ],
)
def test_it_says_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        start(changes)
    assert said in str(caught.value)


def test_a_configuration_for_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="loaded for 2 ranks and the process group has 1"):
        initialize(load(BASE, world_size=2), net())


def test_train_batch_needs_batches_and_a_loss() -> None:
    engine, *_ = initialize(BASE, net())
    with pytest.raises(ValueError, match="needs an iterator"):
        engine.train_batch()
    engine, *_ = initialize(BASE, nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"a tensor of shape \(3, 2\)"):
        engine.train_batch(iter([torch.zeros(3, 5)]))


def test_a_mapping_becomes_keyword_arguments() -> None:
    engine, *_ = initialize(BASE, net())
    x, y = data()[:8]
    assert float(engine.train_batch(iter([{"y": y, "x": x}]))) > 0
