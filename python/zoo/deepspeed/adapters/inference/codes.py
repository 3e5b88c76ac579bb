"""``dtype=torch.int8`` and ``quant``: weights in codes of 8 or 4 bits (:func:`zoo.nn.pack_linears`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters.inference.config import DeepSpeedInferenceConfig, InferenceQuantizationConfig
from zoo.deepspeed.adapters.utilities.logs import warning_once
from zoo.kernels.packed_linear import Activations
from zoo.nn import PackedLinear, pack_linears
from zoo.nn.packed import check_finite, unfit_for_codes
from zoo.registry.errors import near

_SIZES = 32, 16
"""Elements of a group: 32, where that makes as many groups as are asked for."""
_PERCEPTRON = re.compile(
    r"(^|\.)(mlp|ffn|feed_forward|intermediate|c_fc|fc1|fc2|dense_h_to_4h|dense_4h_to_h|gate_proj|up_proj|down_proj)(\.|$)"
)
_FUSED = frozenset({"qkv", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj", "attn_qkvw"})
_BY_NAME = {"num_bits": 8, "group_size": 32, "group_dim": 1, "symmetric": True}
"""Keys of an entry of ``post_init_quant``, and what they are where they are not given."""


@dataclass(frozen=True)
class Packing:
    """Layers that are packed alike: their names, and how, as :func:`zoo.nn.pack_linears` takes it. smaller: where a
    part of a matrix is no whole number of groups, groups of 16 will do."""

    names: tuple[str, ...]
    how: dict[str, Any]
    smaller: bool = False


@dataclass(frozen=True)
class Packings:
    """What is packed, each layer once, and by name why others are not."""

    each: tuple[Packing, ...]
    left: dict[str, str]


def decided(model: nn.Module, settings: DeepSpeedInferenceConfig, *, filled: bool) -> Packings:
    """What ``dtype`` and ``quant`` say of a model, before anything of it has changed; whole matrices count.

    Layers that are packed already stay so. ``q_groups`` is the least number of groups of a matrix: a group has 32
    elements of a row, or 16 where that needs more. ``mlp_extra_grouping`` asks for twice as many of matrices of
    perceptrons: by their names, or four times as long one way as the other. Activations are multiplied as they are,
    unless ``quant.activation.enabled`` is given, and True: then they are rounded to 8 bits.

    Args:
        filled: a checkpoint has the values.

    Raises:
        ValueError: a matrix cannot have so many groups, a name of ``post_init_quant`` is that of no layer, or of none
            that can be packed so, or a weight has NaN or infinite elements.
    """
    dtype = None if settings.dtype is torch.int8 else settings.dtype
    quant, found = settings.quant, list[Packing]()
    activations, left = activations_of(quant), dict[str, str]()
    for key, (said, names) in _by_name(model, quant.weight.post_init_quant).items():
        how = {"bits": said["num_bits"], "group_size": said["group_size"], "symmetric": bool(said["symmetric"])}
        unfit = _unfit(model, f"quant.weight.post_init_quant[{key!r}]", names, how, dtype=dtype, filled=filled)
        left |= unfit
        found.append(Packing(tuple(n for n in names if n not in unfit), {**how, "activations": activations}))
    if settings.dtype is torch.int8:
        taken = {name for one in found for name in one.names}
        each, others = _of_int8(model, quant, taken, filled=filled)
        found, left = [*found, *each], left | others
    if not filled:
        check_finite(model, [name for one in found for name in one.names])
    return Packings(tuple(found), left)


def pack(model: nn.Module, settings: DeepSpeedInferenceConfig, packings: Packings) -> dict[str, str]:
    """Pack what was decided, in place; the rest keeps the dtype that it has. Of a model that was cut meanwhile the
    parts: one that is no whole number of groups stays, and that is said.

    Returns:
        Linear layers that stay as they are, by name, and why.

    Raises:
        ValueError: a weight has NaN or infinite elements. Nothing is packed then.
    """
    left, each = dict(packings.left), list(packings.each)
    layers = _linears(model)
    known = {*left, *(name for one in each for name in one.names)}
    if settings.dtype is torch.int8 and layers.keys() - known:  # experts may have other names now
        more, others = _of_int8(model, settings.quant, known, filled=False)
        each, left = [*each, *more], left | others
    parts, stay = _fitting(model, layers, each)
    check_finite(model, [name for one in parts for name in one.names])
    for one in parts:
        pack_linears(model, **one.how, leave_out=[name for name in _linears(model) if name not in one.names])
    for name, why in stay.items():
        warning_once(f"init_inference: this rank's part of {name} stays as it is: {why}.")
    return left | stay


def _fitting(
    model: nn.Module, layers: Mapping[str, nn.Linear], each: Sequence[Packing]
) -> tuple[list[Packing], dict[str, str]]:
    """Those of them that parts can have, and by name why others stay."""
    found, stay = list[Packing](), dict[str, str]()
    for one in each:
        for size in (one.how["group_size"], *([_SIZES[-1]] if one.smaller else [])):
            names = [name for name in one.names if name in layers and name not in stay]
            names = [name for name in names if not any(name in done.names for done in found)]
            unfit = unfit_for_codes(model, bits=one.how["bits"], group_size=size)
            fits = tuple(name for name in names if name not in unfit)
            if fits:
                found.append(Packing(fits, {**one.how, "group_size": size}))
        done = {name for of in found for name in of.names}
        stay |= {name: unfit[name] for name in one.names if name in layers and name not in done}
    return found, stay


def _unfit(model: nn.Module, what: str, names: Sequence[str], how: Mapping[str, Any], **later: Any) -> dict[str, str]:
    """Those of the names that cannot be packed so, and why; not all of them."""
    try:
        unfit = unfit_for_codes(model, bits=how["bits"], group_size=how["group_size"], **later)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
    found = {name: unfit[name] for name in names if name in unfit}
    if len(found) == len(names):
        reasons = "; ".join(f"{name}: {why}" for name, why in list(found.items())[:3])
        raise ConfigError(f"{what}: no layer can be packed. {reasons}.")
    return found


def activations_of(quant: InferenceQuantizationConfig) -> Activations:
    """How codes multiply activations. That ``enabled`` is True by default asks for nothing: numbers would change."""
    asked = "activation" in quant.model_fields_set and "enabled" in quant.activation.model_fields_set
    return "int8" if quant.enabled and asked and quant.activation.enabled else "exact"


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _of_int8(
    model: nn.Module, quant: InferenceQuantizationConfig, taken: Collection[str], *, filled: bool
) -> tuple[list[Packing], dict[str, str]]:  # fmt: skip
    """``dtype=torch.int8``: all linear layers but those that are ``taken``; and by name why others stay."""
    sizes, left = dict[int, list[str]](), dict[str, str]()
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D":
            left[name] = "it is a Conv1D, whose matrix lies the other way round"
    unfit = unfit_for_codes(model, bits=quant.weight.num_bits, group_size=_SIZES[-1], filled=filled)
    for name, layer in _linears(model).items():
        if name in taken:
            continue
        if not quant.qkv.enabled and _is_qkv(name):
            left[name] = "quant.qkv.enabled is False"
        elif name in unfit:
            left[name] = unfit[name]
        else:
            sizes.setdefault(_group_size(name, layer, quant), []).append(name)
    if not sizes and not taken and not any(isinstance(module, PackedLinear) for module in model.modules()):
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3])
        raise ConfigError(
            f"dtype=torch.int8: no layer of {type(model).__name__} can be packed. "
            f"{reasons or 'It has no linear layers'}."
        )
    weight, activations = quant.weight, activations_of(quant)
    how = {"bits": weight.num_bits, "symmetric": weight.q_type == "symmetric", "activations": activations}
    return [Packing(tuple(of), {**how, "group_size": size}, smaller=True) for size, of in sizes.items()], left


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


def pack_named(model: nn.Module, given: Mapping[str, Any]) -> dict[str, str]:
    """``post_init_quant``: part of a name → how the layers with it are packed; what :func:`pack` returns and raises."""
    weight: Any = {"post_init_quant": dict(given)}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    settings = DeepSpeedInferenceConfig(dtype=dtype, quant=InferenceQuantizationConfig(weight=weight))
    return pack(model, settings, decided(model, settings, filled=False))
