"""ZeRO's layers and contexts beside those of the root."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Table

_LAYERS = "zoo.deepspeed.adapters.linear_layers"
_WHOLE = "zoo.deepspeed.adapters.whole_models"

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

TABLE: Table = {
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
