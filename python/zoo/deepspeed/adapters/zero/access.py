"""``deepspeed.utils.safe_*``: what ``zoo.zero`` gives, with DeepSpeed's answers for parameters that are nobody's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import zoo.deepspeed.adapters.zero.parameters  # noqa: F401 (gives parameters of stage 3 their attributes)
from zoo import zero
from zoo.shard.buckets import bucket_of


class DeprecatedException(Exception):
    """What DeepSpeed raises for functions that are no longer there."""


def _is_known(name: str, param: Any) -> bool:
    if not isinstance(param, torch.Tensor):
        raise ValueError(
            f"{name} got {param!r}, a {type(param).__name__}; give it the parameter, as model.layer.weight."
        )
    return bucket_of(param) is not None


def _whole(read: Callable[..., Any]) -> Callable[..., Any]:
    def one(param: nn.Parameter) -> torch.Tensor | None:
        return read(param) if _is_known(read.__name__, param) else None

    def state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
        return read(param, optim_state_key) if _is_known(read.__name__, param) else None

    return _named(state if "state" in read.__name__ else one, read, "None for a parameter that no engine has.")


def _local(act: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's are for stage 3 alone."""

    def check(param: Any) -> None:
        if not _is_known(act.__name__, param) or not hasattr(param, "ds_id"):
            raise AssertionError(
                f"{act.__name__}: the tensor of shape {tuple(param.shape)} is no parameter that ZeRO stage 3 "
                "partitions; safe_get_full_* and safe_set_full_* are for all stages."
            )

    def get(param: nn.Parameter) -> torch.Tensor | None:
        check(param)
        found: torch.Tensor | None = act(param)
        return found

    def get_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
        check(param)
        found: torch.Tensor | None = act(param, optim_state_key)
        return found

    def put(param: nn.Parameter, value: torch.Tensor) -> None:
        check(param)
        act(param, value)

    def put_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
        check(param)
        act(param, value, optim_state_key)

    sets, states = act.__name__.startswith("safe_set"), "state" in act.__name__
    made = (put_state if states else put) if sets else (get_state if states else get)
    return _named(made, act, "An AssertionError for a parameter that stage 3 does not partition.")


def _named(made: Callable[..., Any], like: Callable[..., Any], differs: str) -> Callable[..., Any]:
    made.__name__ = made.__qualname__ = like.__name__
    made.__doc__ = f"As :func:`zoo.zero.{like.__name__}`. {differs}"
    return made


safe_get_full_fp32_param = _whole(zero.safe_get_full_fp32_param)
safe_get_full_optimizer_state = _whole(zero.safe_get_full_optimizer_state)
safe_get_local_fp32_param = _local(zero.safe_get_local_fp32_param)
safe_get_local_grad = _local(zero.safe_get_local_grad)
safe_get_local_optimizer_state = _local(zero.safe_get_local_optimizer_state)
safe_set_local_fp32_param = _local(zero.safe_set_local_fp32_param)
safe_set_local_grad = _local(zero.safe_set_local_grad)
safe_set_local_optimizer_state = _local(zero.safe_set_local_optimizer_state)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """As :func:`zoo.zero.safe_get_full_grad`. ``param.grad`` for a parameter that no engine has."""
    return zero.safe_get_full_grad(param) if _is_known("safe_get_full_grad", param) else param.grad


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """The gradient g of each parameter p becomes ``update_func(g, p)``, before ``step``. A collective.

    Parameters without a gradient, on any rank, are left out.
    """
    for param in param_list:
        if not _is_known("safe_update_full_grad_vectorized", param):
            if param.grad is not None:
                param.grad.copy_(update_func(param.grad, param))
            continue
        if not param.requires_grad:
            continue
        grad = zero.safe_get_full_grad(param)
        if grad is not None:
            zero.safe_set_full_grad(param, update_func(grad, param))
