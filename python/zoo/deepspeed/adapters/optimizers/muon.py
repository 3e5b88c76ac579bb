"""``deepspeed.runtime.zero.muon``: :class:`zoo.optim.Muon` and its orthogonalisation with DeepSpeed's arguments.

Legend: A rows, B columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zoo import optim
from zoo.config import ConfigError
from zoo.deepspeed.adapters.configuration.plain_values import value_as_meant
from zoo.optim.muon import orthogonal

NS_METHODS = {"standard", "gram"}
"""Orders of the same products; zoo has one."""

_SWITCHES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "per_head_muon")
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


def groups_by_section(
    model: nn.Module, parameters: Sequence[Any] | None, params: Mapping[str, Any]
) -> list[dict[str, Any]]:  # fmt: skip
    """The groups of :class:`MuonWithAuxAdam` for a configuration's ``optimizer`` of the type "Muon": matrices that are
    neither embeddings nor a head (by their names, "embed" and "lm_head") by Muon, all others by AdamW. A parameter that
    says ``use_muon`` itself says it anew: it is marked by this.

    Args:
        parameters: parameters or groups, whose own options come first; None: all that are trained.
        params: the options: lr, or muon_lr and adam_lr, momentum, ns_method; betas, eps; weight_decay.

    Raises:
        ConfigError: what Muon cannot do.
    """
    params = {key: value_as_meant(bool if key in _SWITCHES else None, value) for key, value in params.items()}
    _check_section(params)
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))
        parameter.use_muon = matrix  # type: ignore[attr-defined]
    given = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    groups = [dict(item) for item in given if isinstance(item, Mapping)]
    loose = [item[1] if isinstance(item, tuple) else item for item in given if not isinstance(item, Mapping)]
    found: list[dict[str, Any]] = []
    for group in [*groups, *([{"params": loose}] if loose else [])]:
        for matrices, defaults, rate in ((True, _MUON, "muon_lr"), (False, _ADAM, "adam_lr")):
            members = [p for p in group["params"] if getattr(p, "use_muon", False) is matrices]
            known = (*defaults, "ns_method") if matrices else tuple(defaults)
            options = {key: params[key] for key in known if key in params}
            if rate in params:
                options["lr"] = params[rate]
            options |= {key: value for key, value in group.items() if key in known}
            if members:
                found.append(_group(len(found), {"params": members, "use_muon": matrices, **options}))
    return found


def _check_section(params: Mapping[str, Any]) -> None:
    known = {*_MUON, *_ADAM, "muon_lr", "adam_lr", "ns_method", "torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    unknown = sorted(set(params) - known - {"per_head_muon"})
    if unknown:
        raise ConfigError(f"optimizer.params of Muon has {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
    if params.get("per_head_muon") or not params.get("adam_w_mode", True):
        raise ConfigError(
            "optimizer.params of Muon: per_head_muon and adam_w_mode=false are not there. Leave them out; "
            "muon_update(num_heads=...) orthogonalises by head."
        )


def _group(number: int, group: dict[str, Any]) -> dict[str, Any]:
    """A group of :class:`zoo.optim.Muon`."""
    if "adam_eps" in group:  # it was one already
        return group
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
