"""``deepspeed.runtime.data_pipeline.data_routing.helper``: what programs that use random-LTD call around a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from zoo.deepspeed.adapters.root.engine import DeepSpeedEngine


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> Any:
    """The engine as it is: the configuration's blocks drop tokens since ``initialize``, and keep their class and names.

    Args:
        model: an engine.
        convert_type: the class of the blocks.

    Raises:
        ValueError: no engine, an engine without random-LTD, or blocks of another class that would drop tokens.
    """
    if not isinstance(model, DeepSpeedEngine):
        raise ValueError(
            f"convert_to_random_ltd() of a {type(model).__name__}; it takes the engine that initialize returned."
        )
    part = model.engine.parts.get("data_efficiency")
    ltd = getattr(part, "random_ltd", None)
    if ltd is None:
        raise ValueError(
            "convert_to_random_ltd() of an engine without random-LTD: enable data_efficiency.data_routing.random_ltd "
            "in the configuration."
        )
    wrong = {name: type(block).__name__ for name, block in ltd.blocks.items() if not isinstance(block, convert_type)}
    if wrong:
        name, kind = next(iter(wrong.items()))
        raise ValueError(
            f"convert_to_random_ltd(model, {convert_type}): the blocks that drop tokens are others, {name!r} is "
            f"a {kind}. Name the right ones in data_efficiency.data_routing.random_ltd: blocks, random_ltd_layer_id."
        )
    return model


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The same values without ".random_ltd_layer" in their names, which DeepSpeed's own checkpoints have there."""
    return OrderedDict((name.replace(".random_ltd_layer", ""), value) for name, value in state_dict.items())


def save_without_random_ltd(model: nn.Module) -> OrderedDict[str, Any]:
    """The ``state_dict()`` of the model, or of an engine's, under the names of plain blocks."""
    return remove_random_ltd_state_dict((model.module if isinstance(model, DeepSpeedEngine) else model).state_dict())
