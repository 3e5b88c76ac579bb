"""How many parameters a module has: of the model, kept by this rank, and at work for one token.

Three numbers of a parameter are told apart:

* *numel*: elements of the tensor that this rank computes with. One that ZeRO has partitioned counts whole.
* *kept*: elements that this rank keeps of it; at ZeRO stage 3 its part alone.
* *active*: elements that one token meets. Of E experts, of which a token goes through k, k / E.

A parameter that several modules have (tied weights) counts once in whatever contains them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

__all__ = ["Parameters", "active_fractions", "parameters_of"]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Elements of parameters; see the file."""

    numel: int = 0
    kept: int = 0
    active: int = 0


def parameters_of(model: nn.Module) -> dict[int, Parameters]:
    """By ``id`` of each module of ``model``: of what it and the modules in it have, each tensor once."""
    fractions = active_fractions(model)
    single = {id(p): _single(p, fractions.get(id(p), Fraction(1))) for p in model.parameters()}
    return {id(module): _sum(single[number] for number in _own(module)) for module in model.modules()}


def _own(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _sum(parts: Iterator[tuple[int, int, Fraction]]) -> Parameters:
    numel, kept, active = 0, 0, Fraction(0)
    for one in parts:
        numel, kept, active = numel + one[0], kept + one[1], active + one[2]
    return Parameters(numel=numel, kept=kept, active=math.ceil(active))


def _single(parameter: nn.Parameter, fraction: Fraction) -> tuple[int, int, Fraction]:
    bucket = getattr(parameter, "_zoo_bucket", None)  # of zoo.shard, which lies above this package
    if bucket is None or not bucket.partitioned:
        numel = parameter.numel()
        return numel, numel, numel * fraction
    slot = parameter._zoo_slot  # type: ignore[attr-defined]
    tensor, start = bucket.layout.tensors[slot], bucket.layout.offsets[slot]
    first, last = bucket.own_range
    kept = max(0, min(last, start + tensor.numel) - max(first, start))
    return tensor.numel, kept, tensor.numel * fraction


# -- experts ----------------------------------------------------------------------------------------------------------

_NUMBERS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts")
_CHOICES = ("top_k", "k", "num_experts_per_tok", "moe_top_k", "experts_per_token", "num_experts_per_token")
_ROUTERS = ("gate", "router", "wg")


def active_fractions(model: nn.Module) -> Mapping[int, Fraction]:
    """``id`` of each parameter of an expert: k / E.

    Experts are: parameters that zoo.moe has marked; modules of a list called "experts"; parameters of a module called
    "experts", or of one that has a number of experts, with one row for each. E and k are what the layer, its router,
    its configuration or the model's calls by one of the field's names; where k is not found every expert is active.
    """
    found: dict[int, Fraction] = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] != "experts" and not _marked(module):
            continue
        layers = [model.get_submodule(above) for above in _above(path)]
        of = _experts(module, layers)
        chosen = _choices(layers)
        if not of or not chosen or not 0 < chosen <= of:
            continue
        for parameter in module.parameters():
            if _is_expert(parameter, module, of):
                found.setdefault(id(parameter), Fraction(chosen, of))
    return found


def _above(path: str) -> list[str]:
    """The paths of a module and of what contains it, from the inside."""
    names = path.split(".") if path else []
    return [".".join(names[:length]) for length in range(len(names), -1, -1)]


def _marked(module: nn.Module) -> bool:
    return any(_mark(parameter) for parameter in module.parameters(recurse=False))


def _mark(parameter: Any) -> bool:
    return bool(getattr(parameter, "__dict__", {}).get("_zoo_expert", False))


def _experts(module: nn.Module, layers: list[nn.Module]) -> int | None:
    if isinstance(module, nn.ModuleList):
        listed = len(module)
        for layer in layers[1:3]:
            number = _number(layer, _NUMBERS)
            if number is not None and number >= listed:  # of all ranks
                return number
        return listed
    for layer in layers[:3]:
        number = _number(layer, _NUMBERS)
        if number is not None:
            return number
    return None


def _choices(layers: list[nn.Module]) -> int | None:
    """From the inside out; of each layer its own, its router's and its configuration's."""
    for layer in layers:
        routers = [getattr(layer, name, None) for name in _ROUTERS]
        for holder in (layer, *routers, getattr(layer, "config", None)):
            number = None if holder is None else _number(holder, _CHOICES)
            if number is not None:
                return number
    return None


def _number(holder: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _is_expert(parameter: torch.Tensor, module: nn.Module, of: int) -> bool:
    if _mark(parameter) or isinstance(module, nn.ModuleList):
        return True
    shape = parameter.shape
    local = getattr(module, "num_local", of)
    return len(shape) > 1 and shape[0] in (of, local)
