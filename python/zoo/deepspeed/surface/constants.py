"""Keys of DeepSpeed's checkpoints, and constants whose feature is not there or has other keys in zoo: programs import
them all the same."""

from __future__ import annotations

from typing import Any

from zoo.deepspeed.modules import Names, Table


def _lower(*names: str) -> dict[str, str]:
    """Each has its own name in small letters for a value."""
    return {name: name.lower() for name in names}


CONSTANTS: dict[str, dict[str, Any]] = {
    "autotuning.constants": {
        **_lower(
            "DS_CONFIG", "AUTOTUNING", "MODEL_INFO",
        ),
        "METRIC_PERCENT_DIFF_CONST": 0.05, "BUFSIZE": 1, "AUTOTUNING_ENABLED": "enabled",
        "AUTOTUNING_ENABLED_DEFAULT": False, "AUTOTUNING_FAST": "fast", "AUTOTUNING_FAST_DEFAULT": True,
        "AUTOTUNING_RESULTS_DIR": "results_dir", "AUTOTUNING_RESULTS_DIR_DEFAULT": "autotuning_results",
        "AUTOTUNING_EXPS_DIR": "exps_dir", "AUTOTUNING_EXPS_DIR_DEFAULT": "autotuning_exps",
        "AUTOTUNING_OVERWRITE": "overwrite", "AUTOTUNING_OVERWRITE_DEFAULT": True,
        "AUTOTUNING_START_PROFILE_STEP": "start_profile_step", "AUTOTUNING_START_PROFILE_STEP_DEFAULT": 3,
        "AUTOTUNING_END_PROFILE_STEP": "end_profile_step", "AUTOTUNING_END_PROFILE_STEP_DEFAULT": 5,
        "AUTOTUNING_METRIC_PATH": "metric_path", "AUTOTUNING_METRIC_PATH_DEFAULT": None,
        "AUTOTUNING_TUNER_TYPE": "tuner_type", "AUTOTUNING_TUNER_GRIDSEARCH": "gridsearch",
        "AUTOTUNING_TUNER_RANDOM": "random", "AUTOTUNING_TUNER_MODELBASED": "model_based",
        "AUTOTUNING_TUNER_TYPE_DEFAULT": "gridsearch", "AUTOTUNING_TUNER_EARLY_STOPPING": "tuner_early_stopping",
        "AUTOTUNING_TUNER_EARLY_STOPPING_DEFAULT": 5, "AUTOTUNING_TUNER_NUM_TRIALS": "tuner_num_trials",
        "AUTOTUNING_TUNER_NUM_TRIALS_DEFAULT": 50, "AUTOTUNING_ARG_MAPPINGS": "arg_mappings",
        "AUTOTUNING_ARG_MAPPINGS_DEFAULT": None, "AUTOTUNING_MAX_TRAIN_BATCH_SIZE": "max_train_batch_size",
        "AUTOTUNING_MAX_TRAIN_BATCH_SIZE_DEFAULT": None, "AUTOTUNING_MIN_TRAIN_BATCH_SIZE": "min_train_batch_size",
        "AUTOTUNING_MIN_TRAIN_BATCH_SIZE_DEFAULT": 1,
        "AUTOTUNING_MAX_TRAIN_MICRO_BATCH_SIZE_PER_GPU": "max_train_micro_batch_size_per_gpu",
        "AUTOTUNING_MAX_TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT": 1024,
        "AUTOTUNING_MIN_TRAIN_MICRO_BATCH_SIZE_PER_GPU": "min_train_micro_batch_size_per_gpu",
        "AUTOTUNING_MIN_TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT": 1,
        "AUTOTUNING_NUM_TUNING_MICRO_BATCH_SIZES": "num_tuning_micro_batch_sizes",
        "AUTOTUNING_NUM_TUNING_MICRO_BATCH_SIZES_DEFAULT": 3, "AUTOTUNING_MP_SIZE": "mp_size",
        "AUTOTUNING_MP_SIZE_DEFAULT": 1, "AUTOTUNING_METRIC": "metric", "AUTOTUNING_METRIC_LATENCY": "latency",
        "AUTOTUNING_METRIC_THROUGHPUT": "throughput", "AUTOTUNING_METRIC_FLOPS": "flops",
        "AUTOTUNING_METRIC_FORWARD": "forward", "AUTOTUNING_METRIC_BACKWRAD": "flops",
        "AUTOTUNING_METRIC_STEPS": "step", "AUTOTUNING_METRIC_DEFAULT": "throughput",
        "AUTOTUNING_MODEL_INFO_PATH": "model_info_path", "AUTOTUNING_MODEL_INFO_PATH_DEFAULT": None,
        "MODEL_INFO_PROFILE": "profile", "MODEL_INFO_PROFILE_DEFAULT": False, "MODEL_INFO_NUM_PARAMS": "num_params",
        "MODEL_INFO_NUM_PARAMS_DEFAULT": None, "MODEL_INFO_HIDDEN_SIZE": "hidden_size",
        "MODEL_INFO_HIDDEN_SIZE_DEFAULT": None, "MODEL_INFO_NUM_LAYERS": "num_layers",
        "MODEL_INFO_NUM_LAYERS_DEFAULT": None, "GLOBAL_TUNING_SPACE": "global",
        "TUNING_MICRO_BATCH_SIZE_PREFIX": "z",
    },
    "profiling.constants": {
        **_lower(
            "FLOPS_PROFILER",
        ),
        "FLOPS_PROFILER_ENABLED": "enabled", "FLOPS_PROFILER_ENABLED_DEFAULT": False,
        "FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR": "recompute_fwd_factor",
        "FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR_DEFAULT": 0.0, "FLOPS_PROFILER_PROFILE_STEP": "profile_step",
        "FLOPS_PROFILER_PROFILE_STEP_DEFAULT": 1, "FLOPS_PROFILER_MODULE_DEPTH": "module_depth",
        "FLOPS_PROFILER_MODULE_DEPTH_DEFAULT": -1, "FLOPS_PROFILER_TOP_MODULES": "top_modules",
        "FLOPS_PROFILER_TOP_MODULES_DEFAULT": 1, "FLOPS_PROFILER_DETAILED": "detailed",
        "FLOPS_PROFILER_DETAILED_DEFAULT": True, "FLOPS_PROFILER_OUTPUT_FILE": "output_file",
        "FLOPS_PROFILER_OUTPUT_FILE_DEFAULT": None,
    },
    "runtime.swap_tensor.constants": {
        **_lower(
            "AIO",
        ),
        "AIO_BLOCK_SIZE": "block_size", "AIO_BLOCK_SIZE_DEFAULT": 1048576, "AIO_QUEUE_DEPTH": "queue_depth",
        "AIO_QUEUE_DEPTH_DEFAULT": 8, "AIO_INTRA_OP_PARALLELISM": "intra_op_parallelism",
        "AIO_INTRA_OP_PARALLELISM_DEFAULT": 1, "AIO_SINGLE_SUBMIT": "single_submit",
        "AIO_SINGLE_SUBMIT_DEFAULT": False, "AIO_OVERLAP_EVENTS": "overlap_events",
        "AIO_OVERLAP_EVENTS_DEFAULT": True, "AIO_USE_GDS": "use_gds", "AIO_USE_GDS_DEFAULT": False,
    },
    "runtime.swap_tensor.utils": {
        "MIN_AIO_BYTES": 1048576, "AIO_ALIGNED_BYTES": 1024, "MIN_SWAPPABLE_BYTES": 1048576,
    },
    "runtime.swap_tensor": {
        "MIN_SWAPPABLE_BYTES": 1048576,
    },
    "compile.constants": {
        "AUTOSP_INPUT_ID_KEY": "input_id", "AUTOSP_LABEL_ID_KEY": "label_id",
        "AUTOSP_POSITION_ID_KEY": "position_id",
    },
    "compile.init_tp": {
        "DEFERRED_NAMES_ATTR": "_ds_autotp_deferred_module_names", "AUTOTP_MIN_TORCH_VERSION": 2.6,
        "BROKEN_TRANSFORMERS_MOE_VERSIONS": ("5.8.0", "5.10.1"),
    },
    "compile.passes.contract": {
        "CAP_Z3_GATHER_RELEASE": "z3_gather_release", "CAP_OPT_STATES_EVICTED": "opt_states_evicted",
    },
    "checkpoint.constants": {
        **_lower(
            "AFFINE_MAP", "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS", "BASE_OPTIMIZER_STATE",
            "BASE_OPTIMIZER_STATE_STEP", "BUFFER_NAMES", "CAT_DIM", "CLIP_GRAD", "DS_AUTOEP_UC_META", "DS_VERSION",
            "FP32_FLAT_GROUPS", "FP32_GROUPS", "FROZEN_PARAM_FRAGMENTS", "FROZEN_PARAM_SHAPES", "GROUP_PADDINGS",
            "LOSS_SCALER", "OPTIMIZER_STATE_DICT", "ORIGINAL_VOCAB_SIZE", "PADDED_VOCAB_SIZE", "PARAM",
            "PARAMETER_TO_AVERAGE_PATTERNS", "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0",
            "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS", "PARAMETER_WITH_SUB_PARAMS", "PARAM_ALIGNMENT_PADDINGS",
            "PARAM_GROUPS", "PARAM_N_SUB_PARAMS", "PARAM_SHAPES", "PARAM_SLICE_MAPPINGS", "PARTITION_COUNT",
            "PIPELINE_REPLICATED_PARAMETER_PATTERNS", "SINGLE_PARTITION_OF_FP32_GROUPS", "SUB_PARAMS_SHAPE",
            "SUB_PARAM_SHAPE", "SUB_PARAM_SHARD_WIDTHS", "TP_REPLICATED_PARAMETER_PATTERNS",
            "UNIVERSAL_CHECKPOINT_INFO", "VOCABULARY_PARAMETER_PATTERNS", "VOCAB_TENSOR", "ZERO_STAGE",
        ),
        "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions", "CHECKPOINT_PP_DEGREE": "pp_degree",
        "CHECKPOINT_TP_DEGREE": "tp_degree", "EP_IS_EXPERT_PARAM": "is_expert_param",
        "EP_NUM_EXPERTS": "ep_num_experts",
        "EXPERT_PARAMETER_PATTERNS": "expert_parameter_patterns", "FP32_WEIGHT_KEY": "fp32",
        "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version", "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
        "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_", "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_",
        "LAYER_FILE_PREFIX": "layer_", "MODEL_FILE_PREFIX": "mp_rank_", "MODEL_FILE_SUFFIX": "_model_states.pt",
        "OPTIM_FILE_SUFFIX": "_optim_states.pt", "ZERO_FILE_PREFIX": "zero_pp_rank_",
        "DS_AUTOTP_UC_META": "ds_autotp_universal_checkpoint_meta", "AFFINE_MAP_VERSION": "version",
        "AFFINE_MAP_PARAMS": "params",
        "AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT": "zero3_partitioned", "AUTOEP_LAYERS_KEY": "ds_autoep_layers",
        "AUTOEP_LAYERS_KEY_LEGACY": "autoep_layers", "AUTOEP_EXPERT_KEY_PREFIX": "expert_key_prefix",
        "AUTOEP_NUM_EXPERTS": "num_experts", "AUTOEP_NUM_LOCAL_EXPERTS": "num_local_experts",
        "AUTOEP_EP_SIZE": "ep_size", "AUTOEP_EXPERT_PLACEMENT": "expert_placement",
        "AUTOEP_AFFINE_MAPS": "affine_maps", "AUTOEP_PARAM_LOGICAL_SHAPE": "logical_shape",
        "AUTOEP_PARAM_EP_RANK": "ep_rank", "AUTOEP_PARAM_LOCAL_EXPERTS": "local_experts",
        "AUTOEP_ZERO12_REQUIRED_FIELDS": ("expert_key_prefix", "num_experts", "num_local_experts", "ep_size"),
        "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY": "checkpoint_format",
        "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY": "checkpoint_format_version",
        "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION": 1, "AUTOEP_PLACEMENT_VERSION_KEY": "version",
        "AUTOEP_PLACEMENT_VERSION": 1, "AUTOEP_PLACEMENT_NUM_EXPERTS": "num_experts",
        "AUTOEP_PLACEMENT_EP_SIZE": "ep_size", "AUTOEP_PLACEMENT_RANKS": "ranks", "AUTOEP_PLACEMENT_RANK": "rank",
        "AUTOEP_PLACEMENT_EXPERTS": "experts", "FOLDING_METADATA_KEY": "folding", "FOLDING_METADATA_VERSION": 1,
        "FOLDING_TP_SIZE": "tp_size", "FOLDING_TP_RANK": "tp_rank", "FOLDING_EP_SIZE": "ep_size",
        "FOLDING_EP_RANK": "ep_rank", "FOLDING_ETP_SIZE": "etp_size", "FOLDING_ETP_RANK": "etp_rank",
        "FOLDING_ZERO_PARTITION_GROUP": "zero_partition_group",
        "FOLDING_ZERO_PARTITION_RANK": "zero_partition_rank",
        "FOLDING_ZERO_PARTITION_COUNT": "zero_partition_count", "FOLDING_DISPATCH_STRATEGY": "dispatch_strategy",
        "FOLDING_SHARED_EXPERT_PLACEMENT": "shared_expert_placement", "FOLDING_FAMILY": "family",
        "FOLDING_PARAM_FAMILIES": "param_families",
    },
    "checkpoint.reshape_3d_utils": {
        "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions", "CHECKPOINT_PP_DEGREE": "pp_degree",
        "CHECKPOINT_TP_DEGREE": "tp_degree", "MODEL_FILE_PREFIX": "mp_rank_", "LAYER_FILE_PREFIX": "layer_",
        "PP_DIM": "PP", "TP_DIM": "TP", "DP_DIM": "DP",
    },
    "constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500, "INFERENCE_GENERIC_MODE": "generic",
        "INFERENCE_SPECIALIZED_MODE": "specialized", "CROSS_RANK": "CROSS_RANK", "CROSS_SIZE": "CROSS_SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
    },
    "nvme.ds_aio_constants": {
        **_lower(
            "AIO_HANDLE", "AIO_BASIC", "TORCH_IO", "BUFFER", "BOUNCE_BUFFER", "NUM_BYTES", "FILE", "HANDLE",
            "ELAPSED_SEC", "FAST_IO_BUFFER",
        ),
        "TORCH_FAST_IO": "torch_fastio", "VALID_ENGINES": ["aio_handle", "aio_basic", "torch_io", "torch_fastio"],
        "USE_CPU_LOCKED_TENSOR": "cpu_locked_tensor", "USE_GDS": "gds",
    },
    "runtime.data_pipeline.constants": {
        **_lower(
            "DATA_EFFICIENCY", "DATA_SAMPLING", "CURRICULUM_LEARNING", "DYNAMIC_BATCHING", "DATA_ROUTING",
            "RANDOM_LTD", "RANDOM_LTD_LAYER_NUM", "RANDOM_LTD_LAYER_ID",
        ),
        "DATA_EFFICIENCY_ENABLED": "enabled", "DATA_EFFICIENCY_ENABLED_DEFAULT": False,
        "DATA_EFFICIENCY_SEED": "seed", "DATA_EFFICIENCY_SEED_DEFAULT": 1234, "DATA_SAMPLING_ENABLED": "enabled",
        "DATA_SAMPLING_ENABLED_DEFAULT": False, "DATA_SAMPLING_NUM_EPOCHS": "num_epochs",
        "DATA_SAMPLING_NUM_EPOCHS_DEFAULT": 1000, "DATA_SAMPLING_NUM_WORKERS": "num_workers",
        "DATA_SAMPLING_NUM_WORKERS_DEFAULT": 0, "DATA_SAMPLING_PIN_MEMORY": "pin_memory",
        "DATA_SAMPLING_PIN_MEMORY_DEFAULT": False, "CURRICULUM_LEARNING_ENABLED": "enabled",
        "CURRICULUM_LEARNING_ENABLED_DEFAULT": False, "CURRICULUM_LEARNING_CLUSTER_PATH": "data_cluster_path",
        "CURRICULUM_LEARNING_METRICS": "curriculum_metrics",
        "CURRICULUM_LEARNING_SAMPLE_PATH": "index_to_sample_path",
        "CURRICULUM_LEARNING_METRIC_PATH": "index_to_metric_path",
        "CURRICULUM_LEARNING_CLUSTERING_TYPE": "clustering_type",
        "CURRICULUM_LEARNING_SINGLE_CLUSTER": "single_cluster", "CURRICULUM_LEARNING_CLUSTER_PREFIX": "cluster",
        "CURRICULUM_LEARNING_DIFFICULTY_TYPE": "difficulty_type", "CURRICULUM_LEARNING_VALUE_BASED": "value",
        "CURRICULUM_LEARNING_PERCENTILE_BASED": "percentile",
        "CURRICULUM_LEARNING_MIN_DIFFICULTY": "min_difficulty",
        "CURRICULUM_LEARNING_MAX_DIFFICULTY": "max_difficulty",
        "CURRICULUM_LEARNING_SCHEDULE_TYPE": "schedule_type",
        "CURRICULUM_LEARNING_SCHEDULE_CONFIG": "schedule_config",
        "CURRICULUM_LEARNING_SCHEDULE_DIFFICULTY": "difficulty",
        "CURRICULUM_LEARNING_SCHEDULE_MAX_STEP": "max_step",
        "CURRICULUM_LEARNING_SCHEDULE_TOTAL_STEP": "total_curriculum_step",
        "CURRICULUM_LEARNING_SCHEDULE_DIFFICULTY_STEP": "difficulty_step",
        "CURRICULUM_LEARNING_SCHEDULE_ROOT_DEGREE": "root_degree",
        "CURRICULUM_LEARNING_SCHEDULE_FIXED_DISCRETE": "fixed_discrete",
        "CURRICULUM_LEARNING_SCHEDULE_FIXED_ROOT": "fixed_root",
        "CURRICULUM_LEARNING_SCHEDULE_FIXED_LINEAR": "fixed_linear",
        "CURRICULUM_LEARNING_SCHEDULE_CUSTOM": "custom",
        "CURRICULUM_LEARNING_CURRENT_DIFFICULTY": "current_difficulty", "CURRICULUM_LEARNING_BATCH": "batch",
        "CURRICULUM_LEARNING_CONSUMED_SAMPLES": "consumed_samples", "CURRICULUM_LEARNING_STEP": "curriculum_step",
        "CURRICULUM_LEARNING_CURRENT_DIFFICULTIES": "current_difficulties",
        "CURRICULUM_LEARNING_DATA_CLUSTER_PATHS": "data_cluster_paths",
        "CURRICULUM_LEARNING_DATA_CLUSTER_CURRENT_POSITION": "data_cluster_current_position",
        "CURRICULUM_LEARNING_NP_RNG_STATE": "np_rng_state", "DYNAMIC_BATCHING_ENABLED": "enabled",
        "DYNAMIC_BATCHING_ENABLED_DEFAULT": False, "DYNAMIC_BATCHING_METRICS_PATH": "metrics_path",
        "DYNAMIC_BATCHING_LR_SCALING_METHOD": "lr_scaling_method",
        "DYNAMIC_BATCHING_LR_SCALING_METHOD_DEFAULT": "linear", "DYNAMIC_BATCHING_MIN_BATCH_SIZE": "min_batch_size",
        "DYNAMIC_BATCHING_MIN_BATCH_SIZE_DEFAULT": 1, "DYNAMIC_BATCHING_MAX_BATCH_SIZE": "max_batch_size",
        "DYNAMIC_BATCHING_MAX_BATCH_SIZE_DEFAULT": None,
        "DYNAMIC_BATCHING_SEQUENCE_PICKING_ORDER": "sequence_picking_order",
        "DYNAMIC_BATCHING_SEQUENCE_PICKING_ORDER_DEFAULT": "dataloader",
        "DYNAMIC_BATCHING_MAX_TOKENS": "max_tokens", "DYNAMIC_BATCHING_VERBOSE": "verbose",
        "DATA_ROUTING_ENABLED": "enabled", "DATA_ROUTING_ENABLED_DEFAULT": False, "RANDOM_LTD_ENABLED": "enabled",
        "RANDOM_LTD_ENABLED_DEFAULT": False, "RANDOM_LTD_MODEL_MASK_NAME": "model_mask_name",
        "RANDOM_LTD_MODEL_TYPE": "model_type", "RANDOM_LTD_MICRO_BATCH_SIZE": "micro_batch_size",
        "RANDOM_LTD_GLOBAL_BATCH_SIZE": "global_batch_size", "RANDOM_LTD_SAMPLE_INDEX": "sample_idx",
        "RANDOM_LTD_ATTENTION_MASK": "attention_mask", "RANDOM_LTD_HIDDEN_STATE_ORDER": "hidden_state_order",
        "RANDOM_LTD_TOTAL_LAYER_NUM": "total_layer_num",
        "RANDOM_LTD_CONSUMED_LAYER_TOKENS": "consumed_layer_tokens", "RANDOM_LTD_SCHEDULER": "random_ltd_schedule",
        "RANDOM_LTD_MAX_VALUE": "max_value", "RANDOM_LTD_MIN_VALUE": "min_value",
        "RANDOM_LTD_CURRENT_VALUE": "current_value", "RANDOM_LTD_SCHEDULE_CONFIG": "schedule_config",
        "RANDOM_LTD_INCREASE_STEP": "seq_per_step", "RANDOM_LTD_REQUIRE_STEP": "require_steps",
        "RANDOM_LTD_SCHEDULER_TYPE": "schedule_type", "RANDOM_LTD_CURR_STEP": "current_steps",
        "RANDOM_LTD_LAYER_TOKEN_LR_SCHEDULE": "layer_token_lr_schedule",
        "RANDOM_LTD_LAYER_TOKEN_LR_ENABLED": "enabled", "RANDOM_LTD_LAYER_TOKEN_LR_ENABLED_DEFAULT": False,
        "RANDOM_LTD_TOTAL_LAYER_TOKENS": "total_layer_tokens", "RANDOM_LTD_WARMUP_TYPE": "warmup_type",
        "RANDOM_LTD_WARMUP_LAYER_TOKENS": "warmup_layer_tokens",
    },
    "datastates.config": {
        "DATASTATES_CHECKPOINTING": "datastates_ckpt", "DATASTATES_CHECKPOINTING_ENABLED": False,
    },
    "runtime.model_checkpointing.constants": {
        **_lower(
            "CHECKPOINT", "CHECKPOINT_SERIALIZATION",
        ),
        "CHECKPOINT_TAG_VALIDATION": "tag_validation", "CHECKPOINT_TAG_VALIDATION_DEFAULT": "WARN",
        "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"], "CHECKPOINT_SERIALIZATION_DEFAULT": True,
        "CHECKPOINT_WRITER": "writer", "CHECKPOINT_WRITER_DEFAULT": None, "CHECKPOINT_WRITER_TYPE": "type",
        "CHECKPOINT_WRITER_TYPE_DEFAULT": "FAST", "CHECKPOINT_WRITER_TYPES": ["MOCK", "PYTHON", "FAST"],
        "CHECKPOINT_IO_BUFFER_SIZE": "io_buffer_size", "CHECKPOINT_IO_BUFFER_SIZE_DEFAULT": 67108864,
        "CHECKPOINT_IO_BUFFER_DOUBLE": "io_buffer_double", "CHECKPOINT_IO_BUFFER_DOUBLE_DEFAULT": True,
        "CHECKPOINT_IO_MULTIPLIER": "io_multiplier", "CHECKPOINT_IO_MULTIPLIER_DEFAULT": 1,
        "CHECKPOINT_IO_STATISTICS": "show_statistics", "CHECKPOINT_IO_STATISTICS_DEFAULT": False,
        "CHECKPOINT_DATA_PARALLEL": "data_parallel", "CHECKPOINT_DATA_PARALLEL_DEFAULT": None,
        "CHECKPOINT_DATA_PARALLEL_UNITS": ["REPLICA", "SOCKET", "MACHINE"],
        "CHECKPOINT_WRITER_DECOUPLED": "decoupled", "CHECKPOINT_WRITER_DECOUPLED_DEFAULT": False,
    },
    "module_inject.auto_ep_folding": {
        "AUTOEP_FOLDING_PARAM_FAMILY_ATTR": "ds_autoep_folding_param_family",
        "AUTOEP_FOLDING_ROUTER_GATE_REPLICATED_PARAM": "router_gate_replicated",
        "AUTOEP_FOLDING_ROUTER_GATE_PARTIAL_PARAM": "router_gate_partial",
        "AUTOEP_FOLDING_SP_SHARDED_LAYERNORM_PARAM": "sp_sharded_layernorm",
        "AUTOEP_FOLDING_GRAD_CORRECTED_ATTR": "ds_autoep_folding_grad_corrected",
        "AUTOEP_FOLDING_GRAD_REDUCE_SKIP": "skip", "AUTOEP_FOLDING_GRAD_REDUCE_SUM": "sum",
        "AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE": "average",
        "AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL": "expert_tp_cancel",
    },
    "module_inject.layers": {
        **_lower(
            "DS_IS_REPLACED_MODULE",
        ),
        "DS_AUTOTP_UC_META": "ds_autotp_universal_checkpoint_meta",
        "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version",
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4, "DS_TENSOR_MODEL_PARALLEL": "tensor_model_parallel",
    },
    "runtime.torch_autocast": {"PARAM_COMM_DTYPE_ATTR_NAME": "comm_dtype"},
    "inference.engine": {
        "DS_INFERENCE_ENABLED": False, "INFERENCE_MODEL_TIMER": "model-forward-inference",
    },
}  # fmt: skip
"""Module → name → value."""


def constants_of(module: str) -> Names:
    """The table of these constants."""
    return {name: f"zoo.deepspeed.surface.constants:{module}.{name}" for name in CONSTANTS[module]}


TABLE: Table = {module: constants_of(module) for module in CONSTANTS}


def __getattr__(name: str) -> Any:
    """ "profiling.constants.FLOPS_PROFILER" is what ``deepspeed.profiling.constants`` has of that name."""
    module, _, constant = name.rpartition(".")
    if constant in CONSTANTS.get(module, {}):
        return CONSTANTS[module][constant]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
