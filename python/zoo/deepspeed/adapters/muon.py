"""``deepspeed.runtime.zero.muon``: :class:`zoo.optim.Muon` and its orthogonalisation with DeepSpeed's arguments.

Legend: A rows, B columns of a matrix.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from zoo import optim
from zoo.optim.muon import orthogonal

NS_METHODS = {"standard", "gram"}
"""Orders of the same products; zoo has one."""

_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0}
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}


def _check_method(ns_method: str) -> None:
    if ns_method not in NS_METHODS:
        raise ValueError(f"ns_method={ns_method!r}; allowed are {', '.join(sorted(NS_METHODS))}.")


def zeropower_via_newtonschulz5(G: torch.Tensor, steps: int) -> torch.Tensor:
    """(..., A, B) each matrix with singular values near 1, in bf16; see :func:`zoo.optim.muon.orthogonal`."""
    if G.ndim < 2:
        raise ValueError(f"a tensor of shape {tuple(G.shape)} has no matrices; Muon takes two dimensions or more.")
    matrices = G.reshape(-1, *G.shape[-2:])
    return torch.stack([orthogonal(one, steps=steps) for one in matrices]).view(G.shape)


def muon_update(
    grad: torch.Tensor, momentum: torch.Tensor, beta: float = 0.95, ns_steps: int = 5, nesterov: bool = True,
    ns_method: str = "gram", is_expert_group: bool = False, num_heads: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """b ← β·b + (1-β)·g, and √max(1, A/B) · orthogonal(b, or (1-β)·g + β·b with nesterov), of the gradient's dtype.

    ``momentum`` is b and changes, ``grad`` does not. All dimensions of a tensor of four but the first are columns; of
    one of three, as of stacked experts, each matrix is by itself.

    Args:
        num_heads: A is divided by so many heads, and each is orthogonal by itself.

    Raises:
        ValueError: an unknown ``ns_method``, no matrix, rows that cannot be divided so.
    """
    _check_method(ns_method)
    momentum.lerp_(grad, 1 - beta)
    direction = grad.lerp(momentum, beta) if nesterov else momentum
    if direction.ndim == 4 and not is_expert_group:
        direction = direction.flatten(1)
    if num_heads is not None:
        rows = direction.shape[0]
        if direction.ndim != 2 or rows % num_heads:
            raise ValueError(
                f"num_heads={num_heads} with shape {tuple(grad.shape)}; needed is a matrix whose rows they divide."
            )
        direction = direction.view(num_heads, rows // num_heads, -1)
    found = zeropower_via_newtonschulz5(direction, ns_steps) * math.sqrt(
        max(1.0, direction.shape[-2] / max(direction.shape[-1], 1))
    )
    return found.to(grad.dtype).reshape(grad.shape)


class Muon(optim.Muon):
    """See :class:`zoo.optim.Muon`; every rank that has a gradient updates."""

    def __init__(
        self, params: Any, lr: float = 0.02, weight_decay: float = 0, momentum: float = 0.95, ns_method: str = "gram",
        **more: Any,
    ) -> None:  # fmt: skip
        _check_method(ns_method)
        super().__init__(params, lr, weight_decay, momentum, **more)


class MuonWithAuxAdam(optim.Muon):
    """Groups with ``use_muon`` are updated by :class:`Muon`, those without as AdamW does, with the defaults of each.

    Raises:
        ValueError: a group that does not say ``use_muon``, or has a key that its optimizer does not know.
    """

    def __init__(self, param_groups: Any, **more: Any) -> None:
        groups = [_group(number, dict(group)) for number, group in enumerate(param_groups)]
        super().__init__(groups, **more)


SingleDeviceMuon, SingleDeviceMuonWithAuxAdam = Muon, MuonWithAuxAdam


def _group(number: int, group: dict[str, Any]) -> dict[str, Any]:
    """A group of :class:`zoo.optim.Muon`."""
    if "use_muon" not in group:
        raise ValueError(f'parameter group {number} does not say "use_muon"; say True for matrices of hidden layers.')
    defaults = _MUON if group["use_muon"] else _ADAM
    _check_method(group.pop("ns_method", "gram"))
    unknown = sorted(set(group) - set(defaults) - {"params", "use_muon", "name"})
    if unknown:
        raise ValueError(f"parameter group {number} has {', '.join(unknown)}; known are {', '.join(sorted(defaults))}.")
    group = {**defaults, **group}
    if not group["use_muon"]:
        group["adam_eps"] = group.pop("eps")
    return group
