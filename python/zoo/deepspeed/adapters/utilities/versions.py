"""``deepspeed.utils.torch``: which torch this is, and hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _numbers(version: Any) -> tuple[int, ...]:
    found: list[int] = []
    for part in str(version).split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        found.append(int(digits) if digits else 0)
        if digits != part:
            break
    return tuple(found[:3] + [0] * (3 - len(found)))


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether this torch is at least ``min_version`` and at most ``max_version``: 2.1, "2.1" or "2.1.3".

    Raises:
        AssertionError: neither is given.
    """
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version() got nothing; give it min_version=, max_version=, or both.")
    here = _numbers(torch.__version__)
    return (min_version is None or here >= _numbers(min_version)) and (
        max_version is None or here <= _numbers(max_version)
    )


def register_grad_hook(param: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """Call ``hook(param)`` whenever a backward has added to its gradient; gives the handle."""
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def is_triton_available() -> bool:
    """Whether ``deepspeed.ops.triton_ops`` computes: it does not, whatever is installed."""
    return False
