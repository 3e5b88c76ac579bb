"""Exceptions: what DeepSpeed raises by one class and zoo by another is both, with zoo's sentence."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from tests.deepspeed.test_engine import batches, config, loss_of, start
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError
from zoo.deepspeed.adapters import told_as


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", [AssertionError, ValueError])
def test_a_step_whose_gradients_are_this_ranks_alone(stage: int, kind: type[Exception]) -> None:
    def program(rank: int) -> float:
        engine = start(stage, gradient_accumulation_steps=1)
        x = batches(rank, 1)[0]
        before = [p.detach().clone() for p in engine.parameters()]
        with engine.no_sync():
            engine.backward(loss_of(engine, x))
            with pytest.raises(kind, match=r"step\(\) inside of no_sync\(\)"):
                engine.step()
        assert all(map(torch.equal, before, engine.parameters()))
        engine.step()  # afterwards it is right
        assert not all(map(torch.equal, before, engine.parameters()))
        return float(engine.get_global_grad_norm())

    norms = sim.run(2, program)
    assert norms[0] == norms[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_puts_reductions_off_is_not_nested_and_no_sync_is_for_whole_gradients(stage: int) -> None:
    engine = start(stage)
    if stage > 1:
        with pytest.raises(AssertionError, match=f"no_sync context manager is incompatible with ZeRO stage {stage}"):
            engine.no_sync()
    outer = [engine.coalesce_grad_reduction, engine.no_sync][: 3 - min(stage, 2)]
    for first in outer:
        for second in outer:
            told = rf"{second.__name__}\(\) within {first.__name__}.* manager reentry is unsupported"
            with first(), pytest.raises(AssertionError, match=told), second():
                pass
        with pytest.raises(ZeroDivisionError), first():
            raise ZeroDivisionError
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, batches(0, 1)[0]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_odd_bucket_of_gathers(stage: int) -> None:
    def begin(size: int) -> None:
        start(stage, zero_optimization={"stage": stage, "allgather_bucket_size": size})

    begin(1000)
    if stage in (1, 2):
        with pytest.raises(AssertionError, match="must be a multiple of nccl_start_alignment_factor, which is 2"):
            begin(1001)
    else:
        begin(1001)


def test_a_parameter_that_gets_no_gradient() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    document = config(2, zero={"ignore_unused_parameters": False}, gradient_accumulation_steps=1)
    engine = deepspeed.initialize(model=Used(model), config=document)[0]
    with pytest.raises(AssertionError, match="got no gradient in backward") as told:
        engine.backward(engine(torch.ones(2, 3)).sum())
    assert isinstance(told.value, ValueError)


class Used(nn.Module):
    """One of its two layers."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers[0](x)
        return found


def test_arguments_and_configurations() -> None:
    for kind in (AssertionError, ValueError, ConfigError, deepspeed.DeepSpeedConfigError):
        with pytest.raises(kind, match="got no model") as told:
            deepspeed.initialize(model=None, config=config(0))
        assert type(told.value).__name__ == "ConfigError"
        with pytest.raises(kind, match="train_batch_size"):
            deepspeed.initialize(model=nn.Linear(2, 2), config={**config(0), "train_batch_size": 3})


def test_only_a_loss_can_be_scaled() -> None:
    engine = start(1)
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match=r"takes a scalar tensor, the loss, and got \(2, 3\); give its mean\(\) or sum"):
            engine.scale(engine(batches(0, 1)[0]))
        with pytest.raises(kind, match="takes a scalar tensor, the loss, and got float"):
            engine.scale(1.0)
    engine.scale(loss_of(engine, batches(0, 1)[0])).backward()


@pytest.mark.parametrize("splits", [{"in_splits": 0}, {"out_splits": 33}, {"in_splits": 33, "out_splits": 0}])
def test_tiles_that_cannot_be(splits: dict[str, int]) -> None:
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match="TiledLinear got"):
            deepspeed.zero.TiledLinear(32, 32, **splits)


def test_an_exception_of_two_classes_keeps_what_it_says() -> None:
    class Told(ValueError):
        def __init__(self, what: str, where: int) -> None:
            super().__init__(f"{what} at {where}")
            self.where = where

    @told_as(RuntimeError)
    def says(error: Exception, cause: Exception | None = None) -> Any:
        """A docstring."""
        raise error from cause

    cause = KeyError("a")
    with pytest.raises(RuntimeError, match="this at 3") as told:
        says(Told("this", 3), cause)
    assert isinstance(told.value, Told)
    assert (told.value.where, told.value.__cause__, says.__doc__) == (3, cause, "A docstring.")
    with pytest.raises(UnicodeDecodeError):  # whose layout is its own
        says(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"))
    with pytest.raises(KeyError):  # no ValueError
        says(KeyError("a"))


def test_an_exception_of_two_classes_comes_back_from_another_process() -> None:
    """Pools pickle what a worker raises; so does torch.multiprocessing."""
    with pytest.raises(AssertionError) as told:
        deepspeed.initialize(model=None, config=config(0))
    again = pickle.loads(pickle.dumps(told.value))
    assert isinstance(again, ConfigError)
    assert isinstance(again, AssertionError)
    assert (str(again), again.__dict__) == (str(told.value), told.value.__dict__)
    assert isinstance(copy.copy(again), AssertionError)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": nn.Linear}, r"initialize\(model=.*\) got a type; .* an nn\.Module"),
    ({"model": [nn.Linear(3, 3)]}, r"got a list; .* an nn\.Module"),
    ({"model_parameters": 5}, r"initialize\(model_parameters=5\): a int; .* parameters, .*groups"),
    ({"model_parameters": [{"params": 5}]}, r"group 0 of model_parameters has params=5"),
    ({"model_parameters": [{"lr": 5}]}, r"group 0 of model_parameters has no params"),
    (
        {"model_parameters": list(nn.Linear(3, 3).parameters())},
        r"holds a tensor of shape \(3, 3\) that is not in the m",
    ),
    ({"mpu": 5}, r"initialize\(mpu=5\): a int without get_data_parallel_group\(\)"),
    ({"lr_scheduler": lambda optimizer: None}, r"made a NoneType of the optimizer"),
    ({"training_data": [torch.ones(3)] * 4, "collate_fn": 5}, r"collate_fn=5 \(int\)"),
]


@pytest.mark.parametrize(("given", "told"), REFUSED, ids=range(len(REFUSED)))
def test_what_initialize_cannot_take(given: dict[str, Any], told: str) -> None:
    document = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=told):
        deepspeed.initialize(**{"model": model, "config": document, **given})
    assert all(p.requires_grad and type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "wrong", [{"gradient_clipping": "much"}, {"train_batch_size": 7}, {"scheduler": {"type": "Odd"}}]
)
def test_parameters_that_were_left_out_train_again_after_a_refusal(stage: int, wrong: dict[str, Any]) -> None:
    """``initialize`` freezes what is in no group; whoever goes on without an engine has his model as it was."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    document = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    given = {"model": model, "model_parameters": list(model[0].parameters())}
    with pytest.raises(ValueError, match=r"gradient_clipping|train_batch_size|no lr_schedule is named"):
        deepspeed.initialize(**given, config={**document, **wrong})
    assert [p.requires_grad for p in model.parameters()] == [True] * 4
    engine = deepspeed.initialize(**given, config=document)[0]
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    engine.destroy()
    assert [p.requires_grad for p in model.parameters()] == [True] * 4


@pytest.mark.parametrize("stage", [0, 2])
def test_a_schedule_that_raises_has_not_undone_the_count_of_samples(stage: int) -> None:
    def of_step(step: int) -> float:
        if step == 2:
            raise ZeroDivisionError("in a schedule of the user's own")
        return 1.0

    document = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine = deepspeed.initialize(
        model=nn.Linear(3, 3), config=document, lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, of_step)
    )[0]
    for step in range(4):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        with pytest.raises(ZeroDivisionError) if step == 1 else contextlib.nullcontext():
            engine.step()
        assert (engine.global_steps, engine.global_samples) == (step + 1, 2 * (step + 1))


def test_an_engine_is_no_model() -> None:
    engine = start(1)
    model = engine.module
    with pytest.raises(ConfigError, match=r"got a DeepSpeedEngine, which has a model already: give its \.module"):
        deepspeed.initialize(model=engine, config=config(1))
    x = batches(0, 1)[0]
    engine.backward(loss_of(engine, x))  # it is as it was
    engine.step()
    assert deepspeed.initialize(model=model, config=config(1))[0].module is model
