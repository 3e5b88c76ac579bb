"""Parameter groups for optimizers: experts apart from what all ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zoo.moe.experts.base import is_marked
from zoo.moe.part import layers_of


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    """Whether there are mixtures of experts in it, and the number of experts of the first one (0 without)."""
    layers = list(layers_of(model).values())
    return bool(layers), layers[0].num_experts if layers else 0


def is_moe_param(parameter: nn.Parameter) -> bool:
    """Whether it belongs to an expert, at any ``ep_size``."""
    return is_marked(parameter)


def expert_parameters(model: nn.Module) -> set[int]:
    """``id`` of all parameters of experts, whether other ranks have others or not."""
    return {id(p) for layer in layers_of(model).values() for p in layer.expert_parameters()}


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Each group without its expert parameters, and these in groups of their own after it, with the same options.

    The groups are the same at every ``ep_size``, 1 too, so that a checkpoint fits them.

    ZeRO needs none of this: it reads from the parameters themselves which ranks have them. It is for options that
    experts shall have of their own, and for scripts that call it.

    Args:
        param_groups: one group or several, each a mapping with "params", which may be pairs of a name and a parameter.
        max_group_size: elements of a group of experts at most; a larger parameter has one of its own.

    Returns:
        Groups with "params", "name" and "moe" (bool) beside their options; each parameter is in one of them.

    Raises:
        ValueError: a group has no "params", or is no mapping.
    """
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    found: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise ValueError(
                f'parameter group {number} is a {type(group).__name__}; a group is {{"params": [...], "lr": ...}}.'
            )
        if "params" not in group:
            raise ValueError(f'parameter group {number} has no "params"; a group is {{"params": [...], "lr": ...}}.')
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        experts = [p for p in params if is_moe_param(_parameter(p))]
        others = [p for p in params if not is_moe_param(_parameter(p))]
        name = str(group.get("name", f"group{number}"))
        options = {key: value for key, value in group.items() if key not in ("params", "name", "moe")}
        found.append({**options, "params": others, "name": name, "moe": False})
        for index, part in enumerate(_cut(experts, max_group_size)):
            found.append({**options, "params": part, "name": f"{name}-experts{index}", "moe": True})
    return found


def _parameter(given: Any) -> nn.Parameter:
    """Of a pair as ``named_parameters`` has them."""
    found: nn.Parameter = given[1] if isinstance(given, tuple) else given
    return found


def _cut(given: Sequence[Any], limit: int | None) -> list[list[Any]]:
    parts: list[list[Any]] = []
    size = 0
    for one in given:
        count = _parameter(one).numel()
        if not parts or (limit is not None and size + count > limit):
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += count
    return parts
