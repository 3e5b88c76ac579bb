"""``dtype=torch.int8`` and ``quant``: weights in codes of 8 or 4 bits (:func:`zoo.nn.pack_linears`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters.inference.config import DeepSpeedInferenceConfig, InferenceQuantizationConfig
from zoo.kernels.packed_linear import Activations
from zoo.registry.errors import near

_SIZES = 32, 16
"""Elements of a group: 32, where that makes as many groups as are asked for."""
_PERCEPTRON = re.compile(
    r"(^|\.)(mlp|ffn|feed_forward|intermediate|c_fc|fc1|fc2|dense_h_to_4h|dense_4h_to_h|gate_proj|up_proj|down_proj)(\.|$)"
)
_FUSED = frozenset({"qkv", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj", "attn_qkvw"})
_BY_NAME = {"num_bits": 8, "group_size": 32, "group_dim": 1, "symmetric": True}
"""Keys of an entry of ``post_init_quant``, and what they are where they are not given."""


def pack(model: nn.Module, settings: DeepSpeedInferenceConfig) -> dict[str, str]:
    """Pack what ``dtype`` and ``quant`` say, in place; the rest keeps the dtype that it has.

    Layers that are packed already stay so. ``q_groups`` is the least number of groups of a matrix: a group has 32
    elements of a row, or 16 where that needs more. ``mlp_extra_grouping`` asks for twice as many of matrices of
    perceptrons: by their names, or four times as long one way as the other. Activations are multiplied as they are,
    unless ``quant.activation.enabled`` is given, and True: then they are rounded to 8 bits.

    Returns:
        Linear layers that stay as they are, by name, and why.

    Raises:
        ConfigError: a matrix cannot have so many groups, or a name of ``post_init_quant`` is that of no layer.
    """
    left = pack_named(model, settings.quant.weight.post_init_quant, activations_of(settings.quant))
    if settings.dtype is torch.int8:
        left |= _pack_all(model, settings.quant)
    return left


def check(model: nn.Module, settings: DeepSpeedInferenceConfig) -> None:
    """Raise what :func:`pack` would raise of names and groups, before anything has changed."""
    _by_name(model, settings.quant.weight.post_init_quant)
    if settings.dtype is torch.int8:
        _by_size(model, settings.quant)


def activations_of(quant: InferenceQuantizationConfig) -> Activations:
    """How codes multiply activations. That ``enabled`` is True by default asks for nothing: numbers would change."""
    asked = "activation" in quant.model_fields_set and "enabled" in quant.activation.model_fields_set
    return "int8" if quant.enabled and asked and quant.activation.enabled else "exact"


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _pack_all(model: nn.Module, quant: InferenceQuantizationConfig) -> dict[str, str]:
    sizes, left = _by_size(model, quant)
    symmetric = quant.weight.q_type == "symmetric"
    for size, names in sizes.items():
        how = {"bits": quant.weight.num_bits, "group_size": size, "symmetric": symmetric}
        left |= _pack(model, names, **how, activations=activations_of(quant))
    return left


def _by_size(model: nn.Module, quant: InferenceQuantizationConfig) -> tuple[dict[int, list[str]], dict[str, str]]:
    """(size of groups → layers, the others and why)."""
    from zoo.nn import PackedLinear

    sizes: dict[int, list[str]] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D":
            left[name] = "it is a Conv1D, whose matrix lies the other way round"
    for name, layer in _linears(model).items():
        if not quant.qkv.enabled and _is_qkv(name):
            left[name] = "quant.qkv.enabled is False"
        elif layer.in_features % _SIZES[-1]:
            left[name] = f"its rows of {layer.in_features} are no whole number of groups of {_SIZES[-1]}"
        else:
            sizes.setdefault(_group_size(name, layer, quant), []).append(name)
    if not sizes and not any(isinstance(module, PackedLinear) for module in model.modules()):
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3])
        raise ConfigError(
            f"dtype=torch.int8: no layer of {type(model).__name__} can be packed. "
            f"{reasons or 'It has no linear layers'}."
        )
    return sizes, left


def _pack(model: nn.Module, names: list[str], **how: Any) -> dict[str, str]:
    from zoo.nn import pack_linears

    chosen = set(names)
    left = pack_linears(model, **how, leave_out=[name for name in _linears(model) if name not in chosen])
    return {name: why for name, why in left.items() if name in chosen}


def _group_size(name: str, layer: nn.Linear, quant: InferenceQuantizationConfig) -> int:
    asked = quant.weight.q_groups * (2 if quant.mlp_extra_grouping and _is_perceptron(name, layer) else 1)
    elements = layer.in_features * layer.out_features
    for size in _SIZES:
        if layer.in_features % size == 0 and elements // size >= asked:
            return size
    raise ConfigError(
        f"quant asks for {asked} groups of {name}, whose {layer.out_features} x {layer.in_features} elements make "
        f"{elements // _SIZES[-1]} of {_SIZES[-1]} at most; give a smaller q_groups."
    )


def _is_perceptron(name: str, layer: nn.Linear) -> bool:
    one, other = layer.in_features, layer.out_features
    return bool(_PERCEPTRON.search(name)) or max(one, other) == 4 * min(one, other)


def _is_qkv(name: str) -> bool:
    from zoo.tensor.huggingface import KEYS, QUERIES

    return name.rpartition(".")[2] in (QUERIES | KEYS | _FUSED)


def _by_name(model: nn.Module, given: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Part of a name → (how, the layers whose names have it)."""
    layers, found = _linears(model), dict[str, tuple[dict[str, Any], list[str]]]()
    for key, how in given.items():
        if not isinstance(how, Mapping):
            raise ConfigError(f"quant.weight.post_init_quant[{key!r}] is {how!r}; it takes {', '.join(_BY_NAME)}.")
        for wrong in set(how) - set(_BY_NAME):
            like = near(str(wrong), _BY_NAME) or list(_BY_NAME)
            raise ConfigError(f"quant.weight.post_init_quant[{key!r}] has {wrong!r}; near it: {', '.join(like)}.")
        said = {**_BY_NAME, **how}
        if said["group_dim"] not in (1, -1):
            raise ConfigError(
                f"quant.weight.post_init_quant[{key!r}]: group_dim={said['group_dim']}; groups lie along rows, dim 1."
            )
        names = [name for name in layers if key in name]
        if not names:
            raise ConfigError(
                f"quant.weight.post_init_quant: no linear layer has {key!r} in its name; there are "
                f"{', '.join(list(layers)[:8])}."
            )
        for other, (_, theirs) in found.items():
            if both := sorted(set(names) & set(theirs)):
                raise ConfigError(f"quant.weight.post_init_quant: {key!r} and {other!r} are both in {both[0]!r}.")
        found[key] = said, names
    return found


def pack_named(
    model: nn.Module, given: Mapping[str, Any], activations: Activations = "exact"
) -> dict[str, str]:  # fmt: skip
    """``post_init_quant``: part of a name → how the layers with it are packed; what :func:`pack` returns and raises."""
    left: dict[str, str] = {}
    for said, names in _by_name(model, given).values():
        left |= _pack(
            model, names, bits=said["num_bits"], group_size=said["group_size"], symmetric=bool(said["symmetric"]),
            activations=activations,
        )  # fmt: skip
    return left
