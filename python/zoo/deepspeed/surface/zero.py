"""ZeRO's layers and contexts beside those of the root; host memory, and what backward keeps there."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Table

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
