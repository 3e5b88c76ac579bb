"""The documented options of ``zero_optimization`` that are no fields of :class:`~zoo.zero.ZeroConfig`.

What becomes of each is in ``FATES``, and of those of ``offload_param`` and ``offload_optimizer`` in the tables beside
it: *translated* into present ones, *unnecessary* (this design does it anyway, or has nothing that it could choose), or
*refused*.

Source of names and defaults: the DeepSpeed documentation, ZeRO configurations; values there, meanings here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.config.fates import Fate, refused, translated, unnecessary


def _stage3(name: str) -> dict[str, Any]:
    return {"aliases": (f"stage3_{name}",)}


FATES: Mapping[str, Fate] = {
    "contiguous_gradients": unnecessary("gradients always accumulate in flat buffers", True),
    "reduce_scatter": unnecessary(
        "gradients are always reduce-scattered; at stage 0 an all-gather follows, which makes it an all-reduce", True
    ),
    "use_multi_rank_bucket_allreduce": unnecessary(
        "a bucket is one collective in which every rank gets its chunk, so there are no messages by rank to combine",
        True,
    ),
    "allgather_partitions": unnecessary("a bucket is gathered by one all-gather; there are no broadcasts", True),
    "elastic_checkpoint": unnecessary("a checkpoint can be read at any world size and stage", False, nothing=(True,)),
    "cpu_offload_param": translated(
        {"offload_param.device": {True: "cpu", False: "none"}}, aliases=("cpu_offload_params",)
    ),
    "cpu_offload_use_pin_memory": translated({"offload_param.pin_memory": None, "offload_optimizer.pin_memory": None}),
    "cpu_offload": translated({"offload_optimizer.device": {True: "cpu", False: "none"}}),
    "max_reuse_distance": unnecessary(
        "the recorded order of units says what is needed again next, and max_live_parameters bounds what may stay",
        1_000_000_000, float, **_stage3("max_reuse_distance"),
    ),
    "stage3_gather_fp16_weights_on_model_save": translated({"gather_16bit_weights_on_model_save": None}, default=False),
    "legacy_stage1": unnecessary("all stages are one implementation", False),
    "round_robin_gradients": unnecessary(
        "every rank holds a chunk of every bucket, so the work is spread evenly anyway", False
    ),
    "memory_efficient_linear": unnecessary(
        "at stage 3 what autograd keeps of a weight is a view of a buffer that is emptied on release; for models under "
        "torch.autocast there is zoo.zero.memory_efficient_linear(model)", True, nothing=(False,),
    ),
    "pipeline_loading_checkpoint": unnecessary(
        "every rank reads its own slices of a checkpoint at the same time", False
    ),
    "compute_grad_norm": unnecessary("the norm is measured with the update, on one reduction of a number", True),
    "parameter_alignment": unnecessary("flat buffers have their own alignment", False),
    "log_trace_cache_warnings": unnecessary("units that come in another order are in the report of a window", False),
    "module_granularity_threshold": unnecessary(
        "small units share buckets, see reduce_bucket_size", 0, **_stage3("module_granularity_threshold")
    ),
    "use_all_reduce_for_fetch_params": unnecessary(
        "a bucket is gathered by one all-gather", False, **_stage3("use_all_reduce_for_fetch_params")
    ),
    "allgather_sequential": unnecessary(
        "a bucket is gathered by one all-gather", False, **_stage3("allgather_sequential")
    ),
    "enable_sanity_checks": unnecessary("comm.check compares what ranks are about to do", False),
    "save_muon_momentum_buffer_in_memory": refused(
        "with states on NVMe all of them are there; offload_optimizer.ratio keeps a part on the device", False
    ),
    "zeropp_loco_param": refused(
        "the error feedback of quantised gradients is quantized_gradients_feedback", None, dict
    ),
    "leaf_module": refused(
        "a unit is a module with parameters of its own; divergent=True is for modules that not every rank runs", None,
        dict,
    ),
    "zenflow": refused("updates use the gradients of their own step, all of them", None, dict),
}  # fmt: skip

OFFLOAD_PARAM_FATES: Mapping[str, Fate] = {
    "buffer_count": unnecessary("parameters are read into the buffers that they are gathered in", 5, asks=False),
    "buffer_size": unnecessary("no parameter is too large for a buffer", 100_000_000, asks=False),
}

OFFLOAD_OPTIMIZER_FATES: Mapping[str, Fate] = {
    "buffer_count": unnecessary("their number follows from the pipeline, their size from the model", 4, asks=False),
    "fast_init": unnecessary(
        "states are made in the first step, so that there is nothing to write before it", False, nothing=(True,)
    ),
    "super_offload": refused("the device updates the part that offload_optimizer.ratio leaves to it", False),
    "cpuadam_cores_perc": unnecessary("the CPU's update uses torch's threads", 0.8, asks=False),
}
