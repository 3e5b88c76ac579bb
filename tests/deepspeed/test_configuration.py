"""Documents, sections and keys under DeepSpeed's names."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from zoo.deepspeed.runtime import config, config_utils, constants, precision_config
from zoo.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from zoo.deepspeed.runtime.zero import config as zero_config
from zoo.deepspeed.runtime.zero import leaf_module_config, offload_config

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError
from zoo.deepspeed.adapters.configuration.keys import CONSTANTS, OPTIMIZERS

DOCUMENT: dict[str, Any] = {
    "train_batch_size": 24, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5, "steps_per_print": 7,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": 2.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 9},
    "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale": "auto"},
    "checkpoint": {"tag_validation": "Fail", "load_universal": True}, "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "bfp16", "log_level": "info", "csv_monitor": {"enabled": True},
    "activation_checkpointing": {"profile": True}, "aio": {"block_size": 4096},
}  # fmt: skip


def test_a_document_as_attributes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DOCUMENT), encoding="utf-8")
    coded = base64.urlsafe_b64encode(json.dumps(DOCUMENT).encode()).decode()
    for source in (DOCUMENT, str(tmp_path / "ds.json"), coded):
        found = DeepSpeedConfig(source)
        sizes = found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps
        assert sizes == (24, 8, 3)
        assert (found.gradient_clipping, found.steps_per_print, found.log_level) == (0.5, 7, "info")
        assert (found.optimizer_name, found.optimizer_params["lr"]) == ("adamw", 0.1)
        assert (found.scheduler_name, found.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 5})
        assert (found.zero_enabled, found.zero_optimization_stage) == (True, 3)
        assert found.zero_config.max_live_parameters == 9
        assert found.zero_config.offload_param.device == "cpu"
        assert (found.float16_config.enabled, found.bfloat16_config.enabled) == (True, False)
        assert (found.checkpoint_tag_validation_enabled, found.checkpoint_tag_validation_fail) == (True, True)
        assert (found.load_universal_checkpoint, found.use_node_local_storage) == (True, False)
        assert (found.communication_data_type, found.grad_accum_dtype) == (torch.bfloat16, "fp32")
        assert (found.torch_autocast_enabled, found.torch_autocast_dtype) == (False, None)
        assert found.monitor_config.csv_monitor.enabled
        assert found.activation_checkpointing_config.profile
        assert not found.activation_checkpointing_config.cpu_checkpointing
        assert (found.pipeline["stages"], found.aio_config) == ("auto", {"block_size": 4096})
        assert (found.world_size, found.global_rank, found.optimizer_legacy_fusion) == (1, 0, False)
    assert deepspeed.DeepSpeedConfig is DeepSpeedConfig
    with caplog.at_level("INFO", logger="zoo.deepspeed"):
        found.print("mine")
    assert "train_batch_size" in caplog.text


def test_what_is_not_said() -> None:
    found = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2})
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (2, 1)
    assert (found.gradient_clipping, found.steps_per_print, found.optimizer_name) == (1.0, None, None)
    assert (found.zero_enabled, found.scheduler_params, found.communication_data_type) == (False, None, None)


def test_whole_numbers_may_be_written_with_a_point_as_for_an_engine() -> None:
    document = {"train_micro_batch_size_per_gpu": 2.0, "gradient_accumulation_steps": 3.0}
    found = DeepSpeedConfig(document)
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (6, 3)
    assert type(found.train_micro_batch_size_per_gpu) is int
    for wrong in (2.5, float("nan"), float("inf"), True):
        with pytest.raises(ConfigError, match="whole number"):
            DeepSpeedConfig({**document, "gradient_accumulation_steps": wrong})


def test_ranks_of_a_document() -> None:
    def job(rank: int) -> Any:
        plain = DeepSpeedConfig({"train_batch_size": 8})
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 2)
        sequence = SimpleNamespace(get_sequence_parallel_world_size=lambda: 4)
        return (
            plain.global_rank, plain.world_size, plain.train_micro_batch_size_per_gpu,
            DeepSpeedConfig({"train_batch_size": 8}, mpu).train_micro_batch_size_per_gpu,
            DeepSpeedConfig({"train_batch_size": 8}, mpu=sequence).train_micro_batch_size_per_gpu,
            DeepSpeedConfig({"train_batch_size": 8, "sequence_parallel_size": 2}).train_micro_batch_size_per_gpu,
        )  # fmt: skip

    assert sim.run(4, job) == [(rank, 4, 2, 4, 8, 4) for rank in range(4)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_batch_size": None}, "give train_batch_size or train_micro_batch_size_per_gpu"),
        ({"train_micro_batch_size_per_gpu": 5}, "24"),
        ({"train_micro_batch_size_per_gpu": "two"}, "whole number"),
        ({"train_micro_batch_size_per_gpu": "2"}, "the product is 6, not 24"),
        ({"train_batch_size": 0}, "whole number"),
        ({"bf16": {"enabled": True}}, "both true"),
        ({"checkpoint": {"tag_validation": "perhaps"}}, "allowed are 'Warn', 'Ignore' and 'Fail'"),
        ({"communication_data_type": "int4"}, "allowed are 'fp32'"),
        ({"zero_optimization": {"stage": 7}}, "stage"),
        ({"zero_optimization": {"stge": 1}}, "stge"),
        ({"fp16": {"enabled": "perhaps"}}, "enabled"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DeepSpeedConfig({**DOCUMENT, **change})


def test_unreadable_documents() -> None:
    with pytest.raises(DeepSpeedConfigError, match="is no file"):
        DeepSpeedConfig("nowhere.json")
    with pytest.raises(ValueError, match=r"given twice: a\. Keep one"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=config_utils.dict_raise_error_on_duplicate_keys)
    assert config_utils.dict_raise_error_on_duplicate_keys([("a", 1)]) == {"a": 1}


def test_functions_of_one_key() -> None:
    assert config.get_gradient_clipping({}) == constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert config.get_gradient_clipping(DOCUMENT) == 0.5
    assert config.get_log_level({}) is constants.LOG_LEVEL_DEFAULT is None
    assert config.get_log_level(DOCUMENT) == "info"
    assert config.get_optimizer_gradient_clipping(DOCUMENT) == 2.0
    assert config.get_optimizer_gradient_clipping({}) is None
    assert config.get_zero_config(DOCUMENT).stage == 3
    assert config.get_monitor_config(DOCUMENT).csv_monitor.enabled
    assert config.get_pipeline_config({"pipeline": {"stages": 2}})["stages"] == 2
    assert config_utils.get_scalar_param({"a": 1}, "a", 2) == 1
    assert config_utils.get_list_param({}, "a", [2]) == [2]
    assert config_utils.get_dict_param({}, "a", {}) == {}
    for name in (n for n in dir(config) if n.startswith("get_")):
        if name not in ("get_scalar_param", "get_checkpoint_tag_validation_mode"):
            getattr(config, name)(DOCUMENT)
            getattr(config, name)({})


@pytest.mark.parametrize("name", [*CONSTANTS, *OPTIMIZERS])
def test_constants(name: str) -> None:
    assert getattr(config, name) == (CONSTANTS | OPTIMIZERS)[name]  # type: ignore[operator]
    assert (name in CONSTANTS) == hasattr(constants, name)
    if name.endswith("_DEFAULT"):
        return
    if name in CONSTANTS and f"{name}_DEFAULT" in CONSTANTS:
        assert isinstance(CONSTANTS[name], str)


def test_some_constants() -> None:
    assert (config.ADAM_OPTIMIZER, config.MUON_OPTIMIZER) == ("adam", "muon")
    assert config.ADAM_OPTIMIZER in config.DEEPSPEED_OPTIMIZERS
    assert constants.FP16_LOSS_SCALE_WINDOW == "loss_scale_window"
    assert constants.BFLOAT16_OLD == "bfloat16"
    assert constants.ROUTE_TRAIN == "train"
    assert constants.ValidationMode.FAIL == "FAIL"
    with pytest.raises(AttributeError, match="CURRICULUM"):
        _ = constants.CURRICULUM


# -- sections ---------------------------------------------------------------------------------------------------------


def test_the_section_of_zero() -> None:
    made = zero_config.DeepSpeedZeroConfig
    assert made().overlap_comm is False
    assert made(stage=3).overlap_comm is True
    assert made(stage=3, overlap_comm=False).overlap_comm is False
    assert made(stage=zero_config.ZeroStageEnum.gradients).stage == 2
    assert zero_config.ZeroStageEnum.weights is zero_config.ZeroStageEnum.max_stage
    assert made(prefetch_bucket_size=3).prefetch_bucket_size == 3
    assert made(stage3_prefetch_bucket_size=3, max_live_parameters="auto").prefetch_bucket_size == 3
    old = made(stage=2, cpu_offload=True, cpu_offload_use_pin_memory=False)
    assert (old.offload_optimizer.device, old.offload_optimizer.pin_memory) == ("cpu", False)
    assert made(stage=3, stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    changed = made(stage=3)
    changed.stage = 1
    assert changed.stage == 1
    for wrong in (
        {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        {"stage": 3, "compute_grad_norm": False},
        {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
        {"reduce_bucket_size": -1},
        {"nothing": 1},
    ):
        with pytest.raises(ValidationError):
            made(**wrong)
    assert zero_config.get_zero_config({}).stage == 0


def test_offload_and_leaves() -> None:
    optimizer = offload_config.DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path="/x", pipeline_read=True)
    assert (optimizer.device, optimizer.nvme_path, optimizer.pipeline) == ("nvme", Path("/x"), True)
    assert offload_config.OffloadDeviceEnum.nvme == optimizer.device
    parameters = zero_config.DeepSpeedZeroOffloadParamConfig()
    assert (parameters.device, parameters.max_in_cpu) == (offload_config.OffloadDeviceEnum.none, 10**9)
    assert offload_config.OffloadStateTypeEnum.lp_grads == "lp_grads"
    leaves = leaf_module_config.DeepSpeedZeroLeafModuleConfig(names="a", name_suffixes=["b", "b"])
    assert (leaves.names, leaves.name_suffixes) == (["a"], ["b"])
    assert leaves.classes == leaf_module_config.DEFAULT_LEAF_MODULE_CLASSES
    assert any(name.endswith("Qwen3MoeSparseMoeBlock") for name in leaves.classes)
    assert leaf_module_config.DEFAULT_LEAF_MODULE_NAMES == leaf_module_config.DEFAULT_LEAF_MODULE_NAME_SUFFIXES == []
    with pytest.raises(ValidationError):
        offload_config.DeepSpeedZeroOffloadOptimizerConfig(ratio=2)


def test_precision() -> None:
    half = precision_config.DeepSpeedFP16Config(enabled=True, initial_scale_power=3, hysteresis=4)
    assert half.initial_dynamic_scale() == 8
    assert half.dynamic_loss_scale_args() == {
        "init_scale": 8, "scale_window": 1000, "delayed_shift": 4, "consecutive_hysteresis": False, "min_scale": 1,
    }  # fmt: skip
    assert precision_config.get_float16_config({"fp16": {"enabled": True}}).enabled
    assert precision_config.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert isinstance(precision_config.get_bfloat16_config({}), precision_config.DeepSpeedBF16Config)


@pytest.mark.parametrize(
    "given",
    [  # what DeepSpeed 0.19.8 refuses
        *({"loss_scale": value} for value in (-1, float("inf"), float("nan"), True, False, [], {}, None, "much")),
        *(
            {"enabled": True, name: value}
            for name in ("loss_scale_window", "min_loss_scale")
            for value in (0, -1, True, float("inf"), float("nan"), "abc", None, 1.5)
        ),
        {"min_loss_scale": True}, {"hysteresis": 1.5},
    ],
)  # fmt: skip
def test_a_loss_scale_that_is_none_is_refused_where_it_is_given(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as told:
        precision_config.DeepSpeedFP16Config(**given)
    (value,) = (value for key, value in given.items() if key != "enabled")
    if isinstance(value, (list, dict, bool)):
        assert f"must be a number, and is {value!r}" in str(told.value)


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("value", [0, -1])
def test_what_a_dynamic_scale_alone_reads_may_be_anything_elsewhere(name: str, value: int) -> None:
    assert getattr(precision_config.DeepSpeedFP16Config(enabled=True, loss_scale=128, **{name: value}), name) == value
    assert getattr(precision_config.DeepSpeedFP16Config(enabled=False, **{name: value}), name) == value
    assert precision_config.DeepSpeedFP16Config(loss_scale="3", loss_scale_window="20").loss_scale == 3
    dynamic = precision_config.DeepSpeedFP16Config(enabled=True)
    with pytest.raises(ValidationError, match=f"{name} must be above 0 where the loss scale is dynamic"):
        setattr(dynamic, name, value)


def test_a_section_of_ones_own() -> None:
    class Mine(config_utils.DeepSpeedConfigModel):  # type: ignore[misc,name-defined]
        size: int = 3
        dtype: torch.dtype = torch.float16

    assert Mine(size="auto").size == 3
    assert Mine().model_dump()["dtype"] == "torch.float16"
    assert config_utils.get_config_default(Mine, "size") == 3
    with pytest.raises(AssertionError, match="'other' is not a field"):
        config_utils.get_config_default(Mine, "other")
    with pytest.raises(ValidationError):
        Mine(strict=True, size="auto")
    with pytest.raises(ValidationError):
        Mine(other=1)


def test_a_writer(tmp_path: Path) -> None:
    writer = config.DeepSpeedConfigWriter()
    writer.add_config("train_batch_size", 4)
    writer.write_config(str(tmp_path / "made.json"))
    again = config.DeepSpeedConfigWriter({"x": 1})
    again.load_config(str(tmp_path / "made.json"))
    assert again.data == {"train_batch_size": 4}
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        again.load_config(str(tmp_path / "absent.json"))


def test_options_beside_params_are_warned_of_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "torch_adam": True, "lr_of_mine": 3, "params": {"lr": 0.25}},
        "scheduler": {"type": "WarmupLR", "last_batch_iteration": -1, "params": {"warmup_num_steps": 2}},
    }
    engine = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=document)[0]
    assert engine.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    told = "\n".join(record.getMessage() for record in caplog.records)
    for key in ("optimizer.torch_adam", "optimizer.lr_of_mine", "scheduler.last_batch_iteration"):
        assert f"{key} says nothing there: options are in {key.split('.')[0]}.params" in told
    assert document["optimizer"]["torch_adam"], "what was given stays as it is"


@pytest.mark.parametrize(
    "wrong", [{"typ": "Adam"}, {"type": "Adam", "parms": {"lr": 1.0}}, {"type": "Adam", "param": {}}]
)
def test_a_key_that_is_nearly_one_of_a_component_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(DeepSpeedConfigError, match=r"optimizer\.(typ|parms|param)\b"):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, "optimizer": wrong})
