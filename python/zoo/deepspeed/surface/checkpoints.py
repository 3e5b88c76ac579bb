"""Checkpoints: names of files, keys, what makes one universal."""

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
}
