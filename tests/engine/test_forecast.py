"""``engine.forecast()``: one method and one class, whatever the engine; what a step sends and moves, and its time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.engine.test_engine import start
from tests.pipe.test_engine import batches, engine_of
from tests.pipe.test_training import Case
from tests.train.tiny import registry
from torch import nn

import zoo.engine
from zoo import sim
from zoo.cost import SOFTWARE, Forecast, Layout, Transformer, read_hardware, step_time, transformer_of
from zoo.train import forecast, read_config

ADDED = 5 + 1
"""Numbers that the record of a step adds up, and the number of micro-batches, which is compared."""


@given(
    number=st.integers(0, 3), accumulation=st.integers(1, 3), device=st.sampled_from(["none", "cpu", "nvme"]),
    threshold=st.sampled_from([0, 10]),
)  # fmt: skip
@example(number=3, accumulation=3, device="nvme", threshold=0)
@example(number=2, accumulation=2, device="nvme", threshold=0)
def test_a_step_sends_and_moves_what_is_forecast(
    tmp_path_factory: pytest.TempPathFactory, number: int, accumulation: int, device: str, threshold: int
) -> None:
    section: dict[str, Any] = {"stage": number, "stage3_param_persistence_threshold": threshold}
    place = {"device": device, "nvme_path": str(tmp_path_factory.mktemp("nvme"))}
    if device != "none" and number:
        section |= {"offload_optimizer": place} | ({"offload_param": place} if number == 3 else {})
    changes = {"zero_optimization": section, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2}
    changes |= {"gradient_accumulation_steps": accumulation, "scheduler": None}

    def job(rank: int) -> None:
        engine = start(changes)
        engine.train_batch()
        expected = engine.forecast()
        assert type(expected) is Forecast
        assert expected.micro_batches == accumulation
        engine.comm.log.reset()
        before = engine.optimizer.nvme_traffic()
        engine.train_batch()
        sent = {op: row.wire_bytes for op, row in engine.comm.log.ops.items()}
        alone = 0 if number else engine.optimizer.alike.size  # where states are split these go with the norm
        sent["all_gather"] -= 8 * (ADDED + alone) * (engine.comm.size - 1)
        assert sent == expected.wire_bytes
        moved = tuple(now - then for now, then in zip(engine.optimizer.nvme_traffic(), before, strict=True))
        assert moved == (expected.nvme_read_bytes, expected.nvme_written_bytes)
        twice = engine.forecast(2 * accumulation).wire_bytes
        times = 2 if number > 1 else 1
        assert twice["reduce_scatter"] == times * expected.wire_bytes["reduce_scatter"]

    sim.run(2, job)


def test_gathered_at_the_same_time_is_what_a_recording_says() -> None:
    def job(rank: int) -> None:
        engine = start({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
        engine.train_batch()
        expected = engine.forecast().gathered_bytes
        with engine.sharded.record() as actions:
            engine.train_batch()
        assert 0 < max(actions.whole_bytes()) == expected

    sim.run(2, job)


LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


class Config:
    """What a model of transformers has."""

    def __init__(self, **values: Any) -> None:
        self.values = {**LLAMA, **values}

    def to_dict(self) -> dict[str, Any]:
        return self.values


class Model(nn.Module):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.config = Config(**values)
        self.table = nn.Embedding(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).square().mean()


def flat(changes: dict[str, Any] | None = None, **values: Any) -> Any:
    document = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2}, **(changes or {}),
    }  # fmt: skip
    return zoo.engine.initialize(document, Model(**values))[0]


def test_time_is_that_of_the_layout() -> None:
    def job(rank: int) -> None:
        engine = flat()
        with pytest.raises(ValueError, match="before the first batch: give seq="):
            engine.forecast(hardware="a100-80")
        layout = Layout(global_batch=12, micro_batch=2, data=2, stage=2)
        for seq in (512, 1024):
            shape, machine = transformer_of(LLAMA, seq=seq), read_hardware("h100")
            expected = step_time(shape, layout, machine, SOFTWARE["eager"], dtype="fp32")
            assert engine.forecast(hardware="h100", seq=seq).time == expected
        engine.train_batch(iter([torch.ones(2, 40, dtype=torch.int64)] * 3))
        found = engine.forecast(hardware="a100-80", software="lean")
        assert found.time is not None
        assert found.time.tokens == 40 * 12
        assert found.wire_bytes == engine.forecast().wire_bytes
        assert json.loads(json.dumps(found.to_dict()))["time"]["step_s"] == found.time.step_s
        assert "a step: " in found.table()
        assert "products of matrices" in found.table()
        assert "a step: " not in engine.forecast().table()

    sim.run(2, job)


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [
        ({}, "fp32", ()),
        ({"bf16": {"enabled": True}}, "bf16", ()),
        ({"fp16": {"enabled": True}}, "fp16", ()),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16", ("what torch_autocast changes",)),
        ({"communication_data_type": "bf16"}, "fp32", ("what communication_data_type changes",)),
    ],
    ids=["as it is", "bf16", "fp16", "autocast", "gradients in bf16"],
)
def test_time_is_of_the_dtype_that_the_job_computes_in(
    changes: dict[str, Any], dtype: str, said: tuple[str, ...]
) -> None:
    time = flat(changes).forecast(hardware="h100", seq=512).time
    layout = Layout(global_batch=6, micro_batch=2, stage=2)
    shape, machine = transformer_of(LLAMA, seq=512), read_hardware("h100")
    expected = step_time(shape, layout, machine, SOFTWARE["eager"], dtype=dtype)
    assert time == dataclasses.replace(expected, not_counted=said)


@pytest.mark.parametrize(
    ("changes", "values", "options", "why"),
    [
        ({}, {"model_type": "bloom"}, {}, "of type 'bloom' has no reader"),
        ({}, {"num_local_experts": 4}, {}, "experts have no formula of time"),
        ({}, {}, {"software": "fast"}, "no software is named 'fast'"),
        ({}, {}, {"hardware": "abacus"}, "abacus"),
    ],
)  # fmt: skip
def test_what_has_no_time_is_said(
    changes: dict[str, Any], values: dict[str, Any], options: dict[str, Any], why: str
) -> None:  # fmt: skip
    engine = flat(changes, **values)
    with pytest.raises(ValueError, match=why):
        engine.forecast(**{"hardware": "h100", "seq": 8, **options})
    assert engine.forecast().time is None


def test_what_an_offloading_job_has_no_time_of_is_said() -> None:
    """This engine computes on the CPU, where nothing is copied; on a GPU there are copies."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    found = flat({"zero_optimization": zero}).forecast(hardware="h100", seq=8)
    assert found.time is not None
    assert "not counted: copies between a device and its host" in found.table()
    assert json.loads(json.dumps(found.to_dict()))["time"]["not_counted"] == list(found.time.not_counted)


def test_a_model_without_a_shape_takes_one() -> None:
    engine = start({"scheduler": None})
    with pytest.raises(ValueError, match=r"a Net has no config of transformers .* give transformer="):
        engine.forecast(hardware="h100", seq=8)
    shape = Transformer(hidden=64, heads=4, layers=2, seq=16, vocab=128)
    assert engine.forecast(hardware="h100", transformer=shape).time.tokens == 8 * 16


def test_a_pipeline_has_the_same_class_and_its_bubble() -> None:
    case = Case(data=2, stage=1, pipe=2)
    shape = Transformer(hidden=64, heads=4, layers=4, seq=16, vocab=128)

    def job(rank: int) -> None:
        engine = engine_of(case)
        for step in range(2):
            engine.train_batch(batches(case, engine, step))
        found = engine.forecast(hardware="a100-80", transformer=shape)
        assert type(found) is Forecast
        assert found.micro_batches == engine.accumulation
        assert found.wire_bytes["send"] > 0
        assert found.time is not None
        assert found.time.bubble_s > 0
        assert found.time.ranks == 4
        assert engine.forecast(2, hardware="a100-80", transformer=shape).time.step_s < found.time.step_s

    sim.run(4, job)


def test_the_forecast_of_a_configuration_is_of_the_same_class(tmp_path: Path) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2}, "train": {"task": {"type": "tiny"}, "steps": 2, "out": str(tmp_path)},
    }  # fmt: skip
    config = read_config(document, registry=registry())
    found = forecast(config, ranks=2, registry=registry())
    assert type(found) is Forecast
    assert found.micro_batches == 3
    one = forecast(config, ranks=2, registry=registry(), micro_batches=1)
    assert found.wire_bytes["reduce_scatter"] == 3 * one.wire_bytes["reduce_scatter"]
    assert found.total_bytes == one.total_bytes
    with pytest.raises(ValueError, match="loaded for 1 ranks, not for 2"):  # no formula knows a Net: the job would run
        forecast(config, ranks=2, registry=registry(), hardware="h100")
    with pytest.raises(ValueError, match="set gradient_accumulation_steps"):
        forecast(config, registry=registry(), hardware="h100", micro_batches=1)
