"""Communication, devices, helpers, schedules, optimizers, monitors, and what programs read of the launcher."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Refused, Table

_ADAPTERS = "zoo.deepspeed.adapters"
_PASSES = f"{_ADAPTERS}.utilities.compile_passes"


def _contracts(**names: str) -> dict[str, Name | str]:
    differs = "compiled graphs are made by zoo's passes; those of DeepSpeed are names with contracts."
    return {name: Name(f"{_PASSES}:{at}", differs) for name, at in names.items()}


def _of(module: str, *names: str, differs: str = "") -> dict[str, Name | str]:
    return {name: Name(f"{_ADAPTERS}.{module}:{name}", differs) for name in names}


_ACCESS = _of(
    "zero.access",
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
    differs="a value at every stage, 0 and fp32 included, where DeepSpeed gives None.",
)  # fmt: skip
_ACCESS |= _of(
    "zero.access",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_local_fp32_param",
    "safe_set_local_grad", "safe_set_local_optimizer_state",
    differs="a rank's elements are those in its chunk of a bucket: of a small parameter most ranks have none.",
)  # fmt: skip
_ACCESS |= _of("zero.access", "safe_update_full_grad_vectorized")
_ACCESS |= {
    name: Name(f"zoo.zero:{name}", "an error where there is nothing to set, where DeepSpeed does nothing.")
    for name in ("safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state")
}
_LEAVES = _of(
    "utilities.leaves",
    "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter",
    differs="a declared unit of zoo.zero; to be set before initialize.",
)  # fmt: skip
_LOGS = _of(
    "utilities.logs",
    "LoggerFactory", "get_current_level", "get_dist_msg", "get_log_level_from_string", "log_dist", "log_dist_once",
    "log_levels", "logger", "print_configuration", "print_dist", "print_json_dist", "set_log_level_from_string",
    "should_log_le", "warning_once",
)  # fmt: skip
_WEIGHTS = _of(
    "checkpoints.weights",
    "convert_zero_checkpoint_to_fp32_state_dict", "convert_zero_checkpoint_to_state_dict", "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint", "get_model_state_file", "get_model_state_files", "get_optim_files",
    "load_state_dict_from_zero_checkpoint", "natural_keys", "parse_model_states", "zero_model_state",
)  # fmt: skip
_ACCELERATORS = _of("accelerator.base", "DeepSpeedAccelerator") | _of(
    "accelerator.real_accelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"
)
_SCHEDULES = _of(
    "optimizers.schedules",
    "CYCLE_FIRST_STAIR_COUNT", "CYCLE_FIRST_STEP_SIZE", "CYCLE_MAX_LR", "CYCLE_MAX_MOM", "CYCLE_MIN_LR",
    "CYCLE_MIN_MOM", "CYCLE_SECOND_STAIR_COUNT", "CYCLE_SECOND_STEP_SIZE", "COS_MIN_RATIO", "DECAY_LR_RATE",
    "DECAY_MOM_RATE", "DECAY_STEP_SIZE", "EDGE_VALUE", "LR_RANGE_TEST", "LR_RANGE_TEST_MIN_LR",
    "LR_RANGE_TEST_STAIRCASE", "LR_RANGE_TEST_STEP_RATE", "LR_RANGE_TEST_STEP_SIZE", "LR_SCHEDULE", "MID_VALUE",
    "ONE_CYCLE", "TOTAL_NUM_STEPS", "VALID_LR_SCHEDULES", "WARMUP_COSINE_LR", "WARMUP_DECAY_LR", "WARMUP_LINEAR_RATE",
    "WARMUP_LOG_RATE", "WARMUP_LR", "WARMUP_MAX_LR", "WARMUP_MIN_LR", "WARMUP_MIN_RATIO", "WARMUP_NUM_STEPS",
    "WARMUP_TYPE", "OneCycle", "add_tuning_arguments", "get_torch_optimizer",
    "get_config_from_args", "get_lr_from_config",
)  # fmt: skip
_SCHEDULES |= {
    name: f"zoo.lr_schedules:{name}" for name in ("LRRangeTest", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
}
_RUNTIME: Names = _of(
    "utilities.runtime_utils",
    "CheckOverflow", "PartitionedTensor", "align_dense_tensors", "call_to_str", "clip_grad_norm_",
    "clip_tensors_by_global_norm", "copy_to_device", "empty_cache", "ensure_directory_exists",
    "filter_empty_parameters", "get_global_norm", "get_global_norm_of_tensors", "get_inactive_params",
    "get_ma_status", "get_only_unique_item", "get_tensor_bytes", "get_weight_norm", "is_model_parallel_parameter",
    "is_optimized_parameter", "move_to_device", "noop_context", "noop_decorator", "partition_balanced",
    "partition_uniform", "prefix_sum_inc", "see_memory_usage", "set_random_seed",
)  # fmt: skip
_GROUPS = _of(
    "communication.groups",
    "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size", "get_model_parallel_group",
    "get_model_parallel_rank", "get_model_parallel_world_size", "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank", "get_tensor_model_parallel_src_rank", "get_tensor_model_parallel_world_size",
    "initialize", "set_tensor_model_parallel_rank", "set_tensor_model_parallel_world_size",
)  # fmt: skip
_BWC = _of(
    "utilities.helpers",
    "bwc_pipeline_parallel_group", "bwc_pipeline_parallel_world_size", "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank", "bwc_tensor_model_parallel_world_size",
)  # fmt: skip
_PATHS = _of("utilities.helpers", "recursive_getattr", "recursive_setattr")
_BUILDERS = _of(
    "utilities.op_builders",
    "AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "FusedAdamBuilder", "FusedLambBuilder",
    "FusedLionBuilder", "OpBuilder",
    differs="load() gives modules of zoo; references run where nothing can be compiled.",
)  # fmt: skip
_FILES = {
    "async_io": "AsyncIOBuilder", "fused_adam": "FusedAdamBuilder", "fused_lamb": "FusedLambBuilder",
    "fused_lion": "FusedLionBuilder",
}  # fmt: skip
_WITHOUT = "is_compatible() is False, load() is refused."
_BUILDERS |= _of(
    "utilities.op_builders",
    "DeepCompileBuilder", "EvoformerAttnBuilder", "FPQuantizerBuilder", "FlashAttentionBuilder", "GDSBuilder",
    "InferenceBuilder", "InferenceCoreBuilder", "InferenceCutlassBuilder", "NotImplementedBuilder", "PinMemoryBuilder",
    "QuantizerBuilder", "RaggedOpsBuilder", "RaggedUtilsBuilder", "RandomLTDBuilder", "SparseAttnBuilder",
    "SpatialInferenceBuilder", "StochasticTransformerBuilder", "TransformerBuilder", "UtilsBuilder",
    differs=_WITHOUT,
)  # fmt: skip
_ELASTICITY = _of(
    "utilities.elasticity",
    "ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize",
    "elasticity_enabled", "ensure_immutable_elastic_config",
) | _of(
    "utilities.elasticity", "compute_elastic_config",
    differs="no batch is above max_train_batch_size, and a micro-batch of None or an empty list is an error.",
)  # fmt: skip
_DEVICES = "on CPU and GPU alike; parameters of 16 bits have fp32 masters."
_ADAM = {name: _of("optimizers.ops", name, differs=_DEVICES) for name in ("DeepSpeedCPUAdam", "FusedAdam")}
_TIMERS = _of(
    "utilities.timers",
    "BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER", "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "FORWARD_GLOBAL_TIMER", "FORWARD_MICRO_TIMER",
    "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER",
)  # fmt: skip
_TIMERS |= _of("utilities.timers", "NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean")
_CHECKPOINTING: Names = {
    **{
        name: f"zoo.activation_checkpointing:{name}"
        for name in (
            "CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "get_cuda_rng_tracker",
            "is_configured", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed",
            "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers",
        )
    },
    **_of(
        "utilities.rng",
        "_CUDA_RNG_STATE_TRACKER", "_MODEL_PARALLEL_RNG_TRACKER_NAME", "_set_cuda_rng_state", "detach_variable",
        "extract_tensors", "merge_tensors",
    ),
}  # fmt: skip
_WHOLE_GROUPS = "the optimizer's buffers are zoo.zero's; its all-gathers are the engine's own."

_LAUNCHER = "zoo.deepspeed.adapters.utilities.launcher"
_NO_LAUNCHER = "processes on a host are started by the agent of `zoo launch`, which the command deepspeed runs."

_LAUNCHERS: Names = {
    name: f"{_LAUNCHER}:{name}"
    for name in (
        "IMPI_LAUNCHER", "MPICH_LAUNCHER", "MVAPICH_LAUNCHER", "OPENMPI_LAUNCHER", "PDSH_LAUNCHER",
        "PDSH_MAX_FAN_OUT", "SLURM_LAUNCHER",
    )
}  # fmt: skip
_RUNNERS: Names = _of(
    "utilities.runners", "IMPIRunner", "MPICHRunner", "MVAPICHRunner", "OpenMPIRunner", "PDSHRunner", "SlurmRunner"
)

_TUNER = "zoo.deepspeed.adapters.utilities.tuner"
_AUTOTUNER: Names = {
    "Autotuner": Name(
        f"{_TUNER}:Autotuner", "tune() is `zoo tune`: jobs of zoo train on this machine, the batch of a step kept."
    )
}

TABLE: Table = {
    "compile.passes.contract": _of(
        "utilities.compile_passes",
        "PassContract", "PassContractError", "_pass_contracts", "get_pass_contract", "register_pass_contract",
        "validate_schedule",
    ),
    "compile.passes.zero_1_and_2_compile": _contracts(
        NAME_Z1="ZERO1", NAME_Z2="ZERO2", CONTRACT_Z1="CONTRACT_Z1", CONTRACT_Z2="CONTRACT_Z2"
    ),
    "compile.passes.zero3_compile": _contracts(NAME="ZERO3", CONTRACT="CONTRACT_Z3"),
    "compile.passes.prefetch": _contracts(NAME="PREFETCH", CONTRACT="CONTRACT_PREFETCH"),
    "compile.passes.selective_gather": _contracts(NAME="SELECTIVE_GATHER", CONTRACT="CONTRACT_SELECTIVE_GATHER"),
    "compile.passes.offload_parameters": _contracts(NAME="OFFLOAD_PARAMETERS", CONTRACT="CONTRACT_OFFLOAD_PARAMETERS"),
    "compile.passes.offload_adam_states": _contracts(
        NAME="OFFLOAD", NAME_SYNC="OFFLOAD_SYNC", NAME_FOR_INIT="OFFLOAD_FOR_INIT", CONTRACT="CONTRACT_OFFLOAD",
        CONTRACT_SYNC="CONTRACT_OFFLOAD_SYNC", CONTRACT_FOR_INIT="CONTRACT_OFFLOAD_FOR_INIT",
    ),
    "compile.backend": {
        "register_compile_pass": Name(f"{_PASSES}:register_compile_pass", "a pass is called with a graph and a plan.")
    },
    "autotuning": _AUTOTUNER,
    "autotuning.autotuner": _AUTOTUNER,
    "autotuning.config": {"DeepSpeedAutotuningConfig": f"{_TUNER}:DeepSpeedAutotuningConfig"},
    "autotuning.scheduler": {
        "Node": f"{_TUNER}:Node",
        "ResourceManager": Name(f"{_TUNER}:ResourceManager", "it has hosts and arguments, and runs nothing itself."),
    },
    "launcher": {},
    "launcher.constants": {**_LAUNCHERS, "MVAPICH_TMP_HOSTFILE": f"{_LAUNCHER}:MVAPICH_TMP_HOSTFILE"},
    "launcher.launch": {"main": Refused(_NO_LAUNCHER, function=True)},
    "launcher.launcher_helper": {"main": Refused(_NO_LAUNCHER, function=True)},
    "launcher.multinode_runner": {**_of("utilities.runners", "MultiNodeRunner"), **_RUNNERS},
    "launcher.runner": {
        **_LAUNCHERS,
        **_RUNNERS,
        **{
            name: f"{_LAUNCHER}:{name}"
            for name in (
                "DEEPSPEED_ENVIRONMENT_NAME", "DEEPSPEED_ENVIRONMENT_PATHS", "DLTS_HOSTFILE", "EXCLUDE_ENVS",
                "EXPORT_ENVS", "_parse_hostfile", "apply_num_nodes_and_gpus", "encode_world_info", "fetch_hostfile",
                "parse_args", "parse_inclusion_exclusion", "parse_node_config", "parse_node_config_list",
                "parse_resource_filter",
            )
        },
        "TORCH_DISTRIBUTED_DEFAULT_PORT": "zoo.comm.launch:PORT",
        "get_accelerator": "zoo.deepspeed.adapters.accelerator.real_accelerator:get_accelerator",
        "logger": "zoo.deepspeed.adapters.utilities.logs:logger",
        "main": Name(f"{_LAUNCHER}:main", "starts the agents of zoo.launch, over ssh where DeepSpeed uses pdsh."),
    },
    "": {
        **_of("accelerator.real_accelerator", "get_accelerator"),
        **_of("utilities.logs", "log_dist", "logger"),
        **_of("utilities.helpers", "OnDevice"),
    },
    "env_report": {
        **_of(
            "utilities.environment",
            "cli_main", "debug_report", "main",
            differs="prints what zoo doctor finds as well: what is missing, and the command that adds it.",
        ),
        **_of(
            "utilities.environment",
            "get_shm_size", "human_readable_size", "nvcc_version", "op_report", "parse_arguments",
        ),
    },
    "elasticity": _ELASTICITY,
    "elasticity.elasticity": _ELASTICITY,
    "elasticity.config": {name: _ELASTICITY[name] for name in _ELASTICITY if name.startswith("Elasticity")},
    "git_version_info": {
        **_of("utilities.build_info", "accelerator_name", "git_branch", "git_hash", "torch_info", "version"),
        **_of(
            "utilities.build_info", "compatible_ops", "installed_ops",
            differs="of the operations that zoo has builders for.",
        ),
    },
    "accelerator": _ACCELERATORS,
    "accelerator.real_accelerator": _ACCELERATORS | _of("accelerator.real_accelerator", "SUPPORTED_ACCELERATOR_LIST"),
    "accelerator.abstract_accelerator": _of("accelerator.base", "DeepSpeedAccelerator"),
    "accelerator.cpu_accelerator": _of("accelerator.cpu", "CPU_Accelerator"),
    "accelerator.cuda_accelerator": _of("accelerator.cuda", "CUDA_Accelerator"),
    "comm": f"{_ADAPTERS}.communication.comm",
    "comm.comm": f"{_ADAPTERS}.communication.comm",
    "utils": {
        **_ACCESS, **_LEAVES,
        **_of("utilities.logs", "logger", "log_dist", "log_dist_once", "set_log_level_from_string", "warning_once"),
        **_of("utilities.helpers", "OnDevice", "instrument_w_nvtx"),
        **_GROUPS, **_BWC, **_PATHS,
        **_of("zero.access", "DeprecatedException"), **_of("accelerator.real_accelerator", "get_accelerator"),
        "dist": "zoo.deepspeed.comm",
        "RepeatingLoader": "zoo.engine:RepeatingLoader",
    },
    "utils.tensor_fragment": _ACCESS,
    "utils.z3_leaf_module": {**_LEAVES, **_of("utilities.leaves", "apply_zero_leaf_module_config")},
    "utils.groups": f"{_ADAPTERS}.communication.groups",
    "utils.logging": _LOGS,
    "utils.bwc": _BWC,
    "utils.exceptions": _of("zero.access", "DeprecatedException"),
    "utils.module_utils": _PATHS,
    "utils.types": _of("utilities.helpers", "ActivationFuncType", "GATED_ACTIVATION_TYPES", "NormType"),
    "utils.nvtx": _of("utilities.helpers", "instrument_w_nvtx"),
    "utils.init_on_device": _of("utilities.helpers", "OnDevice"),
    "utils.numa": _of("utilities.helpers", "parse_range", "parse_range_list"),
    "utils.torch": _of("utilities.versions", "register_grad_hook", "required_torch_version"),
    "utils.timer": _TIMERS,
    "utils.comms_logging": {
        **_of(
            "communication.comms_log", "CommsLogger",
            differs="speeds are of the group's ranks, DeepSpeed's of all; operations with handles are waited for; "
            "stragglers are told of what all ranks have counted alike.",
        ),
        **_of("communication.comms_log", "calc_bw_log", "convert_size", "get_caller_func"),
    },
    "comm.config": {
        **_of("communication.comms_log", "CommsLoggerConfig"),
        **_of(
            "communication.comms_log", "DeepSpeedCommsConfig",
            differs='"enabled": false in the section leaves the log off, as documented; DeepSpeed switches it on.',
        ),
    },
    "ops": _of("utilities.op_builders", "__compatible_ops__", differs="of the operations that zoo has builders for."),
    "ops.op_builder": _BUILDERS,
    "ops.op_builder.builder": _of("utilities.op_builders", "CUDAOpBuilder", "OpBuilder"),
    **{f"ops.op_builder.{name}": {builder: _BUILDERS[builder]} for name, builder in _FILES.items()},
    "ops.aio": _of("utilities.op_builders", "AsyncIOBuilder"),
    "ops.compile": _of("utilities.op_builders", "DeepCompileBuilder", differs=_WITHOUT),
    "ops.triton_ops": _of(
        "utilities.versions", "is_triton_available", differs="it is not: there are no kernels in Triton."
    ),
    "ops.op_builder.evoformer_attn": _of("utilities.op_builders", "EvoformerAttnBuilder", differs=_WITHOUT),
    "ops.gds": _of("utilities.op_builders", "GDSBuilder", differs=_WITHOUT),
    "ops.pin_memory": _of("utilities.op_builders", "PinMemoryBuilder", differs=_WITHOUT),
    "runtime.compiler": _of(
        "utilities.compiler",
        "compiled_autograd", "disable", "dummy_decorator", "enable", "is_compile_supported", "is_compiling",
        "lazy_disable",
    ),
    "utils.zero_to_fp32": _WEIGHTS,
    "ops.adam.multi_tensor_apply": {
        "MultiTensorApply": Refused("zoo.optim's kernels take lists of tensors themselves.")
    },
    "ops.adam": _ADAM["DeepSpeedCPUAdam"] | _ADAM["FusedAdam"],
    "ops.adam.cpu_adam": _ADAM["DeepSpeedCPUAdam"],
    "ops.adam.fused_adam": _ADAM["FusedAdam"],
    "ops.adagrad": _of("optimizers.ops", "DeepSpeedCPUAdagrad", differs=_DEVICES),
    "ops.lion": _of("optimizers.ops", "DeepSpeedCPULion", "FusedLion", differs=_DEVICES),
    "ops.lamb": _of("optimizers.ops", "FusedLamb", differs=f"{_DEVICES} max_grad_norm is refused."),
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.utils": {
        **_RUNTIME,
        "all_gather_dp_groups": Refused(_WHOLE_GROUPS, function=True),
        "all_gather_into_tensor_dp_groups": Refused(_WHOLE_GROUPS, function=True),
    },
    "runtime.dataloader": {
        "RepeatingLoader": "zoo.engine:RepeatingLoader",
        "DeepSpeedDataLoader": Name(
            f"{_ADAPTERS}.root.data:DeepSpeedDataLoader",
            "num_local_io_workers is 0 unless given; a curriculum is refused (section data_efficiency).",
        ),
    },
    "monitor.config": _of(
        "utilities.monitors",
        "CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig", "get_monitor_config",
    ),
    "monitor.monitor": _of(
        "utilities.monitors",
        "CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor",
    ),
    "monitor.csv_monitor": _of("utilities.monitors", "csvMonitor"),
    "monitor.tensorboard": _of("utilities.monitors", "TensorBoardMonitor"),
    "monitor.wandb": _of("utilities.monitors", "WandbMonitor"),
    "monitor.comet": _of("utilities.monitors", "CometMonitor"),
    "checkpoint.utils": {"clone_tensors_for_torch_save": "zoo.checkpointing:clone_tensors_for_torch_save"},
    "checkpointing": _CHECKPOINTING,
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
}  # fmt: skip
