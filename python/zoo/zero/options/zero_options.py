"""Written by ``make schema`` from the fields of :class:`~zoo.zero.ZeroConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from zoo.shard.offload.config import OffloadOptimizerConfig, OffloadParamConfig


class ZeroOptions(TypedDict, total=False):
    """The options of :class:`~zoo.zero.ZeroConfig`, beside the stage."""

    reduce_bucket_size: int | None
    allgather_bucket_size: int | None
    overlap_comm: bool
    prefetch_bucket_size: int | None
    max_live_parameters: int | None
    divergent: bool
    param_persistence_threshold: int
    model_persistence_threshold: int
    gather_16bit_weights_on_model_save: bool
    load_from_fp32_weights: bool
    override_module_apply: bool
    sub_group_size: int
    update_in_backward: bool
    buffers: Literal["own", "broadcast", "average"]
    ignore_unused_parameters: bool
    offload_param: OffloadParamConfig | Mapping[str, Any]
    offload_optimizer: OffloadOptimizerConfig | Mapping[str, Any]
    offload_host_bytes: int | None
    ranks_per_node: int | None
    hierarchical_all_reduce: bool
    mics_shard_size: int
    mics_hierarchical_params_gather: bool
    zero_hpz_partition_size: int
    zero_quantized_weights: bool
    zero_quantized_nontrainable_weights: bool
    zero_quantized_gradients: bool
    quantized_gradients_bits: Literal[4, 8]
    quantized_gradients_feedback: bool
