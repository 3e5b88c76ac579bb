"""Root keys of a ds_config document that are no fields: sections of parts that are not there yet, and single keys.

The keys, their kinds and defaults are those of the documented configuration. A section that a package registers takes
the place of the one here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.config.fates import Fate, refused, setting, unnecessary, waits

__all__ = ["KEYS", "SECTIONS"]

PATH = setting(None, str)
NUMBER = setting(None, int)

KEYS: dict[str, Fate] = {
    "dump_state": unnecessary("the configuration is printed by print(engine.config.explain())", False),
    "memory_breakdown": unnecessary(
        "the memory of model states after a step is memory_bytes of its record, where it is measured", False
    ),
    "dataloader_drop_last": unnecessary(
        "zoo's loader always drops what is left of an epoch and does not fill a micro-batch on every rank", False,
        nothing=(True,),
    ),
    "disable_python_gc": refused("the engine leaves the garbage collector alone; call gc.disable() yourself", False),
    "sequence_parallel_size": refused(
        'name the axis in the mesh, {"mesh": {"axes": {"data": -1, "sequence": 2}}}, and give the model '
        "zoo.nn.SequenceParallelAttention", 1,
    ),
    "comms_logger": unnecessary(
        "every collective is counted: print(engine.comm.log.table()); of the calls of deepspeed.comm that a program "
        "makes itself zoo.deepspeed logs what this says",
        alone=False,
        keys={
            "enabled": setting(False, nothing=(True,)), "prof_all": True, "prof_ops": [],
            "verbose": setting(False, asks=False), "debug": setting(False, asks=False),
        },
    ),
    "use_data_before_expert_parallelism": refused(
        'the order of mesh.axes says it: {"expert": 2, "data": -1} has data-parallel ranks side by side', False
    ),
    "hybrid_engine": unnecessary(
        "the model that is trained generates: zoo.inference.generate(engine.module.eval(), ...), and through "
        "zoo.deepspeed engine.generate(...), of at most max_out_tokens a row, prompt included",
        alone=False,
        keys={
            "enabled": setting(False, nothing=(True,)), "max_out_tokens": setting(512, asks=False),
            "inference_tp_size": unnecessary(
                "zoo.inference.Rollout(engine, degree=...) shares a model for generation; the façade's engine does", 1
            ),
            "release_inference_cache": unnecessary("keys and values are gone when generate returns", False),
            "pin_parameters": unnecessary("no parameter is copied, so none is page-locked for it", True),
            "tp_gather_partition_size": unnecessary("each layer is gathered when it runs", 8),
            "enable_cuda_graph": unnecessary("generation calls kernels one by one", False),
        },
    ),
    "graph_harvesting": waits("the compiler (CUDA graphs)", False),
    "vocabulary_size": unnecessary("nothing depends on it", None, int),
    "timers": unnecessary(
        "the seconds of a step are in its record, and wall_clock_breakdown measures its parts",
        keys={"throughput": {"enabled": setting(True, nothing=(False,)), "synchronized": setting(True, asks=False)}},
    ),
}  # fmt: skip
"""Single keys."""


def _switched(feature: str, what: Any = waits, **keys: Any) -> Fate:
    """A section with ``enabled``, which alone asks for something."""
    fate: Fate = what(feature, keys={"enabled": False, **keys})
    return fate


_TECHNIQUE: Mapping[str, Any] = {
    "shared_parameters": setting(
        {},
        keys={
            "enabled": False, "schedule_offset": 0, "schedule_offset_end": NUMBER,
            "quantizer_kernel": False, "quantize_groups": 1, "quantize_verbose": False,
            "quantization_type": "symmetric", "quantize_weight_in_forward": False, "rounding": "nearest",
            "fp16_mixed_quantize": {}, "range_calibration": "dynamic", "method": "l1",
            "num_heads": NUMBER, "block_pattern": "4x1", "dense_ratio": 0.1, "excluded_modules": [],
        },
    ),
    "different_groups": {},
}  # fmt: skip

SECTIONS: dict[str, Fate] = {
    "amp": _switched(
        'Apex is no longer developed; use "bf16", "fp16" or "torch_autocast"', refused,
        opt_level="O1", cast_model_type=PATH, patch_torch_functions=setting(None, bool),
        keep_batchnorm_fp32=setting(None, (bool, str)), master_weights=setting(None, bool),
        loss_scale=setting(None, (float, str)), cast_model_outputs=PATH, num_losses=1, verbosity=1,
        min_loss_scale=setting(None, float), max_loss_scale=setting(None, float),
    ),
    "compression_training": waits(
        "compression",
        keys={
            "weight_quantization": _TECHNIQUE, "activation_quantization": _TECHNIQUE, "sparse_pruning": _TECHNIQUE,
            "row_pruning": _TECHNIQUE, "head_pruning": _TECHNIQUE, "channel_pruning": _TECHNIQUE,
            "layer_reduction": {
                "enabled": False, "keep_number_layer": NUMBER, "module_name_prefix": PATH,
                "teacher_layer": setting(None, list), "other_module_name": setting(None, list),
            },
        },
    ),
    "eigenvalue": _switched(
        "quantisation during training", verbose=False, max_iter=100, tol=1e-2, stability=1e-6,
        gas_boundary_resolution=1, layer_name="bert.encoder.layer", layer_num=0,
    ),
    "expert_parallel": _switched(
        'zoo-moe does it: {"moe": {"enabled": true, "ep_size": ...}}, which finds the layers by itself', refused,
        autoep_size=1, expert_tensor_parallel_size=1, async_split_plan=False, preset_model=PATH,
        use_grouped_mm=True, disable_triton_grouped_mm=False, moe_layer_pattern=PATH, router_pattern=PATH,
        expert_pattern=PATH, score_func="auto", score_apply="auto", combine_impl="auto",
        route_norm=setting(None, bool), route_scale=1.0, top_k=setting("auto", (int, "auto")),
        routed_scaling_factor=setting("auto", (float, "auto")), num_expert_groups=NUMBER, num_limited_groups=NUMBER,
        load_balance_coeff=setting(None, float), expert_w1=PATH, expert_w2=PATH, expert_w3=PATH, num_experts_attr=PATH,
        top_k_attr=PATH, has_shared_experts=setting(None, bool), shared_experts_pattern=PATH,
    ),
    "nebula": _switched(
        "Nebula is a service of one cloud; zoo writes its checkpoints itself", refused, persistent_storage_path=PATH,
        persistent_time_interval=100, num_of_version_in_retention=2, enable_nebula_load=True, load_path=PATH,
    ),
    "quantize_training": _switched(
        "quantisation during training", quantize_bits={}, quantize_schedule={}, quantize_groups=1, quantize_type={},
        fp16_mixed_quantize={}, quantize_verbose=False, quantize_eigenvalue=False, quantize_algo={}, eigenvalue={},
        quantize_rounding=PATH, quantizer_kernel=False,
    ),
    "sparse_attention": waits(
        "sparse attention",
        whole=True,
        keys={
            "mode": "fixed", "block": 16, "different_layout_per_head": False, "num_local_blocks": 4,
            "num_global_blocks": 1, "attention": "bidirectional", "horizontal_global_attention": False,
            "num_different_global_patterns": 1, "num_random_blocks": 0, "local_window_blocks": [4],
            "global_block_indices": [0], "global_block_end_indices": setting(None, list),
            "num_sliding_window_blocks": 3,
        },
    ),
}  # fmt: skip
"""Whole sections, by name."""
