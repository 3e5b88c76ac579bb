"""Public names of DeepSpeed that no other test here uses, as programs use them; and that none is left out."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.deepspeed.names import is_there, listed
from tests.monitor.battery import read_tensorboard
from torch import nn
from zoo.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from zoo.deepspeed.monitor.comet import CometMonitor
from zoo.deepspeed.monitor.csv_monitor import csvMonitor
from zoo.deepspeed.monitor.tensorboard import TensorBoardMonitor
from zoo.deepspeed.monitor.wandb import WandbMonitor
from zoo.deepspeed.runtime import lr_schedules
from zoo.deepspeed.utils import groups

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.deepspeed import FINDER
from zoo.deepspeed.modules import Refused


def engine_of(stage: int, **more: Any) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip
    return deepspeed.initialize(model=nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)), config=config)[0]


def backward(engine: Any) -> None:
    engine.backward(engine(torch.randn(2, 40)).square().mean())


def test_a_rank_reads_and_writes_its_own_elements_at_stage_3() -> None:
    """Local elements of all ranks are the whole, whichever rank has which."""

    def program(rank: int) -> list[tuple[str, list[float], list[float], bool]]:
        engine, utils, found = engine_of(3), deepspeed.utils, []
        backward(engine)
        engine.step()
        backward(engine)
        for p in engine.parameters():
            for key in ("exp_avg", "grad"):
                if key == "grad":
                    local, whole = utils.safe_get_local_grad(p), utils.safe_get_full_grad(p)
                else:
                    local = utils.safe_get_local_optimizer_state(p, key)
                    whole = utils.safe_get_full_optimizer_state(p, key)
                written = torch.full_like(local, float(rank + 1))
                if key == "grad":
                    utils.safe_set_local_grad(p, written)
                    after = utils.safe_get_full_grad(p)
                else:
                    utils.safe_set_local_optimizer_state(p, written, key)
                    after = utils.safe_get_full_optimizer_state(p, key)
                counted = (after == rank + 1).sum().item() == local.numel()
                found.append((key, local.flatten().tolist(), whole.flatten().tolist(), counted))
        return found

    ranks = sim.run(2, program)
    assert len(ranks[0]) == 8
    for (key, one, whole, counted), (_, other, again, too) in zip(*ranks, strict=True):
        assert one + other == whole == again, key
        assert counted
        assert too
    assert any(one for _, one, _, _ in ranks[0])
    assert any(other for _, other, _, _ in ranks[1])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_that_is_set_whole_is_what_the_next_step_begins_with(stage: int) -> None:
    def program(rank: int) -> list[bool]:
        engine, found = engine_of(stage), []
        backward(engine)
        engine.step()
        for p in engine.parameters():
            value = torch.arange(p.ds_numel if hasattr(p, "ds_numel") else p.numel()).float()
            shape = deepspeed.utils.safe_get_full_fp32_param(p).shape
            deepspeed.utils.safe_set_full_optimizer_state(p, value.view(shape), "exp_avg")
            found.append(torch.equal(deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg"), value.view(shape)))
        before = [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in engine.parameters()]
        backward(engine)
        engine.step()
        after = [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.parameters()]
        # A momentum that is far above every gradient says where each element goes: down, but where it is 0.
        found += [bool((new < old).flatten()[1:].all()) for new, old in zip(after, before, strict=True)]
        return found

    assert all(all(found) for found in sim.run(2, program))


def test_clones_take_no_more_room_in_a_file_than_they_have_elements() -> None:
    big = torch.arange(10_000.0)
    state = {"a": big[:10], "b": [big[10:20].view(2, 5)], "n": 3}
    cloned = clone_tensors_for_torch_save(state)
    assert torch.equal(cloned["a"], state["a"])
    assert torch.equal(cloned["b"][0], state["b"][0])
    assert cloned["n"] == 3
    sizes = []
    for one in (state, cloned):
        torch.save(one, file := io.BytesIO())
        sizes.append(len(file.getvalue()))
    assert sizes[1] < 4000 < 40_000 < sizes[0]


def test_tensor_parallel_ranks_are_those_of_the_mpu(monkeypatch: pytest.MonkeyPatch) -> None:
    dist, made = deepspeed.comm, {}
    mpu = SimpleNamespace(  # one for all ranks of this process
        get_tensor_model_parallel_group=lambda: made[dist.get_rank()][0],
        get_data_parallel_group=lambda: made[dist.get_rank()][1],
    )
    monkeypatch.setattr(groups, "mpu", mpu)

    def program(rank: int) -> tuple[int, ...]:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        alike = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        made[rank] = pairs[rank // 2], alike[rank % 2]
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=groups.get_tensor_model_parallel_group())
        return (
            groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank(),
            groups.get_tensor_model_parallel_src_rank(), groups.get_data_parallel_world_size(), int(total),
        )  # fmt: skip

    assert sim.run(4, program) == [(2, 0, 0, 2, 1), (2, 1, 0, 2, 1), (2, 0, 2, 2, 5), (2, 1, 2, 2, 5)]


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    lr_schedules.WARMUP_LR: (
        {
            lr_schedules.WARMUP_MIN_LR: 0.0, lr_schedules.WARMUP_MAX_LR: 0.4, lr_schedules.WARMUP_NUM_STEPS: 4,
            lr_schedules.WARMUP_TYPE: lr_schedules.WARMUP_LINEAR_RATE,
        },
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.4],
    ),
    lr_schedules.WARMUP_DECAY_LR: (
        {
            lr_schedules.TOTAL_NUM_STEPS: 5, lr_schedules.WARMUP_MAX_LR: 0.4, lr_schedules.WARMUP_NUM_STEPS: 2,
            lr_schedules.WARMUP_TYPE: lr_schedules.WARMUP_LINEAR_RATE,
        },
        "falls to 0",
    ),
    lr_schedules.WARMUP_COSINE_LR: (
        {
            lr_schedules.TOTAL_NUM_STEPS: 5, lr_schedules.WARMUP_NUM_STEPS: 2, lr_schedules.WARMUP_MIN_RATIO: 0.0,
            lr_schedules.COS_MIN_RATIO: 0.0, lr_schedules.WARMUP_TYPE: lr_schedules.WARMUP_LOG_RATE,
        },
        "falls to 0",
    ),
    lr_schedules.LR_RANGE_TEST: (
        {
            lr_schedules.LR_RANGE_TEST_MIN_LR: 0.1, lr_schedules.LR_RANGE_TEST_STEP_SIZE: 1,
            lr_schedules.LR_RANGE_TEST_STEP_RATE: 1.0, lr_schedules.LR_RANGE_TEST_STAIRCASE: True,
        },
        "rises",
    ),
    lr_schedules.ONE_CYCLE: (
        {
            lr_schedules.CYCLE_MIN_LR: 0.1, lr_schedules.CYCLE_MAX_LR: 0.3, lr_schedules.CYCLE_FIRST_STEP_SIZE: 2,
            lr_schedules.CYCLE_MIN_MOM: 0.8, lr_schedules.CYCLE_MAX_MOM: 0.9, lr_schedules.DECAY_LR_RATE: 0.1,
            lr_schedules.DECAY_MOM_RATE: 0.0, lr_schedules.DECAY_STEP_SIZE: 1,
        },
        "peaks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_schedules_are_configured_with_the_names_of_their_keys(kind: str) -> None:
    assert set(KINDS) == set(lr_schedules.VALID_LR_SCHEDULES)
    params, expected = KINDS[kind]

    def program(rank: int) -> list[float]:
        engine, seen = engine_of(0, scheduler={"type": kind, "params": params}), []
        for _ in range(6):
            backward(engine)
            engine.step()
            seen.append(engine.get_lr()[0])
        return seen

    (seen,) = sim.run(1, program)
    rising = [a < b for a, b in itertools.pairwise(seen)]
    if isinstance(expected, list):
        assert seen == pytest.approx(expected)
    elif expected == "falls to 0":
        assert max(seen[:3]) > seen[3] > seen[5]
        assert seen[5] == pytest.approx(0, abs=1e-6)
    elif expected == "rises":
        assert all(rising)
    else:
        assert rising[0]
        assert not rising[-1]
        assert max(seen) == pytest.approx(0.3)


def test_tensorboard_has_the_events_by_samples(tmp_path: Path) -> None:
    section = SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="job")
    monitor = TensorBoardMonitor(section)
    monitor.write_events([("Train/loss", 1.5, 10), ("Train/lr", 0.25, 10)])
    monitor.write_events([("Train/loss", torch.tensor(0.5), 20)])
    monitor.sink.close()
    rows = read_tensorboard(tmp_path / "job")
    assert sorted(rows) == [("Train/loss", 10, 1.5), ("Train/loss", 20, 0.5), ("Train/lr", 10, 0.25)]


def test_each_rank_has_a_place_where_all_of_them_write(tmp_path: Path) -> None:
    def job(rank: int, ranks: str) -> None:
        section = SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name=ranks, ranks=ranks)
        monitor = csvMonitor(section)
        monitor.write_events([("a", float(rank), 1)])
        assert (monitor.sink is None) == (ranks == "first" and rank == 1)

    for ranks in ("first", "all"):
        sim.run(2, lambda rank, ranks=ranks: job(rank, ranks))
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.csv")}
    assert found == {"first/a.csv", "all/rank_0/a.csv", "all/rank_1/a.csv"}


@pytest.mark.parametrize(("monitor", "where", "given"), [
    (WandbMonitor, "zoo.monitor.wandb.WandbMonitor", {"group": "g", "team": "t", "project": "p"}),
    (CometMonitor, "zoo.monitor.comet.CometMonitor", {"project": "p", "samples_log_interval": 1}),
])  # fmt: skip
def test_services_get_the_section_and_the_events(
    monitor: Any, where: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sink:
        experiment = "theirs"

        def __init__(self, section: Any, place: Any) -> None:
            self.section, self.place, self.records = section, place, []

        def write(self, record: Any) -> None:
            self.records.append((record.total_samples, dict(record.metrics)))

    monkeypatch.setattr(where, Sink)
    made = monitor(SimpleNamespace(enabled=True, **given))
    made.write_events([("a", 1.0, 5), ("b", torch.tensor(2.0), 5), ("a", 3, 6)])
    assert made.sink.records == [(5, {"a": 1.0, "b": 2.0}), (6, {"a": 3.0})]
    assert made.sink.place.rank == 0
    assert {key: getattr(made.sink.section, key) for key in given} == given
    if monitor is WandbMonitor:
        assert (made.group, made.team, made.project) == ("g", "t", "p")
    else:
        assert made.experiment == "theirs"
    quiet = monitor(SimpleNamespace(enabled=False, **given))
    quiet.write_events([("a", 1.0, 5)])
    assert quiet.sink is None


def test_each_public_name_that_is_there_is_used_by_a_test() -> None:
    """By its own name; the tables of signatures and of names are no use."""
    here = Path(__file__).parent
    tables = ("test_signatures.py", "test_names.py")
    files = [p for p in here.glob("test_*.py") if p.name not in tables]
    texts = [p.read_text() for p in [*files, here / "gating.json"]]
    refused = [one.path for one in listed() if isinstance(FINDER.entry(one.path), Refused)]
    public = [one.path for one in listed() if one.group == 1 and is_there(one.path) and one.path not in refused]
    assert len(public) > 120
    assert [path for path in public if not any(path.rpartition(".")[2] in text for text in texts)] == []


@pytest.mark.parametrize(
    ("first", "second", "ratio", "size"), [(100, 0, 1.0, 100), (30, None, 0.5, 60), (30, 10, 0.75, 40)]
)
def test_a_cycle_tells_its_parts(first: int, second: int | None, ratio: float, size: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    steps = {"cycle_first_step_size": first, "cycle_second_step_size": second}
    schedule = lr_schedules.OneCycle(optimizer, 0.001, 0.1, cycle_momentum=False, **steps)
    assert (schedule.step_ratio, schedule.total_size) == (ratio, size)
