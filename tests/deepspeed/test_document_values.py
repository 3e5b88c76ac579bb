"""Values of a document as DeepSpeed takes them, and what a document says of everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo.deepspeed.runtime.config import DeepSpeedConfig

from zoo.config import ConfigError, load
from zoo.deepspeed.adapters.configuration.translation import translated

YES: tuple[Any, ...] = (True, 1, 1.0, "1", "true", "True", "TRUE", "yes", "on", "t", "y")
NO: tuple[Any, ...] = (False, 0, 0.0, "0", "false", "False", "no", "off", "f", "n")


@pytest.mark.parametrize(("values", "meant"), [(YES, True), (NO, False)])
def test_what_deepspeed_takes_for_true_and_false(values: tuple[Any, ...], meant: bool) -> None:
    for value in values:
        document = {
            "train_batch_size": 1, "wall_clock_breakdown": value, "bf16": {"enabled": value},
            "optimizer": {"type": "Adam", "params": {"adam_w_mode": value, "bias_correction": value}},
            "zero_allow_untested_optimizer": value, "flops_profiler": {"enabled": 0, "detailed": value},
            "zero_optimization": {
                "stage": 2, "overlap_comm": value, "allgather_partitions": value, "ignore_unused_parameters": value,
                "offload_optimizer": {"device": "cpu", "pin_memory": value},
                "stage3_gather_16bit_weights_on_model_save": value,
            },
        }  # fmt: skip
        config = load(translated(document))
        found = config.zero_optimization
        assert (config.bf16.enabled, config.wall_clock_breakdown, found.overlap_comm) == (meant, meant, meant)
        assert found.offload_optimizer.pin_memory is found.gather_16bit_weights_on_model_save is meant
        assert config.optimizer is not None
        assert config.optimizer.params == {"adam_w_mode": meant, "bias_correction": meant}


@pytest.mark.parametrize("value", [2, -1, "maybe", "", [], "1.0", float("nan")])
def test_what_is_neither_true_nor_false(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.overlap_comm"):
        load(translated({"train_batch_size": 1, "zero_optimization": {"stage": 2, "overlap_comm": value}}))
    with pytest.raises(ConfigError, match=r"bf16\.enabled"):
        load(translated({"train_batch_size": 1, "bf16": {"enabled": value}}))


def test_digits_are_numbers_where_numbers_are_meant() -> None:
    document = {
        "train_batch_size": "4", "gradient_clipping": "0.5", "fp16": {"enabled": "true", "initial_scale_power": "8"},
        "zero_optimization": {"stage": "1", "reduce_bucket_size": "5e8", "sub_group_size": "300"},
        "optimizer": {"type": "Adam", "params": {"lr": "1e-3"}},
    }  # fmt: skip
    config = load(translated(document))
    assert (config.train_batch_size, config.gradient_clipping, config.fp16.initial_scale_power) == (4, 0.5, 8)
    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.sub_group_size) == (1, 500_000_000, 300)
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 0.001
    for bad in ("many", "1.5", "9" * 5000 + ".5"):
        with pytest.raises(ConfigError, match=r"zero_optimization\.sub_group_size"):
            load(translated({"train_batch_size": 1, "zero_optimization": {"stage": 1, "sub_group_size": bad}}))


def test_what_a_document_says_of_everything_is_an_attribute() -> None:
    found = DeepSpeedConfig({"train_batch_size": 1})
    wanted = {  # those of the real package
        "managed_gradient_accumulation": True, "disable_python_gc": False, "gradient_allreduce_op": "mean",
        "seq_parallel_communication_data_type": torch.float32, "data_efficiency_enabled": False, "buffer_dtype": None,
        "param_dtype": None, "keep_in_fp32_modules": "auto", "use_data_before_expert_parallel_": False,
        "checkpoint_parallel_write_pipeline": False, "torch_autocast_lower_precision_safe_modules": None,
    }  # fmt: skip
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert vars(found.flops_profiler_config) == {
        "enabled": False, "recompute_fwd_factor": 0.0, "profile_step": 1, "module_depth": -1, "top_modules": 1,
        "detailed": True, "output_file": None,
    }  # fmt: skip
    assert (found.hybrid_engine.enabled, found.hybrid_engine.max_out_tokens) == (False, 512)
    assert (found.autotuning_config.enabled, found.autotuning_config.tuner_num_trials) == (False, 50)
    assert (found.timers_config.enabled, found.timers_config.synchronized) == (True, True)
    assert (found.compile_config.deepcompile, found.compile_config.double_buffer) == (False, True)
    assert (found.tensor_parallel_config.autotp_size, found.expert_parallel_config.autoep_size) == (0, 1)
    given = DeepSpeedConfig(
        {
            "train_batch_size": 1,
            "flops_profiler": {"profile_step": 7},
            "data_efficiency": {"enabled": True, "seed": 3},
            "timers": {"throughput": {"synchronized": False}},
            "gradient_allreduce_op": "SUM",
            "checkpoint": {"parallel_write": {"pipeline_stage": True}},
            "data_types": {"buffer_dtype": "bf16"},
        }
    )
    assert (given.flops_profiler_config.profile_step, given.data_efficiency_enabled) == (7, True)
    assert (given.timers_config.synchronized, given.gradient_allreduce_op) == (False, "sum")
    assert (given.checkpoint_parallel_write_pipeline, given.buffer_dtype) == (True, "bf16")
    with pytest.raises(ConfigError, match="Invalid gradient_allreduce_op 'max'"):
        DeepSpeedConfig({"train_batch_size": 1, "gradient_allreduce_op": "max"})
