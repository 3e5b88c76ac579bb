"""The transformer layer for training."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Table

_HOME = "zoo.deepspeed.adapters.transformer"
_NAMES: Names = {
    "DeepSpeedTransformerConfig": Name(
        f"{_HOME}.config:DeepSpeedTransformerConfig",
        "unknown keys are told with those like them; files are UTF-8 or UTF-16; batch_size and stochastic_mode make no "
        "difference.",
    ),
    "DeepSpeedTransformerLayer": Name(
        f"{_HOME}.layer:DeepSpeedTransformerLayer",
        "zoo.nn.TransformerLayer, on CPU and GPU; GELU itself, as BERT; initial values are copied, biases of queries, "
        "keys and values too; initial weights are adjusted on every rank; other arguments of forward are refused.",
    ),
}

TABLE: Table = {"": _NAMES, "ops.transformer": _NAMES, "ops.transformer.transformer": _NAMES}
