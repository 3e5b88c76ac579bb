"""Host memory, what backward keeps there, and hooks on backward."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Table

_HOOKS = "zoo.deepspeed.adapters.backward_hooks"
_OFFLOAD = "zoo.deepspeed.adapters.offload_activations"
_PINNED = "zoo.deepspeed.adapters.pinned"

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
}
