"""Signatures of DeepSpeed's names, written down: ``PYTHONPATH=python python -m tests.deepspeed.signatures`` in an
environment that has deepspeed writes signatures.json, which quick tests read.

The names are those below, those of ``names.txt`` and those of zoo's tables.

Of a function or class its parameters, of a constant its value, of a property "attribute"; None: that release lacks it.
"""

from __future__ import annotations

import functools
import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
DEFAULTS = (bool, int, float, str, type(None))
OF_THE_MACHINE = {"git_version_info:accelerator_name", "launcher.runner:DEEPSPEED_ENVIRONMENT_PATHS"}
"""Constants whose value says where this runs."""

# Module → names that programs use.
NAMES = {
    "": "initialize init_distributed add_config_arguments init_inference tp_model_init DeepSpeedConfigError OnDevice "
    "get_accelerator",
    "accelerator": "get_accelerator set_accelerator",
    "comm": "get_world_size get_rank barrier all_gather new_group all_reduce broadcast reduce reduce_scatter_fn "
    "is_initialized get_world_group inference_all_reduce all_gather_into_tensor reduce_scatter_tensor allgather_fn "
    "all_to_all_single all_to_all reduce_scatter gather scatter send recv isend irecv monitored_barrier P2POp "
    "broadcast_object_list all_gather_object all_reduce_coalesced all_gather_coalesced batch_isend_irecv log_summary "
    "configure init_distributed initialize_mesh_device get_local_rank get_global_rank get_all_ranks_from_group "
    "destroy_process_group is_available has_all_gather_into_tensor has_reduce_scatter_tensor",
    "zero": "Init GatheredParameters register_external_parameter MiCS_Init",
    "utils": "safe_get_full_grad safe_get_full_fp32_param safe_get_full_optimizer_state safe_get_local_grad "
    "safe_get_local_fp32_param safe_get_local_optimizer_state safe_set_full_grad safe_set_full_fp32_param "
    "safe_set_full_optimizer_state safe_set_local_grad safe_set_local_fp32_param safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized RepeatingLoader set_z3_leaf_modules get_z3_leaf_modules unset_z3_leaf_modules "
    "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix set_log_level_from_string log_dist instrument_w_nvtx "
    "OnDevice",
    "utils.z3_leaf_module": "z3_leaf_module z3_leaf_parameter set_z3_leaf_module",
    "utils.groups": "get_tensor_model_parallel_group get_tensor_model_parallel_rank get_data_parallel_group "
    "get_data_parallel_world_size get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size "
    "_get_data_parallel_group _get_sequence_parallel_group _get_sequence_parallel_world_size",
    "utils.zero_to_fp32": "load_state_dict_from_zero_checkpoint parse_model_states get_optim_files "
    "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint",
    "utils.timer": "trim_mean SynchronizedWallClockTimer ThroughputTimer",
    "utils.torch": "required_torch_version",
    "utils.numa": "parse_range_list",
    "utils.comms_logging": "CommsLogger",
    "ops.adam": "FusedAdam DeepSpeedCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "ops.lamb": "FusedLamb",
    "ops.op_builder": "CPUAdamBuilder FusedAdamBuilder AsyncIOBuilder CPUAdagradBuilder CPULionBuilder",
    "runtime.lr_schedules": "CYCLE_MAX_LR CYCLE_MIN_LR ONE_CYCLE OneCycle WARMUP_LR WarmupLR COS_MIN_RATIO "
    "CYCLE_FIRST_STEP_SIZE CYCLE_MAX_MOM CYCLE_MIN_MOM DECAY_LR_RATE DECAY_MOM_RATE DECAY_STEP_SIZE LRRangeTest "
    "LR_RANGE_TEST LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
    "TOTAL_NUM_STEPS VALID_LR_SCHEDULES WARMUP_COSINE_LR WARMUP_DECAY_LR WARMUP_LINEAR_RATE WARMUP_LOG_RATE "
    "WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS WARMUP_TYPE WarmupCosineLR WarmupDecayLR",
    "runtime.utils": "is_model_parallel_parameter see_memory_usage partition_balanced PartitionedTensor "
    "partition_uniform prefix_sum_inc CheckOverflow call_to_str clip_grad_norm_ get_weight_norm",
    "moe.layer": "MoE",
    "moe.utils": "split_params_into_different_moe_groups_for_optimizer is_moe_param",
    "moe.sharded_moe": "top1gating top2gating topkgating TUTEL_INSTALLED",
    "moe.ep_experts": "GroupedExperts",
    "moe.ep_repack": "repack_expert_weights",
    "moe.ep_router": "TokenChoiceTopKRouter",
    "pipe": "PipelineModule LayerSpec TiedLayerSpec",
    "checkpoint.utils": "clone_tensors_for_torch_save get_model_ckpt_name_for_rank",
    "runtime.activation_checkpointing.checkpointing": "configure checkpoint non_reentrant_checkpoint reset",
    "monitor.comet": "CometMonitor",
    "monitor.config": "DeepSpeedMonitorConfig",
    "monitor.csv_monitor": "csvMonitor",
    "monitor.tensorboard": "TensorBoardMonitor",
    "monitor.wandb": "WandbMonitor",
    "profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "runtime.engine": " ".join(
        f"DeepSpeedEngine.{name}"
        for name in (
            "forward", "backward", "step", "train_batch", "eval_batch", "destroy", "compile", "no_sync", "scale",
            "zero_grad", "train", "eval", "state_dict", "load_state_dict", "load_module_state_dict",
            "set_gradient_accumulation_boundary", "is_gradient_accumulation_boundary", "was_step_applied",
            "save_checkpoint", "load_checkpoint", "save_16bit_model", "empty_partition_cache", "get_global_grad_norm",
            "gradient_clipping", "fp16_enabled", "bfloat16_enabled", "zero_optimization_partition_weights",
            "zero_quantized_gradients", "coalesce_grad_reduction", "autotp_size", "train_micro_batch_size_per_gpu",
            "train_batch_size", "gradient_accumulation_steps", "zero_optimization_stage", "get_lr",
            "module_state_dict", "set_train_batch_size", "wall_clock_breakdown", "dynamic_loss_scale", "get_mom",
        )
    ),
}  # fmt: skip
ACCELERATOR = (
    "device_name current_device current_device_name set_device device_count is_available synchronize empty_cache "
    "communication_backend_name memory_allocated max_memory_allocated reset_peak_memory_stats memory_stats stream "
    "total_memory available_memory is_bf16_supported is_fp16_supported supported_dtypes manual_seed manual_seed_all "
    "random current_stream default_stream range_push range_pop pin_memory on_accelerator device create_op_builder "
    "get_op_builder is_synchronized_device resolves_data_dependency use_host_timers handles_memory_backpressure "
    "get_rng_state set_rng_state memory_reserved max_memory_reserved is_triton_supported lazy_call op_builder_dir "
    "get_compile_backend set_compile_backend initial_seed default_generator export_envs visible_devices_envs"
)


def parameters(value: Any) -> list[list[Any]]:
    """[name, kind, default] of each; a default that is no plain value, and one that is not there, by a sign."""

    def default(p: inspect.Parameter) -> Any:
        if p.default is p.empty:
            return "<none>"
        if p.name == "debug":
            return "<object>"  # the name of whoever imports the module
        return p.default if isinstance(p.default, DEFAULTS) else "<object>"

    return [[p.name, p.kind.name, default(p)] for p in inspect.signature(unwrapped(value)).parameters.values()]


def unwrapped(value: Any) -> Any:
    """What a decorator that tells nothing of the signature has wrapped."""
    for cell in getattr(value, "__closure__", None) or ():
        inner = cell.cell_contents
        if inspect.isfunction(inner) and list(inspect.signature(value).parameters) == ["args", "kwargs"]:
            return inner
    return value


def found(dotted: str) -> Any:
    """What a program gets of that name: a module, or what is in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[length:], module)
    raise AttributeError(dotted)


def described(root: str, path: str, name: str) -> Any:
    """Of one name; None where it is not there."""
    try:
        value = found(".".join(filter(None, [root, path, name])))
    except AttributeError:
        return None
    if inspect.isclass(value) and issubclass(value, Exception):
        return {"value": "exception"}
    if inspect.isfunction(value) or inspect.isclass(value) or inspect.ismethod(value):
        try:
            return {"parameters": parameters(value)}
        except (TypeError, ValueError):  # of C
            return {"value": "attribute"}
    plain = isinstance(value, DEFAULTS) or (isinstance(value, list) and all(isinstance(x, DEFAULTS) for x in value))
    return {"value": value if plain and f"{path}:{name}" not in OF_THE_MACHINE else "attribute"}


def keys() -> list[str]:
    """ "module:name" of all names, each once; the module is the longest that the tables know."""
    from tests.deepspeed.names import listed

    from zoo.deepspeed.modules import Refused
    from zoo.deepspeed.surface import TABLE

    every = [f"{path}:{name}" for path, names in NAMES.items() for name in names.split()]
    for one in listed():
        parts = one.path.split(".")
        length = max((n for n in range(len(parts)) if ".".join(parts[:n]) in TABLE), default=0)
        every.append(f"{'.'.join(parts[:length])}:{'.'.join(parts[length:])}")
    tables = [(path, names) for path, names in TABLE.items() if not isinstance(names, str)]
    every += [f"{path}:{name}" for path, names in tables for name in names if not isinstance(names[name], Refused)]
    return [key for key in dict.fromkeys(every) if not key.endswith(":")]


def dump(root: str) -> dict[str, Any]:
    """All of them."""
    every = {key: described(root, *key.split(":")) for key in keys()}
    here = import_module(f"{root}.accelerator").get_accelerator()
    for name in ACCELERATOR.split():
        method = getattr(here, name, None)
        every[f"accelerator:get_accelerator().{name}"] = method and {"parameters": parameters(method)}
    return every


if __name__ == "__main__":
    import deepspeed

    rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in dump("deepspeed").items()]  # a name a line
    FILE.write_text(f'{{"version": "{deepspeed.__version__}", "names": {{\n' + ",\n".join(rows) + "\n}}\n")
