"""What all ranks have to have alike in a step, learning rates, other options and accumulation, is compared by the step:
where it comes to differ after construction every rank is told, by name and rank, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpointing.foreign.golden_model import batches
from tests.engine.test_pipeline_states import start as pipeline_engine
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.engine import Engine, initialize
from zoo.zero import ZeroOptimizer

WORLD, RATE = 3, 0.1
DIFFERS = r"what all ranks need alike for a step differs"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def start(stage: int, *, groups: int = 1, accumulation: int = 1, **more: Any) -> Engine:
    model = net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip
    members = [{"params": [p]} for p in model.parameters()] if groups > 1 else None
    return initialize(config, model, model_parameters=members)[0]


def backward(engine: Engine, rank: int, step: int) -> None:
    engine.backward(engine(batch(rank, step)).square().mean())


def twin(steps: int) -> dict[str, torch.Tensor]:
    """Plain torch on the batches of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    for step in range(steps):
        for rank in range(WORLD):
            (model(batch(rank, step)).square().mean() / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check(engine: Engine, steps: int) -> None:
    for name, value in twin(steps).items():
        found = engine.module_state_dict()[name]
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def by_rank(key: str, *values: Any) -> Callable[[Engine, int], None]:
    return lambda engine, rank: _set(engine, key, values[rank])


CHANGES: dict[str, tuple[Callable[[Engine, int], None], str]] = {
    "lr": (by_rank("lr", 0.1, 0.2, 0.1), r"lr: 0\.1\d* on ranks 0, 2, 0\.2\d* on rank 1"),
    "tensor": (by_rank("lr", *map(torch.tensor, (0.1, 0.2, 0.1))), r"lr: 0\.1\d* on ranks 0, 2, 0\.2\d* on rank 1"),
    "momentum": (by_rank("momentum", 0.5, 0.5, 0.4), r"momentum: 0\.5 on ranks 0, 1, 0\.4\d* on rank 2"),
    "nesterov": (by_rank("nesterov", True, False, False), r"nesterov: 1 on rank 0, 0 on ranks 1, 2"),
    "G": (lambda e, r: e.boundary.set(1 + (r == 0)), r"gradient_accumulation_steps: 2 on rank 0, 1 on ranks 1, 2"),
}


def _set(engine: Engine, key: str, value: Any) -> None:
    engine.optimizer.param_groups[0][key] = value


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("clipping", [0.0, 100.0])
@pytest.mark.parametrize("kind", list(CHANGES))
def test_what_differs_is_told_on_all_ranks_before_anything_changes(stage: int, clipping: float, kind: str) -> None:
    change, told = CHANGES[kind]

    def job(rank: int) -> None:
        engine = start(stage, gradient_clipping=clipping)
        backward(engine, rank, 0)
        engine.step()
        backward(engine, rank, 1)
        engine.set_gradient_accumulation_boundary(True)  # what it divides by alone differs
        before = {k: v.clone() for k, v in engine.optimizer.consolidated_parameters().items()}
        kept = dict(engine.optimizer.param_groups[0])
        change(engine, rank)
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError, match=f"{DIFFERS}: {told}.*Nothing has changed"):
                engine.step()
            after = engine.optimizer.consolidated_parameters()
            assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.optimizer.param_groups[0].update(kept)
        engine.boundary.set(1)
        engine.step()  # with the gradients that are there
        check(engine, 2)

    sim.run(WORLD, job)


@pytest.mark.parametrize("stage", range(4))
def test_of_several_groups_the_option_and_the_ranks_are_told(stage: int) -> None:
    def job(rank: int) -> None:
        engine = start(stage, groups=4)
        for group in engine.optimizer.param_groups[2:]:
            group["lr"] = RATE / 2  # alike on all ranks
        backward(engine, rank, 0)
        engine.step()
        engine.optimizer.param_groups[3]["lr"] = RATE / (2 + (rank == 1))
        backward(engine, rank, 1)
        with pytest.raises(
            CollectiveMismatchError, match=rf"{DIFFERS}: lr \(0\.1, 0\.1, 0\.05, .*\): rank 1 other than"
        ):
            engine.step()

    sim.run(WORLD, job)


def test_a_schedule_that_looks_at_its_own_loss_is_found_in_the_next_step() -> None:
    """``ReduceLROnPlateau`` with the loss of each rank: the careless use that this is for."""

    def job(rank: int) -> None:
        engine = start(2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
        for step in range(2):
            backward(engine, rank, step)
            engine.step()
            schedule.step(float(step) if rank == 0 else -float(step))
        backward(engine, rank, 2)
        with pytest.raises(CollectiveMismatchError, match=r"lr: 0\.01\d* on rank 0, 0\.1\d* on ranks 1, 2"):
            engine.step()

    sim.run(WORLD, job)


@pytest.mark.parametrize("stage", [0, 2])
def test_equal_numbers_of_other_types_and_options_of_the_users_are_alike(stage: int) -> None:
    kinds: list[Any] = [RATE, np.float64(RATE), torch.tensor(RATE, dtype=torch.float64)]

    def job(rank: int) -> None:
        engine = start(stage)
        engine.optimizer.param_groups[0]["lr"] = kinds[rank]
        engine.optimizer.param_groups[0]["nesterov"] = [False, 0, np.bool_(False)][rank]
        engine.optimizer.param_groups[0]["name"] = f"of rank {rank}"  # nothing that the optimizer has
        backward(engine, rank, 0)
        engine.step()
        check(engine, 1)

    sim.run(WORLD, job)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("clipping", [0.0, 100.0])
def test_it_costs_no_collective(stage: int, clipping: float) -> None:
    def job(rank: int) -> int:
        engine = start(stage, gradient_clipping=clipping)
        backward(engine, rank, 0)
        before = engine.comm.log.num_issued
        engine.step()
        return engine.comm.log.num_issued - before

    new_parameters = int(stage in (1, 2))
    assert sim.run(WORLD, job)[0] == new_parameters + 1  # the norm, the loss, counts and what is to be alike


@pytest.mark.parametrize("stage", range(4))
def test_options_that_are_no_numbers_are_told_by_name(stage: int) -> None:
    def job(rank: int) -> None:
        engine = start(stage, optimizer={"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.99]}})
        backward(engine, rank, 0)
        engine.optimizer.param_groups[0]["betas"] = (0.9, 0.99 if rank else 0.9)
        with pytest.raises(
            CollectiveMismatchError, match=r"betas \(\(0\.9, 0\.9+\) in .*\): ranks 1, 2 other than rank 0"
        ):
            engine.step()

    sim.run(WORLD, job)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "fast"])
def test_an_option_that_some_ranks_alone_have_as_a_number(value: Any) -> None:
    """What stands for the others' is told as no number."""

    def job(rank: int) -> None:
        engine = start(0)
        backward(engine, rank, 0)
        engine.optimizer.param_groups[0]["momentum"] = 0.5 if rank == 0 else value
        told = r"momentum: 0\.5 on rank 0, no finite number on ranks 1, 2\. Nothing"
        if rank:
            told = rf"momentum \({value!r} in the groups of this rank\): ranks 1, 2 other than rank 0\. Nothing"
        with pytest.raises(CollectiveMismatchError, match=told):
            engine.step()

    sim.run(WORLD, job)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_read_later_refuses_every_step_until_a_state_is_loaded(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the host does not wait for a step: the update is made when the difference is known."""
    monkeypatch.setattr(ZeroOptimizer, "_reads_late", True)
    params = {"lr": RATE, "torch_adam": True, "fused": True}

    def job(rank: int, *, differs: bool) -> dict[str, torch.Tensor]:
        engine = start(stage, optimizer={"type": "AdamW", "params": params})
        for step in range(2):
            backward(engine, rank, step)
            engine.step()
        engine.save_checkpoint(tmp_path / str(differs))
        engine.wait_for_checkpoint()
        if differs:
            _set(engine, "lr", RATE * (1 + rank))
            backward(engine, rank, 2)
            engine.step()
            with pytest.raises(CollectiveMismatchError, match=rf"{DIFFERS}: lr: .*load a checkpoint"):
                assert engine.record
            _set(engine, "lr", RATE)
            with pytest.raises(ValueError, match=r"incomplete since .*lr"):
                engine.save_checkpoint(tmp_path / "mixed")
        engine.load_checkpoint(tmp_path / str(differs))
        backward(engine, rank, 2)
        engine.step()
        return dict(engine.module_state_dict())

    expected, found = (sim.run(WORLD, partial(job, differs=d))[0] for d in (False, True))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_alone_tells_where_it_measures_the_norm(stage: int) -> None:
    def job(rank: int) -> None:
        model = net()
        optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=RATE, clip_norm=100.0)
        for step in range(2):
            model(batch(rank, step)).square().mean().backward()
            optimizer.param_groups[0]["lr"] = RATE * (1 + (rank == 2 and step == 1))
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(CollectiveMismatchError, match=r"lr: 0\.1\d* on ranks 0, 1, 0\.2\d* on rank 2"):
            optimizer.step()

    sim.run(WORLD, job)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_with_other_layers_are_told_too(stage: int) -> None:
    """Four ranks, two stages of a pipeline: ranks 2 and 3 have the last layers, and rank 3 has a rate of its own."""

    def job(rank: int) -> None:
        engine = pipeline_engine(2, stage, gradient_clipping=100.0 if stage else 0.0)
        data = iter(batches(0) * 3)
        engine.train_batch(data)
        engine.optimizer.param_groups[0]["lr"] = 0.25 if rank == 3 else 0.5
        told = r"lr: 0\.5 on rank 2, 0\.25 on rank 3" if rank > 1 else "ranks with other layers"
        before = engine.module_state_dict()
        with pytest.raises(CollectiveMismatchError, match=f"{DIFFERS}: .*{told}.*Nothing has changed"):
            engine.train_batch(data)
        engine.optimizer.param_groups[0]["lr"] = 0.5
        engine.train_batch(data)
        after = engine.module_state_dict()
        assert all(not torch.equal(after[name], value) for name, value in before.items())

    sim.run(4, job)


def test_stages_of_a_pipeline_may_have_rates_of_their_own() -> None:
    def job(rank: int) -> None:
        engine = pipeline_engine(2, 1)
        engine.optimizer.param_groups[0]["lr"] = 0.25 if rank < 2 else 0.5
        engine.train_batch(iter(batches(0)))

    sim.run(4, job)


def drop_by_engine(engine: Engine) -> None:
    engine.zero_grad()


def drop_by_model(engine: Engine) -> None:
    engine.module.zero_grad()


def drop_one(engine: Engine) -> None:
    next(engine.module.parameters()).grad = None


@pytest.mark.matrix
@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("drop", [drop_by_engine, drop_by_model, drop_one])
def test_gradients_that_some_ranks_drop_are_told(stage: int, drop: Callable[[Engine], None], clipping: float) -> None:
    """Without it ranks at stage 0 have other models from then on, and at the others wait for one another."""

    def job(rank: int) -> dict[str, torch.Tensor]:
        engine = start(stage, gradient_clipping=1e9 * clipping)
        for number in range(2):
            backward(engine, rank, 5)
            if rank == number:
                drop(engine)
            with pytest.raises(CollectiveMismatchError, match=rf"{DIFFERS}.* on rank.*Drop gradients on all ranks or"):
                engine.step()
            engine.zero_grad()
            backward(engine, rank, number)
            engine.step()
        return engine.optimizer.consolidated_parameters()

    for found in sim.run(WORLD, job):
        torch.testing.assert_close(found, twin(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_micro_batch_that_one_rank_drops_is_told(stage: int) -> None:
    """What was reduced has gone from its shard alone."""

    def job(rank: int) -> None:
        engine = start(stage, accumulation=2)
        backward(engine, rank, 0)
        if rank == 1:
            engine.optimizer.zero_grad()
        engine.step()
        backward(engine, rank, 1)
        with pytest.raises(CollectiveMismatchError, match=DIFFERS):
            engine.step()

    sim.run(WORLD, job)


def test_an_optimizer_alone_tells_of_dropped_gradients_where_it_measures_the_norm() -> None:
    def job(rank: int, stage: int) -> None:
        model = net()
        optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=RATE, clip_norm=1.0)
        for dropped in (True, False):
            model(batch(rank, 0)).square().mean().backward()
            if dropped and rank == 2:
                optimizer.zero_grad()
            if dropped:
                with pytest.raises(CollectiveMismatchError, match=r"0 on rank 2\. Nothing has changed\. Drop"):
                    optimizer.step()
                optimizer.zero_grad()
        optimizer.step()

    for stage in (1, 2, 3):
        sim.run(WORLD, partial(job, stage=stage))


def write_in_place(model: Any, value: torch.Tensor) -> None:
    with torch.no_grad():
        model[0].weight.copy_(value)


def write_data(model: Any, value: torch.Tensor) -> None:
    model[0].weight.data = value


def write_state(model: Any, value: torch.Tensor) -> None:
    model.load_state_dict({"0.weight": value}, strict=False)


WRITES = [(write, stage) for write in (write_in_place, write_data, write_state) for stage in range(3)]


@pytest.mark.matrix
@pytest.mark.parametrize(("write", "stage"), [*WRITES, (write_data, 3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_that_ranks_write_otherwise_are_told(
    stage: int, write: Callable[[Any, torch.Tensor], None], precision: str
) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    section = {"bf16": {"enabled": True, "auto_cast": True}} if precision == "bf16" else {}

    def job(rank: int) -> torch.Tensor:
        engine = start(stage, **section)
        value = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
        write(engine.module, value.roll(int(rank == 2), 0).to(dtype))  # the same numbers in other places
        backward(engine, rank, 0)
        with pytest.raises(CollectiveMismatchError, match=r"written into parameters: rank 2 wrote others than rank 0"):
            engine.step()
        write(engine.module, value.to(dtype))
        if rank == 1:
            engine.optimizer.sharded.writes.take()  # whoever looks in between
        engine.zero_grad()
        backward(engine, rank, 0)
        engine.step()
        backward(engine, rank, 1)
        engine.step()
        return engine.optimizer.consolidated_parameters()["0.weight"]

    found = sim.run(WORLD, job)
    assert all(torch.equal(one, found[0]) for one in found)


def test_frozen_parameters_and_buffers_may_differ() -> None:
    def job(rank: int) -> None:
        model = net()
        model[2].requires_grad_(False)
        model.register_buffer("mine", torch.zeros(2))
        config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": RATE}}}
        engine = initialize(config, model)[0]
        with torch.no_grad():
            model[2].bias.fill_(rank)
        model.mine.fill_(rank)
        backward(engine, rank, 0)
        engine.step()
        assert float(model[2].bias[0]) == rank

    sim.run(WORLD, job)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "value", "other"), [("exclude_frozen_parameters", True, False), ("asynchronous", False, True)]
)
def test_ranks_that_ask_for_different_saves_are_told(
    stage: int, name: str, value: Any, other: Any, tmp_path: Path
) -> None:
    """A frozen parameter of which some rank has left out its part, or ranks that wait for others that do not come."""

    def job(rank: int) -> None:
        model = net()
        model[0].requires_grad_(False)  # type: ignore[index]
        document = {
            "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine = initialize(document, model)[0]
        backward(engine, rank, 0)
        engine.step()
        asked = {name: value if rank == 1 else other}
        with pytest.raises(ValueError, match=rf"{name}={other} on rank 0 and {name}={value} on rank 1: all ranks save"):
            engine.save_checkpoint(tmp_path, **asked)
        path = engine.save_checkpoint(tmp_path, **{name: other})
        engine.wait_for_checkpoint()
        engine.load_checkpoint(tmp_path)
        assert Path(path).is_dir()

    sim.run(WORLD, job)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "accumulation": ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps: 2 on ranks 0, 2, 4 on rank 1"),
    "schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
        r"scheduler: \{.*7.* on rank 1",
    ),
    "no schedule": ({"scheduler": None}, r"scheduler: \{.*\} on ranks 0, 2, not given on rank 1"),
    "autocast": (
        {"torch_autocast": {"enabled": True}},
        r"torch_autocast: None on ranks 0, 2, torch\.bfloat16 on rank 1",
    ),
}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", SETTINGS)
def test_configurations_that_differ_are_told_when_the_engine_is_made(stage: int, kind: str) -> None:
    """They would be told in a later step, by a wait that ends, or by nobody."""
    changes, told = SETTINGS[kind]

    def job(rank: int) -> None:
        schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
        with pytest.raises(
            CollectiveMismatchError, match=rf"call initialize\(\) with different configurations: {told}"
        ):
            start(stage, accumulation=2, **{**schedule, **(changes if rank == 1 else {})})
        start(stage)  # the next one is a right one

    sim.run(WORLD, job)


@pytest.mark.parametrize("own", [False, True])
def test_how_samples_are_dealt_is_alike_where_the_engine_deals_them(own: bool) -> None:
    samples = [torch.full((6,), float(i)) for i in range(12)]

    def job(rank: int) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "seed": rank,
        }
        if not own:
            initialize(config, net())
            return
        with pytest.raises(CollectiveMismatchError, match=r"seed: 0 on rank 0, 1 on rank 1, 2 on rank 2"):
            initialize(config, net(), training_data=samples)

    sim.run(WORLD, job)
