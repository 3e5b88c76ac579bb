"""What a script gives an engine that cannot be: a sentence with what was given and what is taken; nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zoo import sim
from zoo.comm import RankFailedError
from zoo.config import ConfigError, load
from zoo.engine import Engine, initialize

HUGE = 10**5000  # Python refuses to print it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


def start(stage: int = 0, accumulation: int = 1, **more: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip
    return initialize(config, Net())[0]


def batches(rank: int, number: int) -> Iterator[torch.Tensor]:
    return iter(torch.randn(number, 2, 4, generator=torch.Generator().manual_seed(rank)))


WHOLE: list[tuple[Any, str]] = [
    ("4", r"got '4' \(str\); it takes a whole number of at least 1"),
    (None, r"got None \(NoneType\); it takes a whole number"),
    (True, r"got True \(bool\)"),
    (2.5, r"got 2\.5 \(float\)"),
    (float("nan"), r"got nan \(float\)"),
    ([4], r"got \[4\] \(list\)"),
    (torch.ones(3), r"got a tensor of shape \(3,\)"),
    (0, r"got 0 \(int\); it takes a whole number from 1"),
    (-4, r"got -4 \(int\)"),
    (HUGE, r"got a whole number of about 5000 digits; it takes a whole number from 1 to 9223372036854775807"),
]


def change(engine: Engine, number: Any) -> None:
    engine.boundary.change(number)


@pytest.mark.parametrize(("given", "told"), WHOLE, ids=range(len(WHOLE)))
@pytest.mark.parametrize("call", [Engine.set_train_batch_size, change])
def test_a_number_of_samples_is_a_whole_number(given: Any, told: str, call: Callable[[Engine, Any], None]) -> None:
    engine = start(accumulation=2)
    with pytest.raises(ValueError, match=rf"{call.__name__}\(\) {told}"):
        call(engine, given)
    assert (engine.accumulation, engine.train_batch_size) == (2, 4)


@pytest.mark.parametrize("given", [6, 6.0, np.int64(6), torch.tensor(6)])
def test_numbers_that_are_whole_are_taken(given: Any) -> None:
    engine = start()
    engine.set_train_batch_size(given)
    assert engine.accumulation == 3
    assert type(engine.accumulation) is int
    engine.train_batch(batches(0, 3))


REPORTS: list[tuple[Any, Any, str]] = [
    (5, 1.0, r"report\(\) got 5 \(int\) for a name; it is a text, such as 'user/accuracy'"),
    (None, 1.0, r"got None \(NoneType\) for a name"),
    ("accuracy", 1.0, r"a metric's name says whose it is: 'user/accuracy'"),
    ("user/a", "0.5", r"report\('user/a', \.\.\.\) got '0\.5' \(str\); it takes a number, or a tensor of one element"),
    ("user/a", None, r"got None"),
    ("user/a", 1j, r"got 1j \(complex\)"),
    ("user/a", torch.ones(2), r"got a tensor of shape \(2,\)"),
    ("user/a", HUGE, r"got a whole number of about 5000 digits; it takes a number that a float can hold"),
]


@pytest.mark.parametrize(("name", "value", "told"), REPORTS, ids=range(len(REPORTS)))
def test_a_metric_is_a_name_and_a_number(name: Any, value: Any, told: str) -> None:
    engine = start()
    with pytest.raises(ValueError, match=told):
        engine.report(name, value)
    for number, kind in enumerate([1, np.float32(1), torch.ones(1), torch.tensor(1), True]):
        engine.report(f"user/{number}", kind)  # type: ignore[arg-type]
    engine.train_batch(batches(0, 1))
    assert engine.record is not None
    assert {k: v for k, v in engine.record.metrics.items() if k.startswith("user/")} == {
        f"user/{n}": 1.0 for n in range(5)
    }


def test_arguments_of_a_schedule_that_is_not_there() -> None:
    engine = start(accumulation=2)
    iterator = batches(0, 3)
    with pytest.raises(ValueError, match=r"train_batch\(\) got lr_kwargs=\{'x': 1\}, and this engine has no schedule"):
        engine.train_batch(iterator, lr_kwargs={"x": 1})
    engine.train_batch(iterator, lr_kwargs={})
    engine.backward(engine(next(iterator)))  # the refused call has taken none
    with pytest.raises(ValueError, match=r"step\(\) got lr_kwargs=\{'x': 1\}, and this engine has no schedule"):
        engine.step({"x": 1})
    assert (engine.global_steps, engine.micro_steps) == (1, 2)


def test_a_schedule_is_asked_before_a_batch_is_taken() -> None:
    engine = start(accumulation=2)
    engine.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer)
    iterator = batches(0, 3)
    with pytest.raises(ValueError, match="ReduceLROnPlateau cannot be called"):
        engine.train_batch(iterator)
    engine.train_batch(iterator, lr_kwargs={"metrics": 1.0})
    engine.backward(engine(next(iterator)))
    engine.step()  # in the middle of a step nothing is asked
    assert (engine.global_steps, engine.micro_steps) == (1, 3)


def test_other_arguments() -> None:
    engine = start()
    for wrong in ("yes", 2, [True], torch.ones(2)):
        with pytest.raises(
            ValueError, match=r"set_gradient_accumulation_boundary\(\) got .*; it takes True, False or No"
        ):
            engine.set_gradient_accumulation_boundary(wrong)  # type: ignore[arg-type]
    state = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    for name in (5, ["a"]):
        with pytest.raises(ValueError, match=r"register_state\(\) got .*; a name is a text"):
            engine.register_state(name, state)  # type: ignore[arg-type]
    for lr_kwargs in (5, {1: 2}):
        with pytest.raises(ValueError, match=r"train_batch\(\) got lr_kwargs=.*by name"):
            engine.train_batch(batches(0, 1), lr_kwargs=lr_kwargs)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"step\(\) got lr_kwargs=.*by name"):
            engine.step(lr_kwargs)  # type: ignore[arg-type]
    for loader, told in (
        (list(batches(0, 2)), "a list"),
        (5, "a int"),
        (torch.ones(2, 2, 4), r"a tensor of shape \(2, 2"),
    ):
        with pytest.raises(ValueError, match=rf"train_batch got {told}.*it takes an iterator of batches: give iter"):
            engine.train_batch(loader)  # type: ignore[arg-type]
    assert engine.global_steps == 0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_data_that_end_within_a_step_say_so(accumulation: int) -> None:
    """Who catches StopIteration, as scripts do at the end of an epoch, and who catches ValueError, both get it."""
    engine = start(accumulation=accumulation)
    data = batches(0, 2 * accumulation + accumulation // 2)
    engine.train_batch(data)
    engine.train_batch(data)
    left = accumulation // 2
    told = (
        rf"the data ended after {left} of the {accumulation} micro-batches of a step, the one after 2 steps\. Nothing"
    )
    for kind in (StopIteration, ValueError):
        with pytest.raises(kind, match=told):
            engine.train_batch(iter(list(batches(1, left))))
    with pytest.raises(StopIteration, match=told):
        engine.train_batch(data)
    engine.train_batch(batches(0, accumulation))
    assert engine.global_steps == 3


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("breaks", [False, True])
def test_the_rank_whose_loader_failed_is_named_on_the_others(stage: int, breaks: bool) -> None:
    def loader(rank: int) -> Iterator[torch.Tensor]:
        yield from batches(rank, 5 if rank else 3)
        if breaks:
            raise OSError("the disk is gone")

    def job(rank: int) -> str:
        engine = start(stage, 2)
        data = loader(rank)
        engine.train_batch(data)
        with pytest.raises((StopIteration, OSError, RankFailedError)) as caught:
            engine.train_batch(data)
        return f"{caught.type.__name__}: {caught.value}"

    first, other = sim.run(2, job, group_timeout_s=5.0)
    told = "OSError: the disk is gone" if breaks else "DataEndedError: the data ended after 1 of the 2 micro-batches"
    assert str(first).startswith(told)
    assert str(other).startswith(f"RankFailedError: rank 0 failed with {told}")


@pytest.mark.parametrize("stage", [0, 3])
def test_an_end_that_all_ranks_come_to_is_no_failure(stage: int, tmp_path: Path) -> None:
    def job(rank: int) -> float:
        engine = start(stage)
        for epoch in range(2):
            data = batches(rank, 3)
            for _ in range(3):
                engine.train_batch(data)
            with pytest.raises(StopIteration):
                engine.train_batch(data)
            engine.save_checkpoint(tmp_path, f"epoch{epoch}")
            engine.wait_for_checkpoint()
        return float(engine.train_batch(batches(rank, 1)))

    assert len(set(sim.run(2, job))) == 1


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"train_micro_batch_size_per_gpu": HUGE}, "train_micro_batch_size_per_gpu"),
    ({"gradient_accumulation_steps": -HUGE}, "gradient_accumulation_steps"),
    ({"steps_per_print": HUGE}, "steps_per_print"),
    ({"gradient_clipping": HUGE}, "gradient_clipping"),
    ({"optimizer": {"type": "SGD", "params": {"lr": HUGE}}}, r"optimizer\.params\.lr"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, HUGE]}}}, r"optimizer\.params\.betas\[1\]"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": HUGE}}}, r"scheduler\.params\.warmup_num_steps"),
    ({"fp16": {"enabled": True, "initial_scale_power": HUGE}}, r"fp16\.initial_scale_power"),
]


@pytest.mark.parametrize(("changes", "path"), PLACES)
def test_a_configuration_with_an_endless_number_names_its_place(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{path}: given a whole number of about 5000 digits; allowed are those below 2\^1024"
    ):
        start(**changes)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_with_an_endless_number_names_its_place(tmp_path: Path, suffix: str) -> None:
    digits = "9" * 5000
    text = (
        f'{{"fp16": {{"initial_scale_power": -{digits}}}}}' if suffix == "json" else f"fp16:\n  loss_scale: {digits}\n"
    )
    path = tmp_path / f"config.{suffix}"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"fp16\.(initial_scale_power|loss_scale): given a whole number of about 5000 digits"
    ):
        load(path)
    with pytest.raises(ConfigError, match=r"seed: given a whole number of about 5000 digits"):
        load({"train_batch_size": 1}, overrides=[f"seed={digits}"])
    path.write_text(json.dumps({"train_batch_size": 10**15}))
    assert load(path).train_batch_size == 10**15


def in_ddp(module: nn.Module) -> nn.Module:
    """As DistributedDataParallel has it, without a process group."""
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = module
    return wrapped


GIVEN: list[tuple[dict[str, Any], str]] = [
    ({"model": nn.Sequential(nn.LazyLinear(2))}, r"whose '0\.weight' has no shape yet.*call the model once"),
    ({"model": in_ddp(nn.Linear(2, 2))}, r"that is a DistributedDataParallel, which reduces gradients too.*in it"),
    ({"model": nn.Sequential(nn.Tanh(), in_ddp(nn.Linear(2, 2)))}, r"whose '1' is a DistributedDataParallel"),
    ({"model": 5}, r"initialize got model=5 \(int\); it takes the nn\.Module to train"),
    ({"model": None}, r"model=None"),
    ({"parts": 5}, r"parts=5 \(int\); it takes engine parts \(zoo\.parts\) by name"),
    ({"parts": {5: object()}}, r"by name"),
    ({"parts": {"a": 5}}, r"parts=\{'a': \.\.\.\}, a int that has none of the methods prepare, on_batch"),
    ({"sinks": {"a": print}}, r"sinks=\{'a': \.\.\.\}, a builtin_function_or_method that has none .* write"),
    ({"sinks": 5}, r"sinks=5"),
    ({"loader": 5}, r"loader=5 \(int\); it takes further arguments of zoo\.engine\.ShardedLoader"),
    ({"loader": {"foo": 1}}, r"loader=\{'foo': \.\.\.\}; allowed are shuffle, num_workers"),
    ({"loader": {"rank": 1}}, r"loader=\{'rank': \.\.\.\}; allowed are shuffle"),
    ({"collate_fn": 5}, r"collate_fn=5 \(int\); it takes a callable"),
    ({"model_parameters": 5}, r"model_parameters=5"),
    ({"model_parameters": [{"params": 5}]}, r"group 0 of params= has params=5 \(int\)"),
    ({"lr_scheduler": lambda optimizer: None}, r"lr_scheduler.* made a NoneType of the optimizer; .* has step\(\)"),
    ({"lr_scheduler": lambda optimizer: [1]}, r"lr_scheduler.* made a list of the optimizer"),
    ({"model": torch.jit.script(nn.Linear(2, 2))}, r"that is a ScriptModule.*module that it was made of"),
    ({"model": nn.Sequential(torch.jit.script(nn.Linear(2, 2)))}, r"whose '0' is a ScriptModule"),
    ({"monitors": "no"}, r"monitors='no' \(str\); it takes True or False"),
    ({"dist_init_required": "no"}, r"dist_init_required='no'"),
    ({"registry": 5}, r"registry=5"),
    ({"overrides": 5}, r"overrides are a mapping of paths, or strings key\.path=value, not 5"),
    ({"overrides": "a=1"}, r"overrides are a mapping"),
    ({"overrides": [5]}, r"override 5 is not of the form"),
    ({"overrides": {5: 1}}, r"5 is not a dotted path"),
]


@pytest.mark.parametrize(("given", "told"), GIVEN, ids=range(len(GIVEN)))
def test_what_initialize_cannot_take(given: dict[str, Any], told: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(ValueError, match=told):
        initialize(config, **{"model": nn.Linear(4, 4), "training_data": [torch.ones(4)] * 4, **given})


def test_a_tag_that_is_no_text_is_refused_by_a_save_in_the_background_too(tmp_path: Path) -> None:
    engine = start()
    with pytest.raises(ValueError, match="the checkpoint tag 5 cannot be used"):
        engine.save_checkpoint(tmp_path, tag=5, asynchronous=True)  # type: ignore[arg-type]


RATES: list[tuple[Any, str]] = [
    (None, r"the lr of group 0 got None \(NoneType\); it takes a number"),
    ("0.1", r"the lr of group 0 got '0\.1' \(str\)"),
    ([0.1], r"the lr of group 0 got \[0\.1\] \(list\)"),
    (torch.ones(2), r"the lr of group 0 got a tensor of shape \(2,\)"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("rate", "told"), RATES, ids=range(len(RATES)))
@pytest.mark.parametrize("stage", [0, 2])
def test_a_learning_rate_that_is_no_number_is_told_before_anything_changes(rate: Any, told: str, stage: int) -> None:
    engine, twin = start(stage=stage), start(stage=stage)
    for one in (engine, twin):
        one.train_batch(batches(0, 1))
    engine.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ValueError, match=told):
        engine.train_batch(batches(1, 1))
    with pytest.raises(ValueError, match=told):
        engine.get_lr()
    engine.optimizer.param_groups[0]["lr"] = 0.1
    for one in (engine, twin):
        one.train_batch(batches(2, 1))
    for name, value in twin.module_state_dict().items():
        assert torch.equal(engine.module_state_dict()[name], value)
