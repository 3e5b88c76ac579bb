"""Configurations: the document, its sections, its keys."""

from __future__ import annotations

from zoo.deepspeed.adapters.configuration.keys import CONSTANTS, OPTIMIZERS
from zoo.deepspeed.modules import Name, Names, Table

_KEYS = "zoo.deepspeed.adapters.configuration.keys"
_SECTIONS = "zoo.deepspeed.adapters.configuration.sections"
_DOCUMENTS = "zoo.deepspeed.adapters.configuration.documents"

_MODEL: Names = {"DeepSpeedConfigModel": Name(f"{_SECTIONS}:DeepSpeedConfigModel", "no fields of former times.")}
_CONSTANTS: Names = {name: f"{_KEYS}:{name}" for name in (*CONSTANTS, "ValidationMode")}
_STAGES: Names = {"ZeroStageEnum": f"{_SECTIONS}:ZeroStageEnum"}
_OFFLOAD: Names = {
    "OffloadDeviceEnum": f"{_SECTIONS}:OffloadDeviceEnum",
    "DeepSpeedZeroOffloadOptimizerConfig": Name(
        f"{_SECTIONS}:DeepSpeedZeroOffloadOptimizerConfig",
        "pin_memory is False by default, as documented; without super_offload and cpuadam_cores_perc.",
    ),
    "DeepSpeedZeroOffloadParamConfig": Name(
        f"{_SECTIONS}:DeepSpeedZeroOffloadParamConfig", "pin_memory is False by default, as documented."
    ),
}
_LEAVES: Names = {"DeepSpeedZeroLeafModuleConfig": f"{_SECTIONS}:DeepSpeedZeroLeafModuleConfig"}
_PRECISION: Names = {name: f"{_SECTIONS}:{name}" for name in ("get_bfloat16_config", "get_float16_config")}
_READERS = (
    "get_checkpoint_params", "get_checkpoint_tag_validation_mode", "get_communication_data_type",
    "get_data_types_params", "get_dataloader_drop_last", "get_disable_allgather", "get_dump_state",
    "get_gradient_accumulation_steps", "get_gradient_clipping", "get_gradient_predivide_factor", "get_log_level",
    "get_memory_breakdown", "get_optimizer_gradient_clipping", "get_optimizer_name", "get_optimizer_params",
    "get_pipeline_config", "get_prescale_gradients", "get_scheduler_name", "get_scheduler_params",
    "get_steps_per_print", "get_train_batch_size", "get_train_micro_batch_size_per_gpu", "get_wall_clock_breakdown",
    "get_zero_allow_untested_optimizer", "get_zero_force_ds_cpu_optimizer",
)  # fmt: skip
_ONE_KEY: Names = {"get_scalar_param": f"{_SECTIONS}:get_scalar_param"}

_SETTINGS = "zoo.deepspeed.adapters.configuration.data_classes"


def _settings(names: str) -> dict[str, Name | str]:
    """Of parts that are not there: they can be made and read."""
    return {name: f"{_SETTINGS}:{name}" for name in names.split()}


_LINEAR = _settings("LoRAConfig QuantizationConfig")
_ROLLOUT = _settings("RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig")
_DRAWS = "zoo.deepspeed.adapters.inference.rollout"
_HYBRID = Name(
    f"{_DRAWS}:HybridEngineRollout",
    "answers are drawn by place with a seed of torch's generator; no graphs are captured; rows end on their own.",
)

_PROFILE: Names = {
    "FlopsProfiler": Name(
        "zoo.profiling:FlopsProfiler",
        "every operator is counted where it runs, backward too; FLOPs are those of products, elementwise operations "
        "are apart; nothing is patched, and modules get no attributes.",
    ),
    "get_model_profile": Name(
        "zoo.profiling:get_model_profile", "the model is called once more for seconds; its training mode is put back."
    ),
}
_NUMBERS: Names = {
    name: f"zoo.profiling.strings:{name}"
    for name in (
        "bytes_to_string", "duration_to_string", "flops_to_string", "macs_to_string", "number_to_string",
        "params_to_string",
    )
}  # fmt: skip
_OF_MODULES: Names = {
    name: Name(f"zoo.profiling.latest:{name}", "of the latest profile in which the module was.")
    for name in ("get_module_duration", "get_module_flops", "get_module_macs")
}

TABLE: Table = {
    "autotuning.utils": _settings("get_val_by_key set_val_by_key"),
    "compile.config": _settings("CompileConfig"),
    "linear": _LINEAR,
    "linear.config": _LINEAR,
    "profiling.config": _settings("DeepSpeedFlopsProfilerConfig"),
    "profiling.flops_profiler": _PROFILE,
    "profiling.flops_profiler.profiler": {**_PROFILE, **_NUMBERS, **_OF_MODULES},
    "runtime.rollout": {
        **_ROLLOUT, "HybridEngineRollout": _HYBRID, **_settings("HybridEngineRolloutConfig"),
        "build_rollout": Name(f"{_DRAWS}:build_rollout", "the engine is \"hybrid_engine\"."),
    },
    "runtime.rollout.base": _ROLLOUT,
    "runtime.rollout.hybrid_engine_rollout": {
        **_settings("HybridEngineRolloutConfig"), "HybridEngineRollout": _HYBRID,
    },
    "runtime.tensor_parallel": _settings("AUTOTP_MODE"),
    "runtime.tensor_parallel.config": _settings("AUTOTP_MODE TPConfig"),
    "": {
        "DeepSpeedConfig": Name(
            f"{_DOCUMENTS}:DeepSpeedConfig",
            "batch sizes that do not fit are a ConfigError; sections of what zoo does not have are no attributes.",
        )
    },
    "runtime.config": {
        "DeepSpeedConfig": Name(f"{_DOCUMENTS}:DeepSpeedConfig", "see deepspeed.DeepSpeedConfig."),
        "DeepSpeedConfigError": Name("zoo.config:ConfigError", "a ValueError."),
        "DeepSpeedConfigWriter": f"{_DOCUMENTS}:DeepSpeedConfigWriter",
        **{name: f"{_DOCUMENTS}:{name}" for name in _READERS},
        **{name: f"{_KEYS}:{name}" for name in OPTIMIZERS},
        **_CONSTANTS, **_STAGES, **_MODEL, **_PRECISION, **_ONE_KEY,
        "get_zero_config": f"{_SECTIONS}:get_zero_config",
        "get_monitor_config": "zoo.deepspeed.adapters.utilities.monitors:get_monitor_config",
    },
    "runtime.constants": _CONSTANTS,
    "runtime.config_utils": {
        **_MODEL, **_ONE_KEY,
        **{
            name: f"{_SECTIONS}:{name}"
            for name in (
                "dict_raise_error_on_duplicate_keys", "get_config_default", "get_dict_param", "get_list_param",
            )
        },
    },
    "runtime.precision_config": {
        **_PRECISION, **_MODEL,
        "DeepSpeedFP16Config": f"{_SECTIONS}:DeepSpeedFP16Config",
        "DeepSpeedBF16Config": f"{_SECTIONS}:DeepSpeedBF16Config",
    },
    "runtime.zero.config": {
        "DeepSpeedZeroConfig": Name(
            f"{_SECTIONS}:DeepSpeedZeroConfig", "has mics_shard_size as documented; no zenflow."
        ),
        "get_zero_config": f"{_SECTIONS}:get_zero_config",
        **_STAGES, **_OFFLOAD, **_LEAVES, **_MODEL,
    },
    "runtime.zero.offload_config": {
        **_OFFLOAD, **_MODEL, "OffloadStateTypeEnum": f"{_SECTIONS}:OffloadStateTypeEnum",
    },
    "runtime.zero.leaf_module_config": {
        **_LEAVES, **_MODEL,
        **{
            name: f"{_SECTIONS}:{name}"
            for name in (
                "DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
            )
        },
    },
}  # fmt: skip
