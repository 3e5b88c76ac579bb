"""What the constructor of a ZeRO optimizer was given, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zoo.zero.config import ZeroConfig


def resolve_config(config: ZeroConfig | None, stage: int | None, options: dict[str, Any]) -> ZeroConfig:
    """Take the ZeRO options out of ``options`` and put them over ``config``."""
    given = {key: options.pop(key) for key in list(options) if key in ZeroConfig.model_fields}
    if stage is not None:
        given["stage"] = stage
    base = config.model_dump() if config is not None else {}
    return ZeroConfig.model_validate({**base, **given})


def find_optimizer(optimizer: Any) -> Any:
    """The class to wrap: itself, or the one that a name in the registry means."""
    if isinstance(optimizer, str):
        from zoo import registry

        optimizer = registry.get("optimizer", optimizer)
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise ValueError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass the class (optimizer=torch.optim.AdamW) "
            "and its arguments (lr=3e-4), so that it can be built on this rank's part of the parameters."
        )
    return optimizer


def param_groups_of(model: nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Parameter groups as lists of dicts, each trainable parameter of the model in exactly one."""
    trainable = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train.")
    if params is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    given = list(params)
    groups = [dict(g) for g in given] if given and isinstance(given[0], dict) else [{"params": given}]
    seen: set[int] = set()
    for i, group in enumerate(groups):
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        group["params"] = [p for p in members if p.requires_grad]
        for p in group["params"]:
            if id(p) not in trainable:
                raise ValueError(
                    f"params= group {i} holds a tensor of shape {tuple(p.shape)} that is not in the model."
                )
            if id(p) in seen:
                raise ValueError(f"params= holds {trainable[id(p)]!r} more than once.")
            seen.add(id(p))
    missing = [name for key, name in trainable.items() if key not in seen]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameter(s) are in no group of params=: {', '.join(missing[:5])}. Add them to "
            "a group, or freeze them (requires_grad=False)."
        )
    return groups
