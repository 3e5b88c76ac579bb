"""Linear layers whose weight stays in codes of 8 or 4 bits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zoo.kernels.packed_linear import (
    Activations,
    PackedWeight,
    is_int8,
    pack,
    pack_weight,
    packed_linear,
    unpack,
    unpack_weight,
)
from zoo.parts import has_user_hooks

Tensor = torch.Tensor
logger = logging.getLogger(__name__)


@runtime_checkable
class PartialLinear(Protocol):
    """A linear layer that multiplies by a part of a weight, and does more than that product: zoo.tensor's."""

    def multiplied(self) -> tuple[Tensor, Tensor | None]:
        """Weight (N, K) and bias (N,) of the product."""
        ...

    def hand_over(self, successor: nn.Module) -> None:
        """``successor`` computes the product, and gets the rest of the forward."""
        ...


class PackedLinear(nn.Module):
    """y = x·(Ŵ + U·V)ᵀ + b with Ŵ in codes of 8 or 4 bits: ``zoo.kernels.packed_linear``.

    The weight is not trained; what is added beside it, such as LoRA, is, and so is the bias. x (…, K) of fp32, bf16 or
    fp16 gives (…, N) of the same dtype. In a ``state_dict`` codes are in the order of rows, two of 4 bits a byte, as
    ``zoo.kernels.quantise`` writes them: it does not change with the kernels.

    Bytes: N·K·bits/8 of codes, 4 for each group (8 with minima); with compensation 4·rank·(N + K).

    Args:
        weight: packed.
        bias: (N,), or None. A parameter that is not trained is not trained here.
        low_rank: U (N, rank) and V (rank, K). They multiply x as it is.
        activations: "int8": Ŵ multiplies x rounded to 8 bits in blocks of 32, which costs accuracy and is faster where
            few tokens are multiplied. A ``state_dict`` does not have it.

    Raises:
        ValueError: other activations.
    """

    q: Tensor
    scales: Tensor
    minima: Tensor | None
    left: Tensor | None
    right: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self, weight: PackedWeight, bias: Tensor | None = None, low_rank: tuple[Tensor, Tensor] | None = None, *,
        activations: Activations = "exact",
    ) -> None:  # fmt: skip
        super().__init__()
        is_int8(activations)
        self._activations: Activations = activations
        self.out_features, self.in_features = weight.shape
        self.bits, self.group_size = weight.bits, weight.group_size
        self.register_buffer("q", weight.q)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("minima", weight.minima)
        trained = bias.requires_grad if isinstance(bias, nn.Parameter) else True
        own = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=trained)
        self.register_parameter("bias", own)
        left, right = low_rank if low_rank is not None else (None, None)
        self.register_buffer("left", left)
        self.register_buffer("right", right)

    @property
    def packed(self) -> PackedWeight:
        """Ŵ."""
        shape = (self.out_features, self.in_features)
        return PackedWeight(self.q, self.scales, self.minima, shape, self.bits, self.group_size)

    @property
    def activations(self) -> Activations:
        """How x is multiplied: "exact" or "int8"."""
        return self._activations

    @property
    def num_bytes(self) -> int:
        """Of codes, numbers of groups, compensation and bias."""
        parts = (self.q, self.scales, self.minima, self.left, self.right, self.bias)
        return sum(t.nbytes for t in parts if t is not None)

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y with this bias in the place of its own; None: with none."""
        y = packed_linear(x, self.packed, bias, activations=self._activations)
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
        more += "" if self._activations == "exact" else f", activations={self._activations}"
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
        needed, given = names if self.minima is not None else names[:2], [name for name in names if name in mine]
        layer, wrong = f"the packed layer {prefix.rstrip('.')!r}", ""
        if given and given != needed:
            takes, gets = (", ".join(name.removeprefix(prefix) for name in of) for of in (needed, given))
            wrong = (
                f"{layer} takes {takes} together, and gets {gets}: codes with minima and without are of two kinds, and "
                "one part says nothing."
            )
        if all(name in given for name in needed):
            shape = (self.out_features, self.in_features)
            try:
                found = pack(
                    mine[names[0]].cpu(), mine[names[1]].cpu(), None if self.minima is None else mine[names[2]].cpu(),
                    shape=shape, bits=self.bits, group_size=self.group_size,
                )  # fmt: skip
            except ValueError as error:
                wrong = f"{layer}: {error}"
            else:
                mine.update({names[0]: found.q, names[1]: found.scales})
                mine |= {} if found.minima is None else {names[2]: found.minima}
        if wrong:
            error_msgs.append(wrong)
            return
        super()._load_from_state_dict(
            mine, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )  # fmt: skip


def pack_linears(
    model: nn.Module, *, bits: int = 8, group_size: int | None = 32, symmetric: bool = True,
    leave_out: Sequence[str] = (), activations: Activations = "exact",
) -> dict[str, str]:  # fmt: skip
    """Put a :class:`PackedLinear` in the place of each ``nn.Linear``; weights are rounded to the nearest codes.

    For models that generate. A matrix that an embedding has too (a tied head) becomes codes in the layer and stays
    numbers in the embedding; layers that share a weight share codes. Calibrated codes are those of
    ``zoo.compression.post_training``.

    Args:
        bits, group_size, symmetric: as :func:`zoo.kernels.packed_linear.pack_weight` takes them.
        leave_out: patterns of names, as :mod:`fnmatch` reads them, of layers that stay as they are.
        activations: as :class:`PackedLinear` takes them.

    Returns:
        Linear layers that stay as they are, by name, and why; it is logged too.

    Raises:
        ValueError: a pattern fits no layer; bits, a group size or activations that cannot be; no layer can be packed; a
            weight has NaN or infinite elements, or an optimizer of zoo that trains it. Nothing is changed then.
    """
    unfit = unfit_for_codes(model, bits=bits, group_size=group_size)
    is_int8(activations)
    if isinstance(leave_out, str):
        raise ValueError(f"leave_out={leave_out!r}; it must be a list of patterns, such as [{leave_out!r}].")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for pattern in leave_out:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(f"leave_out: {pattern!r} fits none of the linear layers {', '.join(list(layers)[:8])}.")
    left: dict[str, str] = {}
    for name in layers:
        if any(fnmatchcase(name, pattern) for pattern in leave_out):
            left[name] = "leave_out"
        elif name in unfit:
            left[name] = unfit[name]
    if layers.keys() == left.keys():
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3])
        raise ValueError(f"no layer of {type(model).__name__} can be packed. {reasons or 'It has no linear layers'}.")
    names = [name for name in layers if name not in left]
    del layers  # each dense weight goes as soon as there are codes of it
    _pack(model, names, activations, bits=bits, group_size=group_size, symmetric=symmetric)
    if left:
        logger.info("%s: not packed: %s", type(model).__name__, left)
    return left


def unfit_for_codes(
    model: nn.Module, *, bits: int, group_size: int | None, dtype: torch.dtype | None = None, filled: bool = False
) -> dict[str, str]:  # fmt: skip
    """Linear layers that :func:`pack_linears` would leave as they are, by name, and why.

    Args:
        bits, group_size: as :func:`pack_linears` takes them.
        dtype: that weights will have by then; None: as they are.
        filled: weights on "meta" will have values by then.

    Raises:
        ValueError: bits or a group size that cannot be.
    """
    whole = type(bits) is int and (group_size is None or type(group_size) is int)
    if not whole or bits not in (4, 8) or not (group_size is None or (group_size >= 16 and group_size % 16 == 0)):
        raise ValueError(
            f"bits={bits!r}, group_size={group_size!r}; bits are 8 or 4, a group a multiple of 16, or None for rows."
        )
    read = {
        id(child): f"the {type(above).__name__} around it reads its weight without calling it"
        for above in model.modules()
        if isinstance(above, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
        for child in above.modules()
    }
    read[id(model)] = "it is the model itself"
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            why = read.get(id(module)) or _unfit(module, group_size, dtype, filled)
            if why:
                found[name] = why
    return found


def _unfit(module: nn.Linear, group_size: int | None, dtype: torch.dtype | None, filled: bool) -> str:
    """Why a layer stays as it is; "": it does not."""
    weight: Tensor | None = module._parameters.get("weight")
    partial = isinstance(module, PartialLinear)
    if (type(module) is not nn.Linear and not partial) or "forward" in module.__dict__:
        return f"it is a {type(module).__name__} with a forward of its own"
    if weight is None:
        return "its weight is computed from others"
    if has_user_hooks(module):
        return "it has hooks"
    if shares_elements(weight):
        return "its weight has no memory of its own; where zoo.inference.stream has it on disk, close() brings it back"
    known = (dtype or weight.dtype) in (torch.float32, torch.bfloat16, torch.float16)
    if (weight.is_meta and not filled) or not known or weight.numel() == 0:
        return f"its weight is {weight.dtype} of shape {tuple(weight.shape)} on {weight.device}"
    if weight.shape[1] % (group_size or 16):
        return f"its rows of {weight.shape[1]} are no whole number of groups of {group_size or 16}"
    return ""


def shares_elements(tensor: Tensor) -> bool:
    """Whether elements of a tensor are one number in memory: nothing can be written there."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def check_finite(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError if the weight of one of these layers has an element that codes have not."""
    for name in names:
        if not bool(model.get_parameter(f"{name}.weight").detach().isfinite().all()):
            raise ValueError(f"the weight of {name} has NaN or infinite elements, which codes have not.")


def _pack(model: nn.Module, names: Sequence[str], activations: Activations, **how: Any) -> None:
    for name in names:
        bucket = getattr(model.get_parameter(f"{name}.weight"), "_zoo_bucket", None)
        if bucket is not None and bucket.owner() is not None:
            raise ValueError(
                f"the weight of {name} is one that an engine or optimizer of zoo trains, and codes are not trained: "
                "pack a copy of the model (copy.deepcopy), or close the optimizer before."
            )
    check_finite(model, names)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for above in model.modules():
        for last, child in above._modules.items():
            places.setdefault(id(child), []).append((above, last))
    known: dict[int, tuple[nn.Parameter, PackedWeight]] = {}  # of weights that several modules have
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for name in names:
        module = model.get_submodule(name)
        own: nn.Parameter = module.weight  # type: ignore[assignment]
        rows, bias = module.multiplied() if isinstance(module, PartialLinear) else (own, module._parameters["bias"])
        weight = known[id(own)][1] if id(own) in known else pack_weight(rows.detach(), **how)
        if owners[id(own)] > 1:
            known[id(own)] = own, weight
        made = PackedLinear(weight, bias, activations=activations).train(module.training)
        if isinstance(module, PartialLinear):
            module.hand_over(made)
        for above, last in places[id(module)]:
            setattr(above, last, made)
