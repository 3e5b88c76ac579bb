"""The time of a job that no formula knows: the runtime itself, without its arithmetic, under virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.config import Config
from zoo.cost import LEAN, SimulatedTime, StepTime, read_hardware
from zoo.registry import CORE, DEFAULT, Registry
from zoo.train import forecast
from zoo.train.config import read_document
from zoo.train.dry import dry_job

from .tiny import TinyTask
from .tiny import registry as tiny


def config_of(ranks: int, *, task: Any = None, registry: Registry = DEFAULT, **more: Any) -> Config:
    document: dict[str, Any] = {
        "train": {"steps": 3, "task": task or {"type": "byte_lm", "params": {"layers": 2}}, "out": "out"},
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}, **more,
    }  # fmt: skip
    return read_document(document, registry=registry).load(ranks)


def experts(**params: Any) -> dict[str, Any]:
    return {"type": "byte_lm", "params": {"layers": 2, "mlp": {"type": "moe", "params": params}}}


def simulated(config: Config, ranks: int, **options: Any) -> SimulatedTime:
    found = forecast(config, ranks=ranks, hardware="h100", **options).time
    assert isinstance(found, SimulatedTime)
    return found


@pytest.mark.parametrize(
    ("ranks", "task", "more", "waits"),
    [
        (2, experts(), {}, {"reduce_scatter_tensor"}),
        (2, experts(ep_size=2), {}, {"all_to_all_single"}),
        (2, None, {"mesh": {"axes": {"pipe": 2, "data": -1}}, "gradient_accumulation_steps": 2}, {"send"}),
        (2, None, {"tensor_parallel": {"autotp_size": 2}}, {"all_reduce"}),
    ],
    ids=["experts", "experts of two ranks", "stages", "tensor parts"],
)
def test_axes_and_experts_have_a_time(ranks: int, task: Any, more: dict[str, Any], waits: set[str]) -> None:
    found = forecast(config_of(ranks, task=task, **more), ranks=ranks, hardware="h100")
    time = found.time
    assert isinstance(time, SimulatedTime)
    assert waits <= set(time.waits_s)
    parts = [time.compute_s, *time.waits_s.values(), time.update_s, time.offload_s]
    assert min(parts) >= 0
    assert time.step_s == pytest.approx(sum(parts))
    assert json.loads(json.dumps(found.to_dict()))["time"]["waits_s"] == dict(time.waits_s)
    assert "under virtual time" in found.table()
    assert "not counted: pauses between kernels" in found.table()


def test_a_formula_is_near_the_runtime_under_virtual_time() -> None:
    """Of a transformer whose products take most of the time: within a fifth, at stages with and without gathers."""
    task = {"type": "byte_lm", "params": {"width": 2048, "layers": 2, "heads": 16, "context": 1024}}
    for stage in (1, 3):
        more = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 8}
        config = config_of(8, task=task, bf16={"enabled": True}, **more)
        by_formula = forecast(config, ranks=8, hardware="h100", software="lean").time
        machine = read_hardware("h100"), LEAN
        found = dry_job(config, ranks=8, registry=DEFAULT, machine=machine, alike=True).time
        assert isinstance(by_formula, StepTime)
        assert found is not None
        assert found.step_s == pytest.approx(by_formula.step_s, rel=0.2)


@pytest.mark.dear
def test_virtual_time_is_of_the_dtype_that_the_job_computes_in(tmp_path: Any) -> None:
    """A machine that is slow in one dtype is slow for jobs of that dtype alone."""
    slow = read_hardware("h100").to_dict()
    slow["device"]["flops_per_s"]["fp32"] /= 1000
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    for more, slower in (({}, True), ({"bf16": {"enabled": True}}, False)):
        config = config_of(1, task=experts(), **more)
        times = [forecast(config, hardware=name).time for name in ("h100", str(tmp_path / "slow.json"))]
        fast, found = (time.compute_s for time in times if isinstance(time, SimulatedTime))
        assert (found > fast) is slower


@pytest.mark.parametrize("task", [None, experts(ep_size=2)], ids=["dense", "experts"])
def test_ranks_and_micro_batches_that_are_not_there_get_a_sentence(task: Any) -> None:
    config = config_of(2, task=task)
    for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank={rank} of ranks={ranks}; a rank is from 0"):
            forecast(config, ranks=ranks, rank=rank)
    with pytest.raises(ValueError, match="micro_batches=0; a step has at least one"):
        forecast(config, ranks=2, micro_batches=0)


def test_one_rank_stands_for_those_that_do_the_same() -> None:
    config, machine = config_of(4, task=experts()), (read_hardware("h100"), LEAN)
    one, all_ranks = (
        dry_job(config, ranks=4, registry=DEFAULT, machine=machine, alike=alike) for alike in (True, False)
    )
    assert (len(one.forecasts), len(all_ranks.forecasts)) == (1, 4)
    assert one.time == all_ranks.time


def test_a_slower_machine_takes_longer(tmp_path: Any) -> None:
    slow = read_hardware("h100").to_dict()
    slow["device"]["bytes_per_s"] /= 10
    slow["inside"]["bytes_per_s"] /= 1000
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    config = config_of(2, task=experts())
    fast = simulated(config, 2)
    found = forecast(config, ranks=2, hardware=str(tmp_path / "slow.json")).time
    assert isinstance(found, SimulatedTime)
    assert found.compute_s > fast.compute_s
    assert found.update_s == pytest.approx(10 * fast.update_s)
    assert sum(found.waits_s.values()) > sum(fast.waits_s.values())


def test_offloading_is_never_left_out_in_silence() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    with_states = forecast(config_of(2, zero_optimization=zero), ranks=2, hardware="h100")
    assert with_states.time is not None
    assert with_states.to_host_bytes > 0
    said = " ".join(with_states.time.not_counted)
    for name in ("to_host", "to_device", "host_memory"):
        assert f"states no {name}" in said
    nvme = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/no/such/device"}}
    found = simulated(config_of(2, task=experts(), zero_optimization=nvme), 2)
    assert "reads from NVMe" in " ".join(found.not_counted)


class Careless(TinyTask):
    """On another device, without its data, or with a mistake of its own."""

    def __init__(self, *, seed: int, what: str = "") -> None:
        super().__init__(seed=seed)
        self.what = what

    def model(self) -> nn.Module:
        if self.what == "device":
            return super().model().to("cuda:7")
        if self.what == "mistake":
            raise KeyError("vocabulary")
        return super().model()

    def training_data(self) -> Any:
        if self.what == "data":
            raise FileNotFoundError("no /data/words.bin")
        return super().training_data()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is asked for is not there elsewhere")
@pytest.mark.parametrize(
    ("what", "hardware", "said"),
    [
        ("device", None, "the task 'careless' cannot build its model here: "),
        ("mistake", None, "the task 'careless' cannot build its model here: KeyError: 'vocabulary'"),
        ("data", "h100", "the task 'careless' cannot make its data here: FileNotFoundError: no /data/words.bin"),
    ],
)
def test_tasks_that_cannot_be_asked_say_why(what: str, hardware: str | None, said: str) -> None:
    registry = Registry(CORE, origin="core")
    registry.register("task", "careless", Careless)
    config = config_of(2, task={"type": "careless", "params": {"what": what}}, registry=registry)
    with pytest.raises(ValueError, match=said):
        forecast(config, ranks=2, registry=registry, hardware=hardware)


def test_what_a_dry_run_cannot_be_is_said() -> None:
    many = config_of(128, mesh={"axes": {"pipe": 2, "data": -1}})
    with pytest.raises(ValueError, match="at most 64"):
        forecast(many, ranks=128, hardware="h100")
    with pytest.raises(ValueError, match="no hardware is named 'abacus'"):
        forecast(config_of(2), ranks=2, hardware="abacus")
    with pytest.raises(ValueError, match="no software is named 'fast'"):
        forecast(config_of(2), ranks=2, hardware="h100", software="fast")
    two = config_of(2, mesh={"axes": {"pipe": 2, "data": -1}})
    with pytest.raises(ValueError, match="set gradient_accumulation_steps"):
        forecast(two, ranks=2, micro_batches=3)
    registry = tiny()
    config = config_of(2, task={"type": "tiny"}, registry=registry)
    assert simulated(config, 2, registry=registry).units == 8


def test_ranks_that_see_one_batch_do_not_compare_what_a_dry_run_left_out() -> None:
    from zoo.comm.check import values_count

    def fn(rank: int) -> bool:
        with sim.dry():
            inside = values_count()
        return values_count() and not inside

    assert sim.run(2, fn) == [True, True]
