"""ZeRO: layers and contexts beside those of the root. Checkpoints: names of files, keys, universal ones."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Table
from zoo.deepspeed.surface.constants import constants_of

_FILES = "zoo.deepspeed.adapters.checkpoints.checkpoint_files"
_PARALLEL = "zoo.deepspeed.adapters.checkpoints.parallel_shapes"
_UNIVERSAL = "zoo.deepspeed.adapters.checkpoints.to_universal"

_NAMES: Names = {
    name: f"{_FILES}:{name}"
    for name in ("get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank")
}
_SHAPE: Names = {
    "SubparamShape": Name(f"{_FILES}:SubparamShape", "zoo's checkpoints know parameters whole and do not look at it.")
}
_ENGINES: Names = {
    "CheckpointCommitInfo": f"{_FILES}:CheckpointCommitInfo",
    "CheckpointEngine": Name(f"{_FILES}:CheckpointEngine", "the engine does not use it."),
}
_TORCH: Names = {"TorchCheckpointEngine": Name(f"{_FILES}:TorchCheckpointEngine", "files are whole, or not there.")}

_SHAPES: Names = {
    name: Name(f"{_PARALLEL}:{name}", "zoo's checkpoints fit every shape of ranks.")
    for name in ("get_model_3d_descriptor", "model_3d_desc")
}
_FLAT: Names = {name: f"{_PARALLEL}:{name}" for name in ("meg_2d_parallel_map", "reshape_meg_2d_parallel")}
_LAYERS = "zoo.deepspeed.adapters.zero.linear_layers"
_WHOLE = "zoo.deepspeed.adapters.zero.whole_models"

_TILES: Names = {
    "TiledLinear": Name(f"{_LAYERS}:TiledLinear", "tiles are the modules .tile(row, column)."),
    "TiledLinearReturnBias": f"{_LAYERS}:TiledLinearReturnBias",
}
_MICS: Names = {"MiCS_Init": Name(f"{_WHOLE}:MiCS_Init", "splits over all ranks; initialize makes the groups.")}
_UNWRAP: Names = {"unwrap_model_for_generation": f"{_WHOLE}:unwrap_model_for_generation"}
_WRAP: Names = {
    "zero3_linear_wrap": Name(
        f"{_LAYERS}:zero3_linear_wrap", "nn.Linear is not replaced by it: nothing is saved by it."
    )
}

_HOOKS = "zoo.deepspeed.adapters.zero.backward_hooks"
_OFFLOAD = "zoo.deepspeed.adapters.zero.offload_activations"
_PINNED = "zoo.deepspeed.adapters.zero.pinned"

_ACCOUNT: Names = {
    "pinned_memory_summary": f"{_PINNED}:pinned_memory_summary",
    "track_pinned_memory": f"{_PINNED}:track_pinned_memory",
}
_TUNING = "use_pin_memory, use_streams and the sizes of pools make no difference."

TABLE: Table = {
    "checkpoint.reshape_3d_utils": dict(_SHAPES),
    "checkpoint.reshape_meg_2d": dict(_FLAT),
    "checkpoint": {
        **_SHAPES,
        "reshape_meg_2d_parallel": _FLAT["reshape_meg_2d_parallel"],
        **constants_of("checkpoint.constants"),
        **_NAMES,
        **_SHAPE,
    },
    "checkpoint.utils": dict(_NAMES),
    "checkpoint.universal_checkpoint": dict(_SHAPE),
    "checkpoint.ds_to_universal": {
        "main": Name(f"{_UNIVERSAL}:main", "takes checkpoints of zoo too; one process, without workers."),
        "parse_arguments": f"{_UNIVERSAL}:parse_arguments",
    },
    "runtime.checkpoint_engine": {**_ENGINES, **_TORCH},
    "runtime.checkpoint_engine.checkpoint_engine": dict(_ENGINES),
    "runtime.checkpoint_engine.torch_checkpoint_engine": {**_ENGINES, **_TORCH},
    "runtime.utils": {
        "register_output_backward_hooks": Name(
            f"{_HOOKS}:register_output_backward_hooks",
            "preprocess_once_fn is called in every backward, where DeepSpeed waits for reset().",
        ),
        "count_used_parameters_in_backward": f"{_HOOKS}:count_used_parameters_in_backward",
    },
    "runtime.activation_checkpointing.offload_activations": {
        "CheckpointActivationOffloadStats": f"{_OFFLOAD}:CheckpointActivationOffloadStats",
        "CheckpointHiddenStatesOffload": Name(f"{_OFFLOAD}:CheckpointHiddenStatesOffload", _TUNING),
        "get_checkpoint_hidden_states_offloading_ctx_manager": Name(
            f"{_OFFLOAD}:get_checkpoint_hidden_states_offloading_ctx_manager", _TUNING
        ),
    },
    "utils.pin_memory": {
        name: Name(f"{_PINNED}:{name}", "of zoo.io.BufferPool; without CUDA aligned, and not page-locked.")
        for name in ("NativePinnedMemory", "get_active_native_pinned_memory", "get_native_pinned_memory")
    },
    "utils.pin_memory_tracker": _ACCOUNT,
    "zero": {**_TILES, **_MICS, **_UNWRAP},
    "runtime.zero": {**_TILES, **_MICS, **_UNWRAP},
    "runtime.zero.mics": dict(_MICS),
    "runtime.zero.tiling": dict(_TILES),
    "runtime.zero.stage3": dict(_UNWRAP),
    "runtime.zero.partition_parameters": dict(_WRAP),
    "runtime.zero.linear": {
        **_WRAP,
        **{
            name: f"{_LAYERS}:{name}"
            for name in (
                "LinearModuleForZeroStage3", "autocast_custom_bwd", "autocast_custom_fwd", "noop_decorator",
            )
        },
        "LinearFunctionForZeroStage3": Name(f"{_LAYERS}:LinearFunctionForZeroStage3", "only .apply."),
    },
    "runtime.zero.utils": {
        name: f"{_WHOLE}:{name}" for name in ("apply_to_tensors_only", "is_zero_param")
    },
}  # fmt: skip
