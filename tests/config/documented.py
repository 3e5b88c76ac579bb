"""Keys of a ds_config that documents name, and their documented defaults."""

from __future__ import annotations

import sys
from typing import Any

ZERO: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "stage": (819, 0, ()),
    "contiguous_gradients": (825, True, ()),
    "reduce_scatter": (831, True, ()),
    "reduce_bucket_size": (837, 500_000_000, ()),
    "use_multi_rank_bucket_allreduce": (847, True, ()),
    "allgather_partitions": (853, True, ()),
    "allgather_bucket_size": (859, 500_000_000, ()),
    "overlap_comm": (869, None, ()),
    "load_from_fp32_weights": (875, True, ()),
    "elastic_checkpoint": (881, False, ()),
    "offload_param": (886, None, ()),
    "offload_optimizer": (890, None, ()),
    "sub_group_size": (894, 1_000_000_000, ()),
    "cpu_offload_param": (902, None, ()),
    "cpu_offload_use_pin_memory": (906, None, ()),
    "cpu_offload": (910, None, ()),
    "prefetch_bucket_size": (914, 50_000_000, ("stage3_prefetch_bucket_size",)),
    "param_persistence_threshold": (922, 100_000, ("stage3_param_persistence_threshold",)),
    "model_persistence_threshold": (930, sys.maxsize, ("stage3_model_persistence_threshold",)),
    "max_live_parameters": (938, 1_000_000_000, ("stage3_max_live_parameters",)),
    "max_reuse_distance": (946, 1_000_000_000, ("stage3_max_reuse_distance",)),
    "gather_16bit_weights_on_model_save": (954, False, ("stage3_gather_16bit_weights_on_model_save",)),
    "stage3_gather_fp16_weights_on_model_save": (958, False, ()),
    "ignore_unused_parameters": (962, True, ()),
    "legacy_stage1": (966, False, ()),
    "round_robin_gradients": (970, False, ()),
    "zero_hpz_partition_size": (974, 1, ()),
    "zero_quantized_weights": (982, False, ()),
    "zero_quantized_nontrainable_weights": (986, False, ()),
    "zero_quantized_gradients": (990, False, ()),
    "mics_shard_size": (994, -1, ()),
    "mics_hierarchical_params_gather": (996, False, ()),
    "memory_efficient_linear": (998, True, ()),
    "pipeline_loading_checkpoint": (1004, False, ()),
    "override_module_apply": (1005, True, ()),
}
"""zero_optimization, chapter 5.1.1 of seed 001: line, default, second names."""

OFFLOAD_PARAM: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "device": (1011, "none", ()),
    "nvme_path": (1013, None, ()),
    "buffer_count": (1015, 5, ()),
    "buffer_size": (1021, 100_000_000, ()),
    "max_in_cpu": (1027, 1_000_000_000, ()),
    "pin_memory": (1033, False, ()),
}

OFFLOAD_OPTIMIZER: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "device": (1039, "none", ()),
    "nvme_path": (1041, None, ()),
    "buffer_count": (1043, 4, ()),
    "pin_memory": (1049, False, ()),
    "pipeline_read": (1054, False, ()),
    "pipeline_write": (1058, False, ()),
    "fast_init": (1062, False, ()),
    "ratio": (1066, 1.0, ()),
}
