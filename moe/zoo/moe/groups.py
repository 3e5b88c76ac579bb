"""Parameter groups for optimizers: experts apart from what all ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from zoo.layout import split_of
from zoo.moe.experts.base import AXIS
from zoo.moe.part import layers_of


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    """Whether there are mixtures of experts in it, and the number of experts of the first one (0 without)."""
    layers = list(layers_of(model).values())
    return bool(layers), layers[0].num_experts if layers else 0


def is_moe_param(parameter: nn.Parameter) -> bool:
    """Whether it belongs to an expert, of which other ranks have others."""
    return AXIS in split_of(parameter).axes


def expert_parameters(model: nn.Module) -> set[int]:
    """``id`` of all parameters of experts, whether other ranks have others or not."""
    return {id(p) for layer in layers_of(model).values() for p in layer.expert_parameters()}


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Each group without its expert parameters, and these in groups of their own after it, with the same options.

    ZeRO needs none of this: it reads from the parameters themselves which ranks have them. It is for options that
    experts shall have of their own, and for scripts that call it.

    Args:
        param_groups: one group or several, each a mapping with "params".
        max_group_size: elements of a group of experts at most; a larger parameter has one of its own.

    Returns:
        Groups with "params", "name" and "moe" (bool) beside their options; each parameter is in one of them.

    Raises:
        ValueError: a group has no "params".
    """
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    found: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(f'parameter group {number} has no "params"; a group is {{"params": [...], "lr": ...}}.')
        params = list(group["params"])
        experts = [p for p in params if is_moe_param(p)]
        name = str(group.get("name", f"group{number}"))
        options = {key: value for key, value in group.items() if key not in ("params", "name", "moe")}
        found.append({**options, "params": [p for p in params if not is_moe_param(p)], "name": name, "moe": False})
        for index, part in enumerate(_cut(experts, max_group_size)):
            found.append({**options, "params": part, "name": f"{name}-experts{index}", "moe": True})
    return found


def _cut(parameters: list[nn.Parameter], limit: int | None) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not parts or (limit is not None and size + parameter.numel() > limit):
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel()
    return parts
