"""What ``deepspeed.initialize`` is given: configurations in every form, and data."""

from __future__ import annotations

import argparse
import base64
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset
from zoo.deepspeed.pipe import PipelineModule
from zoo.deepspeed.runtime.dataloader import DeepSpeedDataLoader

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.config import ConfigError
from zoo.data_efficiency import DataAnalyzer

DOCUMENT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}  # fmt: skip
HJSON = """{
  // the batch
  train_micro_batch_size_per_gpu: 2  # of one rank
  "optimizer": {"type": "SGD", "params": {"lr": 0.1,},},
}"""


def start(document: Any = DOCUMENT, **more: Any) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(model=nn.Linear(3, 3), config=document, **more)


# -- forms ------------------------------------------------------------------------------------------------------------


def test_files_with_comments(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(HJSON)
    coded = base64.urlsafe_b64encode(HJSON.encode()).decode()
    for form in (str(tmp_path / "ds.json"), coded):
        assert start(form)[0].train_micro_batch_size_per_gpu() == 2
        assert deepspeed.DeepSpeedConfig(form).optimizer_params == {"lr": 0.1}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"a": {"b": 1, "b": 2,}}', "given twice: b"),
        ("a.json", "[1, 2", "is no JSON"),
        ("a.json", "[1, 2]", "is a list; a configuration is an object"),
        ("a.json", "3", "is a int; a configuration is an object"),
        ("a.yaml", "", "is empty; a configuration is an object"),
        ("a.yaml", "- 1", "is a list; a configuration is an object"),
        ("a.yaml", "a: [", "is no YAML of"),
        ("a.json", b"\xff\xfe{}", "is not UTF-8"),
        ("a.yaml", b"a: \xe9", "is not UTF-8"),
        ("a.json", "[" * 100_000, "is nested too deeply to be a configuration, or contains itself"),
        ("a.yaml", "a: &a {b: *a}", "is nested too deeply to be a configuration, or contains itself"),
    ],
)
def test_unreadable_files(name: str, text: str | bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        start(str(tmp_path / name))


def test_a_document_that_contains_itself() -> None:
    section: dict[str, Any] = {}
    section["stage"] = section
    for read in (start, deepspeed.DeepSpeedConfig):
        with pytest.raises(ConfigError, match="is nested too deeply to be a configuration, or contains itself"):
            read({**DOCUMENT, "zero_optimization": section})


def test_two_configurations() -> None:
    args = argparse.Namespace(deepspeed_config="a.json")
    with pytest.raises(ConfigError, match="several configurations"):
        start(DOCUMENT, args=args)
    args = argparse.Namespace(deepspeed_config="a.json", deepscale_config="b.json")
    with pytest.raises(ConfigError, match="several configurations"):
        start(None, args=args)


def test_an_optimizer_by_name() -> None:
    with pytest.raises(ConfigError, match="names go into the configuration"):
        start(optimizer="AdamW")


# -- keys -------------------------------------------------------------------------------------------------------------


def test_auto_counts_as_not_given() -> None:
    document = {
        **DOCUMENT,
        "zero_optimization": {
            "stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
        },
        "fp16": {"enabled": "auto", "loss_scale": "auto"}, "bf16": {"enabled": "auto"},
        "activation_checkpointing": {"partition_activations": "auto"}, "csv_monitor": {"enabled": "auto"},
    }  # fmt: skip
    engine = start(document)[0]
    assert (engine.zero_optimization_stage(), engine.zero_reduce_bucket_size()) == (2, 2**20)
    assert not engine.fp16_enabled()


def test_zero_in_one_word() -> None:
    assert start({**DOCUMENT, "zero_optimization": True})[0].zero_optimization_stage() == 1
    assert start({**DOCUMENT, "zero_optimization": False})[0].zero_optimization_stage() == 0
    assert deepspeed.DeepSpeedConfig({**DOCUMENT, "zero_optimization": True}).zero_optimization_stage == 1


def test_offloading_without_a_stage(caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    with caplog.at_level(logging.WARNING, "zoo.deepspeed"):
        engine = start({**DOCUMENT, "zero_optimization": zero})[0]
    assert "zero_optimization.offload_optimizer without a stage of ZeRO" in caplog.text
    assert engine.zero_optimization_stage() == 0


def test_keys_about_the_process(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    try:
        with caplog.at_level(logging.WARNING, "zoo.deepspeed"):
            engine = start({**DOCUMENT, "log_level": "error", "disable_python_gc": True, "steps_per_print": 0})[0]
        assert caplog.text == ""
        assert (logger.level, gc.isenabled(), engine.log_level()) == (logging.ERROR, False, "error")
        assert engine.steps_per_print() is None
    finally:
        logger.setLevel(before)
        gc.enable()
    with pytest.raises(ValueError, match="is no level of the log"):
        start({**DOCUMENT, "log_level": "loud"})


def test_the_log_of_collectives_is_switched_on() -> None:
    def job(_: int) -> bool:
        start({**DOCUMENT, "comms_logger": {"enabled": True}})
        deepspeed.comm.all_reduce(torch.ones(2))
        return bool(deepspeed.comm.has_comm_data())

    try:
        assert all(sim.run(2, job))
    finally:
        deepspeed.comm.configure(enabled=False)
        deepspeed.comm.reset_log()


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_warm_up_to_the_optimizers_rate(kind: str) -> None:
    params = {"warmup_num_steps": 2, **({"warmup_max_lr": None} if kind == "WarmupLR" else {"total_num_steps": 9})}
    engine, *_, schedule = start({**DOCUMENT, "scheduler": {"type": kind, "params": params}})
    highest = 0.0
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        highest = max(highest, schedule.get_last_lr()[0])
    assert highest == (0.1 if kind == "WarmupLR" else 0.001)


# -- micro-batches that the program counts ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_that_the_program_counts(stage: int) -> None:
    """``managed_gradient_accumulation`` false: as many backwards as the program likes, each step() is a boundary."""

    def job(rank: int) -> Any:
        document = {**DOCUMENT, "managed_gradient_accumulation": False, "zero_optimization": {"stage": stage}}
        engine = start(document)[0]
        for step, count in enumerate((1, 3, 2)):
            for micro in range(count):
                assert not engine.is_gradient_accumulation_boundary()
                engine.backward(engine(sample(rank, step, micro)).square().mean())
            engine.step()
        with pytest.raises(AssertionError, match="there every step"):
            engine.set_gradient_accumulation_boundary(True)
        return engine.engine.module_state_dict()["weight"], engine.global_steps, engine.global_samples

    def sample(rank: int, step: int, micro: int) -> torch.Tensor:
        return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro))

    torch.manual_seed(0)
    alone = nn.Linear(3, 3)
    for step, count in enumerate((1, 3, 2)):
        losses = [alone(sample(rank, step, m)).square().mean() / 2 for rank in range(2) for m in range(count)]
        torch.stack(losses).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        assert norm > 0
        with torch.no_grad():
            for p in alone.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
        alone.zero_grad()
    for weight, steps, samples in sim.run(2, job):
        torch.testing.assert_close(weight, alone.weight.detach(), rtol=1e-6, atol=1e-7)
        assert (steps, samples) == (3, 2 * 2 * 3)  # as many a step as the configuration says


# -- data -------------------------------------------------------------------------------------------------------------


class Samples:
    """No class of torch, and a data set."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(5.0).view(5, 1))


def numbers(loader: Any) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in loader]


@pytest.mark.parametrize("drops", [False, True])
def test_batches_are_in_the_order_of_torchs_sampler(drops: bool) -> None:
    def job(rank: int) -> Any:
        sampler = DistributedSampler(Samples(), 2, rank)  # type: ignore[arg-type]
        engine, _, loader, _ = start({**DOCUMENT, "dataloader_drop_last": drops}, training_data=Samples())
        assert engine.training_dataloader is loader
        assert type(loader) is DeepSpeedDataLoader
        first = list(sampler)
        expected = [[float(i) for i in first[k : k + 2]] for k in range(0, len(first), 2)]
        if drops:
            expected = [batch for batch in expected if len(batch) == 2]
        assert numbers(loader) == numbers(loader) == expected
        assert len(loader) == len(expected)
        loader.data_sampler.set_epoch(3)
        assert numbers(loader) != expected
        return first

    first, second = sim.run(2, job)
    assert set(first) | set(second) == set(range(11))


def test_loaders_of_the_engine() -> None:
    def job(rank: int) -> None:
        engine = start(collate_fn=lambda samples: torch.stack(samples) + 100)[0]
        data = TensorDataset(torch.arange(8.0))
        loader = engine.deepspeed_io(data, 1, route="eval", collate_fn=lambda samples: samples[0][0].view(1))
        assert numbers(loader) == [[float(i)] for i in range(rank, 8, 2)]
        assert iter(loader) is not loader
        assert next(loader).item() == rank
        assert next(loader).item() == rank + 2
        assert numbers(engine.deepspeed_io(Samples(), data_sampler=[3, 1, 2])) == [[103.0, 101.0], [102.0]]
        assert numbers(engine.deepspeed_io(Stream(), 5)) == [[100.0, 101.0, 102.0, 103.0, 104.0]]
        with pytest.raises(ValueError, match="the data are a generator"):
            engine.deepspeed_io(x for x in ())
        with pytest.raises(ValueError, match="allowed are 'train', 'eval' and 'predict'"):
            engine.deepspeed_io(data, route="test")

    sim.run(2, job)


def test_loaders_of_a_curriculum_go_on_to_the_end_of_all_passes_by_either_door(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 gives 15 micro-batches of 2 of 28 samples, and of these 4 are allowed at difficulty 3."""
    samples: Any = [torch.tensor([float(i)]) for i in range(28)]
    DataAnalyzer(samples, {"number": int}, tmp_path).run()
    metric = {
        "index_to_sample_path": str(tmp_path / "number" / "index_to_sample.safetensors"),
        "index_to_metric_path": str(tmp_path / "number" / "index_to_metric.safetensors"),
        "difficulty_type": "value", "clustering_type": "schedule_based", "min_difficulty": 3, "max_difficulty": 27,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 1000, "difficulty_step": 1},
    }  # fmt: skip
    curriculum = {"enabled": True, "curriculum_metrics": {"number": metric}}
    sampling = {"enabled": True, "num_epochs": 1, "curriculum_learning": curriculum}
    document = {**DOCUMENT, "data_efficiency": {"enabled": True, "data_sampling": sampling}}
    for given in (samples, None):
        engine, _, loader, _ = start(document, training_data=given)
        loader = engine.deepspeed_io(samples) if given is None else loader
        found = numbers(loader)
        assert len(found) == len(loader) == 15
        assert {number for batch in found for number in batch} == {0.0, 1.0, 2.0, 3.0}
    assert {number for batch in numbers(engine.deepspeed_io(samples, route="eval")) for number in batch} == set(
        range(28)
    )


def test_loaders_are_taken_as_they_are() -> None:
    own = (torch.ones(2, 3) for _ in range(2))
    assert start(training_data=own)[2] is own
    with pytest.raises(ValueError, match="curriculum"):
        DeepSpeedDataLoader(Samples(), 2, False, 0, None, deepspeed_dataloader_config={"curriculum_learning": True})
    assert sorted(x for batch in numbers(DeepSpeedDataLoader(Samples(), 4, False, -1, None)) for x in batch) == [
        float(i) for i in range(11)
    ]


def test_a_pipelines_samples_come_in_order() -> None:
    def job(rank: int) -> None:
        seen: list[float] = []

        def watch(x: torch.Tensor) -> torch.Tensor:
            seen.extend(x[:, 0].tolist())
            return x

        model = PipelineModule([watch, nn.Linear(1, 1)], num_stages=1, loss_fn=lambda out, target: out.mean())
        data = [(torch.tensor([float(i)]), torch.tensor([0.0])) for i in range(8)]
        document = {**DOCUMENT, "gradient_accumulation_steps": 2}
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=document, training_data=data
        )
        for _ in range(3):
            engine.train_batch()
        once = [float(i) for i in range(rank, 8, 2)]
        assert seen == once * 3

    sim.run(2, job)


def test_one_process_without_a_launcher_has_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    deepspeed.initialize(model=nn.Linear(2, 1), config=config, dist_init_required=False)
    assert not dist.is_initialized()
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 1), config={**config, "zero_optimization": {"stage": 3}})
    assert (dist.get_world_size(), dist.get_rank(), deepspeed.comm.get_world_size()) == (1, 0, 1)
    dist.barrier()
    deepspeed.comm.barrier()
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value.tolist() == [1, 1]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    deepspeed.init_distributed()
    assert engine.global_steps == 1


def test_where_no_group_can_be_made_one_process_trains_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no network here")

    monkeypatch.setattr(dist, "init_process_group", fails)
    deepspeed.init_distributed()
    assert "gets no process group of its own: no network here" in caplog.text
    assert not dist.is_initialized()


def test_a_file_of_yaml_is_read_as_zoo_config_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "ds.yaml"
    text = (
        "train_micro_batch_size_per_gpu: 2\n"
        "optimizer: {type: AdamW, params: {lr: 1e-4, eps: 1e-8, betas: [9e-1, 0.95]}}\n"
        "zero_optimization: {stage: 2, reduce_bucket_size: 5e8, allgather_bucket_size: 2E+8}\n"
    )
    file.write_text(text)
    engine = start(str(file))[0]
    assert engine.optimizer.param_groups[0]["lr"] == 1e-4
    assert engine.config["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert engine.config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    file.write_text(text + "zero_optimization: {stage: 1}\n")
    with pytest.raises(ConfigError, match=r"key 'zero_optimization' is given twice.*remove one"):
        start(str(file))
    file.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="is no YAML of a configuration"):
        start(str(file))


def test_an_optimizer_without_options_has_its_own() -> None:
    engine = start({**DOCUMENT, "optimizer": {"type": "AdamW", "params": None}})[0]
    assert engine.optimizer.param_groups[0]["lr"] == 1e-3


def test_what_a_stage_does_not_look_at_is_told(caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 1, "zero_hpz_partition_size": 4, "zero_quantized_gradients": False, "offload_param": {}}
    start({**DOCUMENT, "zero_optimization": zero})
    assert "zero_optimization.zero_hpz_partition_size at stage 1: parameters are partitioned at stage 3" in caplog.text
    assert "zero_quantized_gradients" not in caplog.text
    assert "offload_param" not in caplog.text


@pytest.mark.matrix
@pytest.mark.parametrize(
    "published",
    [
        {"gradient_clipping": "auto", "prescale_gradients": "auto", "steps_per_print": "auto"},
        {"wall_clock_breakdown": "auto", "dump_state": "auto", "communication_data_type": "auto"},
        {"steps_per_print": "inf"},
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}}},
        {"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
        {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}},
        {"zero_optimization": {"stage": 1, "zero_quantized_gradients": True, "cpu_offload_param": True}},
        {"zero_optimization": {"stage": 0, "cpu_offload": True, "zero_quantized_nontrainable_weights": True}},
        {"zero_optimization": {"stage": 3, "save_muon_momentum_buffer_in_memory": True}},
        {"gradient_clipping": -1.0},
        {"scheduler": {"type": None}},
        {"scheduler": {}},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}, "legacy_fusion": False}},
        {"activation_checkpointing": {"number_checkpoints": 0}},
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": False}},
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": None}},
    ],
    ids=str,
)
def test_what_published_configurations_say_beside_trains(published: dict[str, Any]) -> None:
    def job(rank: int, beside: dict[str, Any]) -> list[torch.Tensor]:
        engine = start({**DOCUMENT, **beside})[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3) + rank).square().sum())
            engine.step()
        return list(engine.module_state_dict().values())

    plain = {"zero_optimization": {"stage": published.get("zero_optimization", {}).get("stage", 0)}}
    if published.get("gradient_clipping") == -1.0:
        plain["gradient_clipping"] = 0.0
    expected = sim.run(2, lambda rank: job(rank, plain))[0]
    found = sim.run(2, lambda rank: job(rank, published))[0]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: 'mean' on rank 0, 'sum' on rank 1"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation: True on rank 0, False on rank 1"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: 1 on rank 0, 2 on rank 1"),
    ],
    ids=str,
)
def test_configurations_that_differ_between_ranks_are_told(beside: dict[str, Any], told: str) -> None:
    def job(rank: int) -> None:
        with pytest.raises(CollectiveMismatchError, match=told):
            start({**DOCUMENT, **(beside if rank else {})})

    sim.run(2, job)
