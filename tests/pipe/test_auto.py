"""``schedule="auto"``: what the forecast puts first, on all ranks, with the reason."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipe.test_engine import batches
from tests.pipe.test_training import VOCABULARY, WIDTH, Case, check, config, layers, loss_fn
from torch import nn

import zoo.engine
from zoo import registry, sim
from zoo.cost import read_hardware
from zoo.cost.stages import LayerSize, costs_of_stages, layer_costs
from zoo.pipe import LayerSpec, PipelineModule, build, split
from zoo.pipe.choose import CANDIDATES, choose
from zoo.pipe.schedules.auto import AutoSchedule
from zoo.pipe.simulate import simulate
from zoo.pipe.sizes import size_of

SPECS = [LayerSpec(nn.Linear, 8, 8) for _ in range(8)]


def placed(num_ranks: int, schedule: Any, specs: Any = SPECS, **options: Any) -> list[tuple[Any, ...]]:
    """(rank of each stage, table for 8 micro-batches, bounds) on each rank."""

    def fn(rank: int) -> Any:
        model = PipelineModule(specs, num_stages=num_ranks, schedule=schedule, **options)
        return model.rank_of, str(model.schedule.build(num_ranks, 8)), model.bounds

    return sim.run(num_ranks, fn, seed=0)


def auto(**params: Any) -> dict[str, Any]:
    return {"type": "auto", "params": params}


def test_the_model_is_cut_for_the_first_of_the_forecast() -> None:
    found = placed(2, "auto")
    assert found[0] == found[1]
    assert found[0][0] == (0, 1, 1, 0)  # zb_v: the least bubble with equal stages
    assert found[0][1] == str(build("zb_v", 2, 8))


def test_a_limit_leaves_out_what_keeps_too_much() -> None:
    # Each layer keeps (8 + 8) 4-byte numbers of each of 10 tokens, 640 bytes; a rank has four of them.
    kept = 4 * 640
    for limit, expected in ((2 * kept, "zb_v"), ([2 * kept, kept], "1f1b")):
        found = placed(2, auto(max_activation_bytes=limit, tokens=10))
        assert found[0] == found[1]
        assert found[0][1] == str(build(expected, 2, 8))
    with pytest.raises(sim.RankError, match="no schedule can be taken"):
        placed(2, auto(max_activation_bytes=kept - 1, tokens=10))
    # Of two layers only what comes in is kept: a fourth.
    found = placed(2, auto(max_activation_bytes=kept - 1, tokens=10), activation_checkpoint_interval=2)
    assert found[0][0] != (0, 1)


def test_times_that_were_measured_decide() -> None:
    """With messages that take long, fewer stages are faster."""
    measured = {"forward_s": [1.0] * 8, "backward_s": [2.0] * 8}
    assert placed(2, auto(**measured))[0][0] == (0, 1, 1, 0)
    slow = placed(2, auto(**measured, latency_s=100.0))
    assert slow[0][0] == (0, 1)
    costs = layer_costs([LayerSize(multiplied=1, kept_bytes=1, entering_bytes=1)] * 8, tokens=1, flops_per_s=1.0)
    model = costs_of_stages(costs, lambda n: [i * 8 // n for i in range(n + 1)], latency_s=100.0)
    assert slow[0][1] == str(build(choose(2, 8, model).best.candidate.name, 2, 8))


def test_uneven_layers_are_forecast_as_they_are_cut() -> None:
    specs = [LayerSpec(nn.Linear, n, m) for n, m in ((4, 40), (40, 4), (4, 4), (4, 4), (4, 4), (4, 24), (24, 8))]

    def fn(rank: int) -> Any:
        model = PipelineModule(specs, num_stages=2, schedule="auto")
        size = [2.0 * spec.module_args[0] * spec.module_args[1] / 1e12 for spec in specs]
        times = {}
        for c in CANDIDATES:
            table = build(c.name, 2, 8, **c.options)
            if table.num_stages <= len(specs):
                bounds = model._bounds_of(table.num_stages)
                work = [sum(size[a:b]) for a, b in itertools.pairwise(bounds)]
                from zoo.cost.stages import StageCosts

                times[str(table)] = simulate(
                    table, StageCosts(forward_s=work, input_s=[2 * work[0], *work[1:]], weight_s=[0.0, *work[1:]])
                ).makespan_s
        return times[str(model.schedule.build(2, 8))] == pytest.approx(min(times.values()))

    assert all(sim.run(2, fn, seed=0))


def test_it_trains_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zoo.pipe"):
        check(Case(schedule="auto", num_blocks=6))
    said = [record.getMessage() for record in caplog.records if record.name == "zoo.pipe"]
    two = [text for text in said if "takes zb_v for 8 micro-batches" in text]  # two ranks: 4 each are expected
    assert len(two) == 1
    assert "parameters x tokens" in two[0]
    assert "bubble" in two[0]
    assert any("for 4 micro-batches" in text for text in said)  # what the batch has


def test_the_section_chooses_among_schedules_with_the_models_stages(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(num_micro=4)
    section = {"schedule": auto(candidates=["gpipe", {"type": "zb_h1"}, "zb_v", "1f1b"])}

    def fn(rank: int) -> float:
        model = PipelineModule(layers(case), num_stages=2, loss_fn=loss_fn)
        engine, *_ = zoo.engine.initialize({**config(case), "pipeline": section}, model)
        engine.time_computations()
        loss = float(engine.train_batch(batches(case, engine)))
        assert {str(e.computation)[1] for e in engine.timeline} == set("FIW")
        return loss

    with caplog.at_level(logging.INFO, logger="zoo.pipe"):
        found = sim.run(2, fn, seed=0)
    assert found[0] == found[1]
    assert any("takes zb_h1 for 4 micro-batches" in record.getMessage() for record in caplog.records)


def test_a_model_without_its_stages_is_refused() -> None:
    case = Case()
    section = {"schedule": auto(candidates=["zb_v"])}

    def fn(rank: int) -> None:
        model = PipelineModule(layers(case), num_stages=2, loss_fn=loss_fn)
        engine, *_ = zoo.engine.initialize({**config(case), "pipeline": section}, model)
        engine.train_batch(batches(case, engine))

    with pytest.raises(sim.RankError, match=r"none of the schedules zb_v has its stages on the ranks \(0, 1\)"):
        sim.run(2, fn, seed=0)


def test_a_rank_without_parameters_and_forwards_only_are_not_taken() -> None:
    ends = [torch.relu, *SPECS[:2], torch.relu]
    times = {"forward_s": [1.0] * 4, "backward_s": [2.0] * 4}
    assert placed(2, "zb_h1", ends)[0][0] == (0, 1)
    assert placed(2, auto(**times, candidates=["zb_v", "inference", "1f1b"]), ends)[0][0] == (0, 1)
    with pytest.raises(sim.RankError, match=r"rank 0 of 2 has no parameters: its layers are 0 .*relu"):
        placed(2, auto(**times, candidates=["zb_v"]), ends)
    with pytest.raises(sim.RankError, match=r"inference: it has forwards only, and does not train\)\."):
        placed(2, auto(candidates=["inference"]))


@pytest.mark.dear
def test_points_leave_schedules_with_as_many_stages() -> None:
    def rank_of(*points: str) -> list[Any]:
        def fn(rank: int) -> Any:
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
            return split(model, points, schedule="auto", num_stages=2, example=torch.ones(2, 4)).rank_of

        return sim.run(2, fn)

    assert rank_of("2") == [(0, 1)] * 2
    assert rank_of("1", "2", "3") == [(0, 1, 1, 0)] * 2
    with pytest.raises(sim.RankError, match="2 points make 3 stages, and 2 pipeline ranks have 4 with this schedule"):
        rank_of("1", "2")
    with pytest.raises(ValueError, match="give num_stages="):
        split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["1"], schedule="auto", example=torch.ones(2, 4))


def test_what_is_checkpointed_is_computed_again_in_both_parts_of_a_backward() -> None:
    sizes = [LayerSize(multiplied=n, kept_bytes=10 * n, entering_bytes=0 if n == 0 else 3) for n in (0, 1, 1, 0, 2, 2)]
    layers = layer_costs(sizes, tokens=1, flops_per_s=2.0)
    found = costs_of_stages(
        layers, lambda _: [0, 3, 6], checkpoint_interval=2, checkpointed=lambda numbers: 2 not in numbers
    )(2)
    assert found.forward_s == [2.0, 4.0]
    assert found.kept_bytes == [3 + 10, 3 + 3]  # of layers 0 and 1, all of layer 2; of layers 3 and 4, of layer 5
    assert found.backward_s == [2 * 2 + 1, 2 * 4 + 4]
    assert (found.input_s, found.weight_s) == ([5.0, 4 + 4], [0.0, 4 + 4])
    specs = [LayerSpec(nn.Linear, 8, 8)] * 4
    for names, expected in ((None, 2 * 32), (["Linear"], 2 * 32), (["Conv2d"], 4 * 64)):
        model = PipelineModule(
            specs, num_stages=1, schedule="auto", activation_checkpoint_interval=2, checkpointable_layers=names
        )
        assert model.schedule._costs_of(1).kept_bytes == [expected]


def test_sizes_of_layers() -> None:
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(12, 4, bias=False))
    assert size_of(block) == LayerSize(multiplied=96, kept_bytes=4 * (4 + 16 + 16), entering_bytes=16)
    embedding = LayerSpec(nn.Embedding, VOCABULARY, WIDTH, dtype=torch.bfloat16)
    assert size_of(embedding) == LayerSize(multiplied=0, kept_bytes=2 * WIDTH, entering_bytes=0)
    assert size_of(torch.relu) == LayerSize(multiplied=0, kept_bytes=0, entering_bytes=0)
    assert size_of(nn.Conv2d(3, 5, 2)).multiplied == 60


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"max_activation_bytes": 1.0}, "cannot tell what a layer keeps"),
        ({"forward_s": [1.0]}, "both, or neither"),
        ({"candidates": []}, "no candidates"),
        ({"candidates": ["auto"]}, "itself"),
        ({"candidates": ["1f2b"]}, "1f1b"),
        ({"candidates": [{"name": "1f1b"}]}, "takes a name"),
        ({"tokens": 0}, "tokens=0"),
        ({"kept_bytes": [1.0]}, "1 numbers as kept_bytes; the model has 8 layers"),
    ],
)
def test_mistakes_are_told(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PipelineModule(SPECS, num_stages=1, schedule=auto(**params))
    if "layers" not in said:
        with pytest.raises(ValueError, match=said):
            registry.build("pipe_schedule", "auto", params)


def test_a_schedule_as_a_mapping() -> None:
    assert placed(2, {"type": "interleaved_1f1b", "params": {"num_chunks": 4}})[0][0] == (0, 1) * 4
    with pytest.raises(ValueError, match="a mapping is"):
        PipelineModule(SPECS, num_stages=1, schedule={"name": "1f1b"})


def test_hardware_gives_what_is_not_given(tmp_path: Path) -> None:
    machine = read_hardware("h100")
    known = AutoSchedule(AutoSchedule.Config(hardware="h100"))
    assert known._rate() == machine.device.peak("bf16") * machine.device.reached
    assert (known._latency_s, known._bytes_per_s) == (machine.between.latency_s, machine.between.bytes_per_s)
    machine.write(tmp_path / "mine.json")
    mine = AutoSchedule(AutoSchedule.Config(hardware=str(tmp_path / "mine.json"), flops_per_s=2.0, latency_s=3.0))
    assert (mine._rate(), mine._latency_s, mine._bytes_per_s) == (2.0, 3.0, machine.between.bytes_per_s)
    plain = AutoSchedule(AutoSchedule.Config())
    assert (plain._rate(), plain._latency_s, plain._bytes_per_s) == (1e12, 0.0, math.inf)
    with pytest.raises(ValueError, match="no hardware is named 'h9000'"):
        AutoSchedule(AutoSchedule.Config(hardware="h9000"))
