"""Linear layers whose weight stays in 8 or 4 bits, in memory and in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from zoo.compression.attach import attach, attached_to, class_of
from zoo.compression.post_training import Layer, Uniform
from zoo.compression.technique import inner_weights
from zoo.kernels.packed_linear import PackedWeight, pack, packed_linear, unpack, unpack_weight
from zoo.parts import has_user_hooks, own_hook

Tensor = torch.Tensor
ModuleT = TypeVar("ModuleT", bound=nn.Module)
SIZES = (8, 4)
"""Bits of a code that there are kernels for."""


class PackedLinear(nn.Module):
    """y = x·(Ŵ + U·V)ᵀ + b with Ŵ in codes of 8 or 4 bits: ``zoo.kernels.packed_linear``.

    The weight is not trained; what is added beside it, such as LoRA, is, and so is the bias. x (…, K) of fp32, bf16 or
    fp16 gives (…, N) of the same dtype. In a ``state_dict`` codes are in the order of rows, two of 4 bits a byte, as
    ``zoo.kernels.quantise`` writes them: it does not change with the kernels.

    Bytes: N·K·bits/8 of codes, 4 for each group (8 with minima); with compensation 4·rank·(N + K).

    Args:
        weight: packed.
        bias: (N,), or None.
        low_rank: U (N, rank) and V (rank, K).
    """

    q: Tensor
    scales: Tensor
    minima: Tensor | None
    left: Tensor | None
    right: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self, weight: PackedWeight, bias: Tensor | None = None, low_rank: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits, self.group_size = weight.bits, weight.group_size
        self.register_buffer("q", weight.q)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("minima", weight.minima)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
        left, right = low_rank if low_rank is not None else (None, None)
        self.register_buffer("left", left)
        self.register_buffer("right", right)

    @property
    def packed(self) -> PackedWeight:
        """Ŵ."""
        shape = (self.out_features, self.in_features)
        return PackedWeight(self.q, self.scales, self.minima, shape, self.bits, self.group_size)

    @property
    def num_bytes(self) -> int:
        """Of codes, numbers of groups, compensation and bias."""
        parts = (self.q, self.scales, self.minima, self.left, self.right, self.bias)
        return sum(t.nbytes for t in parts if t is not None)

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        y = packed_linear(x, self.packed, self.bias)
        if self.left is not None and self.right is not None:
            thin = x.float() @ self.right.T
            y = y + (thin @ self.left.T).to(y.dtype)
        return y

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Ŵ + U·V, (N, K)."""
        weight = unpack_weight(self.packed)
        if self.left is not None and self.right is not None:
            weight.addmm_(self.left, self.right)
        return weight.to(dtype)

    def extra_repr(self) -> str:
        """Sizes."""
        kind = "symmetric" if self.minima is None else "with minima"
        more = "" if self.left is None else f", low_rank={self.left.shape[1]}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group_size={self.group_size}, {kind}{more}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        """Moves between devices; numbers of groups stay fp32, whatever dtype the model is converted to."""
        kept = {name: getattr(self, name) for name in ("scales", "minima", "left", "right")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            if before is not None and getattr(self, name).dtype is not torch.float32:
                setattr(self, name, before.to(self.q.device))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in zip(("q", "scales", "minima"), unpack(self.packed), strict=True):
            if value is not None:
                destination[prefix + name] = value

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine = {k: v for k, v in state_dict.items() if k.startswith(prefix)}
        names = [prefix + name for name in ("q", "scales", "minima")]
        if all(name in mine for name in names[:2]) and (self.minima is None or names[2] in mine):
            shape = (self.out_features, self.in_features)
            try:
                found = pack(
                    mine[names[0]].cpu(), mine[names[1]].cpu(), None if self.minima is None else mine[names[2]].cpu(),
                    shape=shape, bits=self.bits, group_size=self.group_size,
                )  # fmt: skip
            except ValueError as error:
                error_msgs.append(f"the packed layer {prefix.rstrip('.')!r}: {error}")
                return
            mine.update(zip(names, (found.q, found.scales, found.minima), strict=True))
            if self.minima is None:
                del mine[names[2]]
        super()._load_from_state_dict(
            mine, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )  # fmt: skip


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
