"""What programs do that know DeepSpeed well: optimizers and schedules of their own, engines made again, fp16 to its
end, weights taken out."""

from __future__ import annotations

import argparse
import contextlib
import enum
import gc
import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.deepspeed.test_engine import batches, config, loss_of, net
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError


def losses(engine: Any, rank: int, count: int = 3, *, skip: int = 0) -> list[float]:
    found = []
    for x in batches(rank, skip + count)[skip:]:
        loss = loss_of(engine, x)
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def start(model: nn.Module | None = None, **options: Any) -> Any:
    torch.set_num_threads(1)
    document = options.pop("config", None) or config(options.pop("stage", 0), gradient_accumulation_steps=1)
    return deepspeed.initialize(model=net() if model is None else model, config=document, **options)[0]


# -- optimizers -------------------------------------------------------------------------------------------------------


def _ignoring(model: nn.Module) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1)


def _by_dims(model: nn.Module) -> Callable[[Any], Any]:
    def make(parameters: Any) -> Any:
        parameters = list(parameters)
        return torch.optim.SGD(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
                {"params": [p for p in parameters if p.ndim == 1]},
            ],
            lr=0.1,
        )

    return make


def _by_names(model: nn.Module) -> Callable[[Any], Any]:
    def make(parameters: Any) -> Any:
        names = {id(p): name for name, p in model.named_parameters()}
        decayed = [p for p in parameters if "weight" in names[id(p)]]
        plain = [p for p in model.parameters() if "bias" in names[id(p)]]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.5}, {"params": plain}], lr=0.1)

    return make


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [_ignoring, _by_dims, _by_names])
def test_callables_make_optimizers_of_the_models_parameters(kind: Any, stage: int) -> None:
    """Once, and whatever they look at: a model trains as with the optimizer that they make."""
    calls: list[int] = []

    def job(rank: int, through: bool) -> list[float]:
        model = net()
        make = kind(model)

        def counted(parameters: Any) -> Any:
            parameters = list(parameters)
            calls.append(len(parameters))
            return make(parameters)

        return losses(start(model, stage=stage, optimizer=counted if through else make(list(model.parameters()))), rank)

    def document(rank: int) -> list[list[float]]:
        return [job(rank, through) for through in (True, False)]

    for own, plain in sim.run(2, document):
        assert own == plain
        assert own[2] != own[0]
    assert calls == [4, 4]  # once on each rank


def test_callables_that_make_no_optimizer_are_refused() -> None:
    with pytest.raises(ConfigError, match="it made a NoneType"):
        start(optimizer=lambda parameters: None)
    with pytest.raises(ConfigError, match="give an optimizer of torch"):
        start(optimizer=3)


@pytest.mark.parametrize(
    ("name", "options", "decay"),
    [
        ("AdamW", {}, 0.01), ("adamw", {}, 0.01), ("Adam", {}, 0.01), ("adam", {}, 0.01),
        ("Adam", {"adam_w_mode": False}, 0.0), ("Adam", {"weight_decay": 0.2}, 0.2),
    ],
)  # fmt: skip
def test_torch_adam_has_torchs_decay(name: str, options: dict[str, Any], decay: float) -> None:
    section = {"type": name, "params": {"lr": 0.1, "torch_adam": True, **options}}
    engine = start(config={"train_batch_size": 2, "optimizer": section})
    assert engine.optimizer.param_groups[0]["weight_decay"] == decay


class Megatron:
    """A schedule whose step wants to know how many samples there were."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.samples = optimizer, 0

    def step(self, increment: int) -> None:
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.001 * self.samples

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_schedules_that_count_samples() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = Megatron(optimizer)
    engine = start(model, optimizer=optimizer, lr_scheduler=schedule)
    losses(engine, 0)
    assert (schedule.samples, engine.get_lr()) == (6, [0.006])
    batch_loss = nn.Sequential(net(), Squares())
    other = torch.optim.AdamW(batch_loss.parameters())
    again = start(batch_loss, optimizer=other, lr_scheduler=Megatron(other))
    again.train_batch(iter(batches(0, 1)))
    assert (again.lr_scheduler.samples, again.get_lr()) == (2, [0.002])
    loss = loss_of(engine, batches(0, 1)[0])
    engine.backward(loss)
    engine.step(lr_kwargs={"increment": 10})
    assert schedule.samples == 16
    engine.lr_scheduler = None
    losses(engine, 0)
    assert schedule.samples == 16


def test_a_step_that_is_refused_counts_no_samples() -> None:
    engine = start(stage=1)
    for _ in range(2):
        with engine.no_sync():
            engine.backward(loss_of(engine, batches(0, 1)[0]))
            with pytest.raises(ValueError, match="inside of no_sync"):
                engine.step()
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (1, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("kept", ["everywhere", "nowhere", "on rank 0"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_model_that_has_an_engine_gets_another(stage: int, kept: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever ranks have let the first engine go; a module around the model makes no difference either."""

    def job(rank: int) -> list[float]:
        first = start(stage=stage)
        found, model = losses(first, rank), first.module
        if kept == "nowhere" or (kept == "on rank 0" and rank):
            first = None
            gc.collect()
        second = start(nn.Sequential(model), stage=stage)
        return found + losses(second, rank, skip=3)

    def plain(rank: int) -> list[float]:
        first = start(stage=stage)
        found = losses(first, rank)
        first.destroy()
        return found + losses(start(first.module, stage=stage), rank, skip=3)

    assert sim.run(2, job) == sim.run(2, plain)
    assert "that engine ends" in caplog.text


@pytest.mark.parametrize("stage", [0, 3])
def test_what_an_engine_froze_is_free_after_it(stage: int) -> None:
    model = net()
    engine = start(model, stage=stage, model_parameters=list(model[2].parameters()))
    losses(engine, 0)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    before = engine.engine.module_state_dict()["0.weight"].clone()
    again = start(model, stage=stage, model_parameters=model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    losses(again, 0)
    assert not torch.equal(again.engine.module_state_dict()["0.weight"], before)
    again.destroy()
    model[0].requires_grad_(False)
    start(model, stage=stage).destroy()
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]  # by the program


# -- the configuration ------------------------------------------------------------------------------------------------


def test_keys_that_contradict_each_other() -> None:
    document = config(1, sequence_parallel_size=2, mesh={"axes": {"data": 1}})
    with pytest.raises(ConfigError, match='give the axis "sequence" there'):
        start(config=document)


def test_keys_without_effect_are_no_errors() -> None:
    document = config(1, prescale_gradients=True, gradient_predivide_factor=2.0)
    document["seq_parallel_communication_data_type"] = "bf16"
    assert losses(start(config=document), 0) == losses(start(config=config(1)), 0)


# -- fp16 -------------------------------------------------------------------------------------------------------------


def fp16(stage: int, **options: Any) -> dict[str, Any]:
    section = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, **options}
    return config(stage, gradient_accumulation_steps=1, fp16=section)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_training_that_only_overflows_ends(stage: int) -> None:
    engine = start(config=fp16(stage, min_loss_scale=64))

    def overflow() -> None:
        engine.backward((engine(batches(0, 1)[0].half()) * 60000.0).float().square().sum())
        engine.step()

    for scale in (128.0, 64.0):
        overflow()
        assert engine.loss_scale() == scale
        assert float(engine.get_global_grad_norm()) == float("inf")
    if stage == 0:
        overflow()
        assert engine.skipped_steps == 3
        return
    with pytest.raises(RuntimeError, match="overflow at the smallest loss scale, 64"):
        overflow()
    patient = start(config=fp16(stage, initial_scale_power=6, min_loss_scale=64, hysteresis=2))
    for expected in (None, "overflow at the smallest"):
        patient.backward((patient(batches(0, 1)[0].half()) * 60000.0).float().square().sum())
        with pytest.raises(RuntimeError, match=expected) if expected else contextlib.nullcontext():
            patient.step()


def test_the_norm_at_stage_0_is_a_number_in_every_precision() -> None:
    for section in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}):
        engine = start(config=config(0, gradient_accumulation_steps=1, **section))
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(batches(0, 1)[0].to(dtype)).float().square().mean())
        engine.step()
        assert json.dumps({"norm": engine.get_global_grad_norm()})


def test_optimizers_in_fp16_have_deepspeeds_class() -> None:
    model = net()
    own = start(config=fp16(0)).optimizer
    given = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert type(own).__name__ == "FP16_Optimizer"
    assert type(start(model, config=fp16(0), optimizer=given).optimizer).__name__ == "FP16_UnfusedOptimizer"


# -- weights ----------------------------------------------------------------------------------------------------------

TAKES: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "state_dict": lambda model: model.state_dict()["0.weight"],
    "data": lambda model: next(model.parameters()).data,
    "detach": lambda model: next(model.parameters()).detach(),
    "transposed": lambda model: next(model.parameters()).data.t(),
    "numpy": lambda model: torch.from_numpy(next(model.parameters()).detach().numpy()),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", TAKES)
def test_what_is_taken_while_gathered_keeps_its_values(kind: str) -> None:
    """And training goes on as if nothing had been taken, also after it is let go."""

    def job(rank: int, take: bool) -> list[float]:
        engine = start(stage=3)
        found, kept = losses(engine, rank), []
        for step in range(2):
            with deepspeed.zero.GatheredParameters([None, *engine.module.parameters()]):
                if take:
                    kept.append(TAKES[kind](engine.module))
                    expected = kept[-1].clone()
            found += losses(engine, rank, 1, skip=3 + step)
            if take:
                assert torch.equal(kept[-1], expected)
                kept[-1].zero_()  # memory of its own
                if step:
                    kept.clear()
        bytes_now = sum(bucket.parameters.memory_bytes() for bucket in engine.engine.sharded.buckets)
        return [*found, float(bytes_now)]

    for take, plain in zip(*(sim.run(2, lambda rank, t=t: job(rank, t)) for t in (True, False)), strict=True):
        assert take == plain


def test_a_context_over_nothing() -> None:
    for nothing in (None, [], [None], nn.Parameter(torch.ones(1))):
        with deepspeed.zero.GatheredParameters(nothing):
            pass


class Colour(enum.IntEnum):
    RED = 3


class Mode(str, enum.Enum):
    FAST = "fast"


def test_client_state_of_subclasses(tmp_path: Path) -> None:
    engine = start()
    state = {
        "version": torch.__version__, "colour": Colour.RED, "mode": [Mode.FAST], Mode.FAST: 1.5,
        "parameter": nn.Parameter(torch.ones(2)), "args": argparse.Namespace(colour=Colour.RED),
        "ordered": OrderedDict(a=Colour.RED), "set": {Colour.RED}, "deque": deque([Mode.FAST], 3),
        "default": defaultdict(int, {Mode.FAST: Colour.RED}),
    }  # fmt: skip
    engine.save_checkpoint(tmp_path, client_state=state)
    assert (tmp_path / "latest").read_text() == "global_step0"
    loaded = engine.load_checkpoint(tmp_path)[1]
    parameter = loaded.pop("parameter")
    assert type(parameter) is torch.Tensor
    assert parameter.tolist() == [1, 1]
    assert loaded.pop("args") == argparse.Namespace(colour=3)
    containers = [loaded.pop(name) for name in ("ordered", "set", "deque", "default")]
    assert containers == [OrderedDict(a=3), {3}, deque(["fast"], 3), defaultdict(int, fast=3)]
    assert loaded == {"version": str(torch.__version__), "colour": 3, "mode": ["fast"], "fast": 1.5}
    assert [type(value) for value in loaded.values()] == [str, int, list, float]


def test_a_schedule_that_wants_a_metric_is_not_given_the_batch_size() -> None:
    engine = start(net(), lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    loss = loss_of(engine, batches(0, 1)[0])
    engine.backward(loss)
    with pytest.raises(ValueError, match="metrics"):
        engine.step()
    engine.step(lr_kwargs={"metrics": loss.item()})
