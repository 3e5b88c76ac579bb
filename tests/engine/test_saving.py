"""save_16bit_model: one file that plain torch loads, whatever the stage and the tier, or nothing and why."""

from __future__ import annotations

import copy
import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.checkpointing import CheckpointError, TensorFile
from zoo.comm import CollectiveMismatchError
from zoo.engine import Engine, initialize
from zoo.shard.buckets import Bucket
from zoo.shard.runtime.executor import Executor

GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


class Net(nn.Module):
    """Tied, frozen and ordinary parameters; buffers of several dtypes, one of which state_dict leaves out."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.second.requires_grad_(False)
        if tied:
            self.again = nn.Linear(6, 6)
            self.again.weight = self.first.weight
            self.other_table: torch.Tensor
            self.register_buffer("other_table", self.table)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.tanh(self.second(self.first(x))))
        if hasattr(self, "again"):
            h = h + self.again(x)
        return (self.third(h) - y).square().mean()


def net(tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(tied=tied)


def start(zero: dict[str, Any], *, tied: bool = False, **more: Any) -> Engine:
    dice = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 6, generator=dice), torch.randn(64, 3, generator=dice))
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1, **zero},
        **more,
    }
    return initialize(config, net(tied), training_data=data)[0]


def zero_of(stage: int, device: str, folder: Path) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage, **(GATHER if stage == 3 else {})}
    if device != "none":
        section["offload_param"] = {"device": device, "nvme_path": str(folder), "max_in_cpu": 0}
    return section


PLACES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "cpu"), (3, "nvme")]


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "device"), PLACES)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_plain_torch_loads_the_trained_values(
    tmp_path: Path, stage: int, device: str, world: int, precision: str
) -> None:
    more: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True, "auto_cast": True}}
    if precision == "fp16":
        more["fp16"]["initial_scale_power"] = 4  # no step is skipped
    if world == 3:
        more["train_batch_size"] = 9
    (tmp_path / "nvme").mkdir()

    def job(rank: int) -> tuple[bool, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = start(zero_of(stage, device, tmp_path / "nvme"), **more)
        for _ in range(2):
            engine.train_batch()
        saved = engine.save_16bit_model(tmp_path / "out" / "deep")
        expected = engine.optimizer.consolidated_parameters()
        engine.train_batch()  # goes on as if nothing had been
        return saved, expected, {name: b.clone() for name, b in engine.module.named_buffers()}

    results = sim.run(world, job)
    assert all(saved for saved, *_ in results)
    assert [path.name for path in (tmp_path / "out" / "deep").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "deep" / "model.safetensors")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = net().to(dtype)
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(found)  # strict
    _, parameters, _ = results[0]
    for name, value in model.named_parameters():
        assert value.dtype is found[name].dtype is dtype
        assert torch.equal(value, parameters[name])
        assert torch.equal(value, before[name]) == (not value.requires_grad)
    assert found["norm.num_batches_tracked"] == 2
    assert torch.equal(found["table"], torch.arange(5))
    assert found["table"].dtype is torch.int64


@pytest.mark.parametrize("stage", range(4))
def test_what_is_tied_is_saved_once_as_safetensors_wants_it(tmp_path: Path, stage: int) -> None:
    def job(rank: int) -> dict[str, torch.Tensor]:
        engine = start(zero_of(stage, "none", tmp_path), tied=True)
        engine.train_batch()
        assert engine.save_16bit_model(str(tmp_path), "tied.safetensors")
        return engine.optimizer.consolidated_parameters()

    expected = sim.run(2, job)[0]
    with safetensors.safe_open(tmp_path / "tied.safetensors", framework="pt") as file:
        assert file.metadata() == {
            "format": "pt", "again.weight": "first.weight", "other_table": "table",
        }  # fmt: skip
    model = net(tied=True)
    load_model(model, tmp_path / "tied.safetensors")  # strict: no name is missing, none is there in vain
    assert model.again.weight is model.first.weight
    for name, value in model.named_parameters():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_name_that_ends_in_bin_is_read_by_torch(tmp_path: Path, stage: int) -> None:
    def job(rank: int) -> dict[str, torch.Tensor]:
        engine = start(zero_of(stage, "none", tmp_path), tied=True)
        engine.train_batch()
        assert engine.save_16bit_model(str(tmp_path), "pytorch_model.bin")
        return engine.optimizer.consolidated_parameters()

    expected = sim.run(2, job)[0]
    model = net(tied=True)
    model.load_state_dict(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))  # strict
    for name, value in model.named_parameters():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters_can_be_left_out(tmp_path: Path, stage: int) -> None:
    def job(rank: int) -> int:
        engine = start(zero_of(stage, "none", tmp_path))
        engine.comm.log.reset()
        assert engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
        less = engine.comm.log.wire_bytes
        engine.comm.log.reset()
        assert engine.save_16bit_model(tmp_path, "all.safetensors")
        return engine.comm.log.wire_bytes - less

    gained = sim.run(2, job)[0]
    assert (gained > 0) == (stage == 3)  # nor are they gathered
    found, everything = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "all.safetensors")
    assert set(everything) - set(found) == {"second.weight", "second.bias"}
    assert set(everything) == set(net().state_dict())


def test_without_the_option_nothing_is_saved_at_stage_3_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def job(rank: int) -> bool:
        return start({"stage": 3}).save_16bit_model(tmp_path / "out")

    with caplog.at_level(logging.INFO, "zoo.engine"):
        assert sim.run(2, job) == [False, False]
    (record,) = caplog.records
    assert "zero_optimization.gather_16bit_weights_on_model_save is false. Set it to true" in record.message
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_the_former_name_of_the_option_means_the_same(tmp_path: Path) -> None:
    assert start({"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}).save_16bit_model(tmp_path)
    assert not start({"stage": 3, "stage3_gather_fp16_weights_on_model_save": False}).save_16bit_model(tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_log_says_that_an_fp32_model_is_saved_in_fp32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, precision: str
) -> None:
    engine = start({}, bf16={"enabled": precision == "bf16"})
    with caplog.at_level(logging.INFO, "zoo.engine"):
        engine.save_16bit_model(tmp_path)
    assert [r.message.split(":")[0] for r in caplog.records] == (
        ["save_16bit_model() saves float32 parameters as they are"] if precision == "fp32" else []
    )


def test_one_bucket_at_a_time_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(rank: int) -> None:
        engine = start(zero_of(3, "none", tmp_path))
        buckets = [b for b in engine.optimizer.buckets if b.partitioned]
        assert len(buckets) > 3
        seen = []
        wait = Executor.wait

        def watched(self: Executor, bucket: Bucket, *, exact: bool = False) -> None:
            seen.append(sum(b.parameters.live for b in buckets))
            wait(self, bucket, exact=exact)

        before = engine.optimizer.memory()
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "wait", watched)
            engine.save_16bit_model(tmp_path)
        assert len(seen) >= len(buckets)
        assert set(seen) == {0}
        assert engine.optimizer.memory() == before

    sim.run(1, job)


@pytest.mark.matrix
@pytest.mark.parametrize("at", ["begin", "middle", "end"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_0_that_cannot_write_is_an_error_everywhere_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, stage: int
) -> None:
    broken = False

    def breaking(works: Any) -> Any:
        def call(*args: Any) -> Any:
            if broken and (at != "middle" or args[1] == "second.weight"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return works(*args)

        return call

    def together(engine: Engine, what: str, value: bool) -> None:
        nonlocal broken
        engine.comm.agree(what, "")
        broken = value
        engine.comm.agree(what, "done")

    def job(rank: int) -> bytes:
        engine = start(zero_of(stage, "none", tmp_path))
        assert engine.save_16bit_model(tmp_path)
        old = (tmp_path / "model.safetensors").read_bytes()
        engine.train_batch()
        together(engine, "breaking", True)
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*rank 0.*No space left on device"):
            engine.save_16bit_model(tmp_path)
        together(engine, "mending", False)
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        assert (tmp_path / "model.safetensors").read_bytes() == old
        engine.train_batch()
        assert engine.save_16bit_model(tmp_path)
        together(engine, "reading", False)
        return (tmp_path / "model.safetensors").read_bytes()

    with monkeypatch.context() as patch:
        if at == "begin":
            patch.setattr("zoo.checkpointing.format.tensors.open", breaking(open), raising=False)
        elif at == "middle":
            patch.setattr(TensorFile, "put", breaking(TensorFile.put))
        else:
            patch.setattr("os.replace", breaking(os.replace))
        first, second = sim.run(2, job)
    assert first == second


@pytest.mark.parametrize(
    "name", ["a/b.safetensors", "../m.safetensors", ".safetensors", "model.onnx", ".bin", ".pt", "", 3]
)
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ValueError, match=r"it is the name of a file in the folder.*ends in '\.safetensors' or '\.bin'"):
        start({}).save_16bit_model(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_ask_for_different_things_are_told(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        with pytest.raises(CollectiveMismatchError, match="exclude_frozen_parameters"):
            start(zero_of(3, "none", tmp_path)).save_16bit_model(tmp_path, exclude_frozen_parameters=rank == 0)

    sim.run(2, job)


def test_a_file_takes_what_was_announced_once(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with TensorFile(path, {"a": (torch.float32, (2, 2)), "b": (torch.bool, ()), "c": (torch.int8, (0,))}, {}) as file:
        with pytest.raises(CheckpointError, match="'d' was not announced"):
            file.put("d", torch.zeros(1))
        with pytest.raises(CheckpointError, match=r"announced as torch.float32 of shape \(2, 2\) and is torch.float64"):
            file.put("a", torch.zeros(2, 2, dtype=torch.float64))
        file.put("b", torch.tensor(True))
        with pytest.raises(CheckpointError, match="'b' was put before"):
            file.put("b", torch.tensor(True))
        with pytest.raises(CheckpointError, match="would lack 2 tensors: a, c"):
            file.commit()
        file.put("c", torch.zeros(0, dtype=torch.int8))
        file.put("a", torch.arange(4.0).view(2, 2).t())
        assert not path.exists()
        file.commit()
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    found = load_file(path)
    assert torch.equal(found["a"], torch.arange(4.0).view(2, 2).t())
    assert found["b"].item() is True
    assert found["c"].shape == (0,)
    with TensorFile(path, {"a": (torch.float32, (1,))}, {}) as file:
        file.put("a", torch.zeros(1))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert set(load_file(path)) == {"a", "b", "c"}
