"""Linear layers whose weight stays in 8 or 4 bits, in memory and in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from zoo.compression.attach import attach, attached_to, class_of
from zoo.compression.post_training import Layer, Uniform
from zoo.compression.technique import inner_weights
from zoo.kernels.packed_linear import pack
from zoo.nn import PackedLinear
from zoo.parts import has_user_hooks, own_hook

Tensor = torch.Tensor
ModuleT = TypeVar("ModuleT", bound=nn.Module)
SIZES = (8, 4)
"""Bits of a code that there are kernels for."""


def packs(layer: Layer) -> str:
    """Why a quantised layer cannot be packed, "" where it can."""
    grid, size = layer.quantised.grid, layer.quantised.group_size
    if not isinstance(grid, Uniform) or grid.bits not in SIZES:
        return f"its grid is {grid}; there are kernels for equal steps of {' and '.join(map(str, SIZES))} bits"
    if size % 16:
        return f"its groups have {size} elements; kernels need a multiple of 16"
    return ""


def packed_of(layer: Layer, bias: Tensor | None = None, name: str = "the layer") -> PackedLinear:
    """A layer with the same codes.

    Raises:
        ValueError: there is no kernel for its grid or groups.
    """
    if why := packs(layer):
        raise ValueError(f"{name} cannot be packed: {why}.")
    found = layer.quantised
    codes = found.codes.reshape(-1)
    symmetric = len(found.params) == 1
    if found.grid.bits == 4:
        codes = (codes & 15).to(torch.uint8)
        codes = codes[0::2] | codes[1::2] << 4
        codes = codes.view(torch.int8) if symmetric else codes
    else:
        codes = codes.to(torch.int8 if symmetric else torch.uint8)
    numbers = [p.float().reshape(-1).contiguous() for p in found.params]
    rows, columns = found.codes.shape
    weight = pack(
        codes.contiguous(), numbers[0], None if symmetric else numbers[1], shape=(rows, columns),
        bits=int(found.grid.bits), group_size=found.group_size,
    )  # fmt: skip
    return PackedLinear(weight, bias, layer.low_rank)


def with_transforms_of(module: nn.Module, instead: ModuleT, name: str) -> ModuleT:
    """The layer with codes in the place of a module, with what changes the module's inputs and outputs.

    Raises:
        ValueError: there is a transform on the weight, which codes cannot have.
    """
    for (where, path), transforms in attached_to(module).items():
        if where == "weight":
            raise ValueError(f"{name} has a transform on its weight, and codes have none: call redundancy_clean first.")
        for transform in transforms:
            attach(instead, where, path, transform)
    return instead


def pack_model(model: nn.Module, layers: Mapping[str, Layer]) -> nn.Module:
    """Puts a :class:`PackedLinear` in the place of each of these linear layers; the dense weights are gone then. What
    changes their inputs and outputs stays.

    Args:
        layers: of :func:`zoo.compression.post_training.quantise`.

    Returns:
        The model.

    Raises:
        ValueError: a layer that cannot be packed, is not there, or has a transform on its weight; before anything is
            changed.
    """
    made = {}
    for name, layer in layers.items():
        module = model.get_submodule(name)
        if isinstance(module, PackedLinear):
            raise ValueError(f"{name} is a PackedLinear; only linear layers are packed, and this one is.")
        if why := more_than_linear(model, module):
            raise ValueError(f"{name} is a {class_of(module).__name__}{why}.")
        made[name] = with_transforms_of(module, packed_of(layer, module.bias, name).train(module.training), name)  # type: ignore[arg-type]
    return put(model, made)


def more_than_linear(model: nn.Module, module: nn.Module) -> str:
    """What of a module the layer in its place, packed or with a weight of torchao, would not do; "": nothing."""
    kind = nn.Linear if isinstance(module, nn.Linear) else PackedLinear
    if not isinstance(module, kind):
        return "; only linear layers are replaced"
    if class_of(module).forward is not kind.forward or "forward" in module.__dict__:
        return " with a forward of its own, which the layer in its place has not; leave it out"
    if has_user_hooks(module):
        return " with hooks, which the layer in its place has not; remove them, and register them on that one"
    if id(module) in inner_weights(model):
        return ", whose weight the attention around it reads without calling it; leave it out"
    return ""


def put(model: nn.Module, made: Mapping[str, nn.Module]) -> nn.Module:
    """These modules in the places of those that have the names now, under all their names.

    Returns:
        The model; the new module where it is the model itself that is replaced.
    """
    instead = {id(model.get_submodule(name)): module for name, module in made.items()}
    for above in list(model.modules()):
        for last, module in list(above._modules.items()):
            if id(module) in instead:
                setattr(above, last, instead[id(module)])
                if isinstance(above, nn.TransformerEncoderLayer):
                    # Its fused kernels read weights without calling their modules; hooks keep them off.
                    instead[id(module)].register_forward_pre_hook(_is_called)
    return instead.get(id(model), model)


@own_hook
def _is_called(module: nn.Module, args: Any) -> None:
    """Nothing: see :func:`put`."""
