"""Optimizers: Muon, and those that send signs; scales of losses; the transformer layer."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Table

_MUON = "zoo.deepspeed.adapters.optimizers.muon"
_ONEBIT = "zoo.deepspeed.adapters.optimizers.onebit"
_SCALERS = "zoo.deepspeed.adapters.optimizers.loss_scalers"

_SIGNS = "max_grad_norm is refused: the configuration's gradient_clipping does that; on CPU and GPU alike."


def _onebit(*names: str) -> Names:
    return {name: Name(f"{_ONEBIT}:{name}", _SIGNS) for name in names}


_AUX = Name(f"{_MUON}:MuonWithAuxAdam", "of zoo.optim.Muon; matrices only in groups with use_muon.")

_LAYER = "zoo.deepspeed.adapters.transformer"
_TRANSFORMER: Names = {
    "DeepSpeedTransformerConfig": Name(
        f"{_LAYER}.config:DeepSpeedTransformerConfig",
        "unknown keys are told with those like them; files are UTF-8 or UTF-16; batch_size and stochastic_mode make no "
        "difference.",
    ),
    "DeepSpeedTransformerLayer": Name(
        f"{_LAYER}.layer:DeepSpeedTransformerLayer",
        "zoo.nn.TransformerLayer, on CPU and GPU; GELU itself, as BERT; initial values are copied, biases of queries, "
        "keys and values too; initial weights are adjusted on every rank; other arguments of forward are refused.",
    ),
}

TABLE: Table = {
    "": _TRANSFORMER, "ops.transformer": _TRANSFORMER, "ops.transformer.transformer": _TRANSFORMER,
    "runtime.fp16.onebit": _onebit("OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
    "runtime.fp16.onebit.adam": _onebit("OnebitAdam"),
    "runtime.fp16.onebit.lamb": _onebit("OnebitLamb"),
    "runtime.fp16.onebit.zoadam": _onebit("ZeroOneAdam"),
    "runtime.fp16.loss_scaler": {
        **{
            name: f"{_SCALERS}:{name}"
            for name in ("CreateLossScaler", "LossScaler", "LossScalerBase", "to_python_float")
        },
        "DynamicLossScaler": Name(
            f"{_SCALERS}:DynamicLossScaler", "an overflow at min_scale is a RuntimeError; engines have zoo's own."
        ),
        **{
            name: f"zoo.deepspeed.adapters.configuration.sections:{name}"
            for name in (
                "CONSECUTIVE_HYSTERESIS", "DELAYED_SHIFT", "INITIAL_LOSS_SCALE", "MIN_LOSS_SCALE", "SCALE_WINDOW",
            )
        },
    },
    "runtime.zero.muon": {},
    "runtime.zero.muon.original_muon": {
        "NS_METHODS": f"{_MUON}:NS_METHODS",
        "muon_update": Name(
            f"{_MUON}:muon_update", 'ns_method "gram" and "standard" are one computation; the gradient stays as it is.'
        ),
        "zeropower_via_newtonschulz5": f"{_MUON}:zeropower_via_newtonschulz5",
        **{
            name: Name(f"{_MUON}:{name}", "zoo.optim.Muon; matrices only.") for name in ("Muon", "SingleDeviceMuon")
        },
        "MuonWithAuxAdam": _AUX,
        "SingleDeviceMuonWithAuxAdam": _AUX,
    },
}  # fmt: skip
