"""What one rank fails with in ``initialize`` ends it on all ranks at once, by name; nobody waits for the time-out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo.deepspeed
from zoo import sim
from zoo.comm import RankFailedError
from zoo.engine import initialize
from zoo.pipe import LayerSpec, PipelineModule
from zoo.shard.offload.scratch import Scratch
from zoo.shard.parameters import BucketParameters
from zoo.zero import ZeroOptimizer

RATE = 0.1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 40},
    }  # fmt: skip


HERE = threading.local()
"""What fails on this rank: ranks are threads."""


class RefusesLater(torch.optim.SGD):
    """On this rank's part of the model, after that was split."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{"lr": RATE, **options})
        if getattr(HERE, "refuses", False) and any(type(p) is torch.Tensor for p in self.param_groups[0]["params"]):
            HERE.refuses = False
            raise ZeroDivisionError("in an optimizer of the user's own\nand more of it")


def refuses_later() -> dict[str, Any]:
    HERE.refuses = True
    return {}


def fails(_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("in a callable of the user's own\nand more of it")


class Part:
    def prepare(self, module: nn.Module, mesh: Any) -> None:
        raise ZeroDivisionError("in a part of the user's own")


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, device="meta"))


def section(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"config": {**config, **changes}}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "no model": (lambda c: {"model": 5}, ValueError, "ValueError: initialize got model=5"),
    "no file": (lambda c: {"config": "/nowhere/config.json"}, OSError, "FileNotFoundError: .*nowhere"),
    "unknown key": (lambda c: section(c, gradient_cliping=1.0), ValueError, "ConfigError: .*gradient_cliping"),
    "bad batch": (lambda c: section(c, train_batch_size=7), ValueError, "ConfigError: .*train_batch_size"),
    "no such optimizer": (lambda c: section(c, optimizer={"type": "Adan"}), ValueError, "Adan"),
    "bad option": (lambda c: section(c, optimizer={"type": "SGD", "params": {"lrr": 1}}), Exception, "lrr"),
    "no parameters": (lambda c: {"model": nn.Tanh()}, ValueError, "ValueError: the model has no parameters"),
    "on meta": (lambda c: {"model": half_on_meta()}, ValueError, "ValueError: parameter '1.weight' is on the meta"),
    "factory": (lambda c: {"optimizer": fails}, ZeroDivisionError, "ZeroDivisionError: in a callable"),
    "later": (lambda c: refuses_later(), ZeroDivisionError, "ZeroDivisionError: in an optimizer"),
    "data": (lambda c: {"training_data": 5}, ValueError, "ValueError: training_data is a int"),
    "part": (lambda c: {"parts": {"mine": Part()}}, ZeroDivisionError, "ZeroDivisionError: in a part"),
    "schedule": (lambda c: {"lr_scheduler": fails}, ZeroDivisionError, "ZeroDivisionError: in a callable"),
}  # fmt: skip


def check_alike(made: Any, rank: int) -> None:
    """A right ``initialize`` on all ranks is what it would have been."""
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        made.backward(made(x).square().mean())
        made.step()


LATER = {"optimizer": RefusesLater}


def raises(wrong: Any, kind: type[Exception], text: str, fails_here: bool, failing: int, call: Any) -> None:
    if fails_here:
        with pytest.raises(kind, match=text.split(": ", 1)[-1]):
            call(**wrong())
    else:
        with pytest.raises(RankFailedError, match=rf"failed: rank {failing}: .*{text}") as caught:
            call()
        assert caught.value.ranks == (failing,)
        assert "and more of it" not in str(caught.value)


@pytest.mark.matrix
@pytest.mark.parametrize("moment", list(WRONG))
@given(world=st.integers(2, 3), failing=st.integers(0, 2), stage=st.integers(0, 3))
def test_the_others_are_told_at_once(moment: str, world: int, failing: int, stage: int) -> None:
    failing = min(failing, world - 1)
    wrong, kind, text = WRONG[moment]

    def job(rank: int) -> None:
        document, model = config(stage), net()

        def call(**changes: Any) -> Any:
            given = {"config": document, "model": model, **(LATER if moment == "later" else {})}
            return initialize(**{**given, **changes})

        raises(lambda: wrong(document), kind, text, rank == failing, failing, call)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        check_alike(call()[0], rank)

    sim.run(world, job)  # no time-out of a group: to wait is a deadlock


OF_FACADE: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "no file": (lambda c: {"config": "/nowhere/config.json"}, ValueError, "ConfigError: .*nowhere"),
    **{name: WRONG[name] for name in ("factory", "later", "schedule", "data", "bad option")},
    "none": (lambda c: {"model": None}, ValueError, "initialize.. got no model"),
    "name": (lambda c: {"optimizer": "SGD"}, ValueError, "initialize.optimizer='SGD'"),
    "bad batch": (lambda c: section(c, train_batch_size=7), Exception, "train_batch_size"),
    "parameters": (lambda c: {"model_parameters": [5]}, ValueError, "a member of group 0 of params= is a int"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("moment", list(OF_FACADE))
@given(world=st.integers(2, 3), failing=st.integers(0, 2), stage=st.integers(0, 3), again=st.booleans())
def test_of_the_facade_too(moment: str, world: int, failing: int, stage: int, again: bool) -> None:
    """``again``: a model that an engine has already, which ends then."""
    failing = min(failing, world - 1)
    wrong, kind, text = OF_FACADE[moment]

    def job(rank: int) -> None:
        document, model = config(stage), net()

        def call(**changes: Any) -> Any:
            given = {"config": document, "model": model, **(LATER if moment == "later" else {})}
            return zoo.deepspeed.initialize(**{**given, **changes})

        kept = call()[0] if again else None
        raises(lambda: wrong(document), kind, text, rank == failing, failing, call)
        check_alike(call()[0], rank)
        del kept

    sim.run(world, job)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "moment", ["no file", "unknown key", "bad option", "factory", "later", "data", "part", "schedule"]
)
@given(failing=st.integers(0, 3), stage=st.integers(0, 1))
def test_ranks_with_other_layers_are_told_too(moment: str, failing: int, stage: int) -> None:
    """Two stages of a pipeline, two data-parallel ranks each."""
    wrong, kind, text = WRONG[moment]

    def job(rank: int) -> None:
        document = config(stage)
        layers = [LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 6, 6)]
        model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")

        def call(**changes: Any) -> Any:
            given = {"config": document, "model": model, **(LATER if moment == "later" else {})}
            return initialize(**{**given, **changes})

        raises(lambda: wrong(document), kind, text, rank == failing, failing, call)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank // 2))
        call()[0].train_batch(iter([(x, x)]))

    sim.run(4, job)


@given(world=st.integers(2, 3), failing=st.integers(0, 2), stage=st.integers(0, 3))
def test_an_optimizer_without_an_engine(world: int, failing: int, stage: int) -> None:
    failing = min(failing, world - 1)

    def job(rank: int) -> None:
        for wrong in (fails, RefusesLater):
            model = net()
            HERE.refuses = wrong is RefusesLater and rank == failing
            optimizer = RefusesLater if wrong is RefusesLater or rank != failing else fails
            with pytest.raises(ZeroDivisionError if rank == failing else RankFailedError, match="of the user's own"):
                ZeroOptimizer(model, stage=stage, optimizer=optimizer, lr=RATE)
            assert all(type(p) is nn.Parameter for p in model.parameters())
            ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=RATE)

    sim.run(world, job)


def test_an_interrupt_of_one_rank_is_told_when_waits_end() -> None:
    def interrupted(_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def job(rank: int) -> None:
        with pytest.raises(
            KeyboardInterrupt if rank == 1 else RankFailedError,
            match="rank 1 failed with KeyboardInterrupt" if rank != 1 else None,
        ):
            initialize(config(3), net(), optimizer=interrupted if rank == 1 else None)

    sim.run(2, job, group_timeout_s=5.0)


def test_in_the_midst_of_splitting_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank has no memory for it does not wait with, and it is told to the others when their waits end."""
    lay_out = BucketParameters._lay_out

    def no_memory(self: Any, source: Any) -> None:
        if HERE.bucket == self.bucket.index:
            raise torch.OutOfMemoryError("no memory for this bucket")
        lay_out(self, source)

    monkeypatch.setattr(BucketParameters, "_lay_out", no_memory)

    def job(rank: int) -> None:
        HERE.bucket = 1 if rank == 1 else None
        with pytest.raises(RuntimeError, match=f"{'' if rank else 'rank 1 failed with .*'}no memory for this bucket"):
            initialize(config(3), net())

    sim.run(2, job, group_timeout_s=5.0)


def test_what_is_offloaded_has_no_room_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme_file = Scratch.nvme_file

    def no_room(self: Any, *given: Any) -> Any:
        if HERE.full:
            raise OSError("no space left on device")
        return nvme_file(self, *given)

    monkeypatch.setattr(Scratch, "nvme_file", no_room)
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    document = {**config(3), "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload}}

    def job(rank: int) -> None:
        model = net()
        HERE.full = rank == 1
        with pytest.raises(
            OSError if rank else RankFailedError, match=f"{'' if rank else 'rank 1: OSError: '}no space"
        ):
            initialize(document, model)
        HERE.full = False
        check_alike(initialize(document, model)[0], rank)

    sim.run(2, job)
