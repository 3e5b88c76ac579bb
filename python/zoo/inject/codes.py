"""Products of packed matrices: several in one call, and of many tokens with the bits of few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zoo.kernels.packed_linear import Activations, PackedWeight, packed_linear
from zoo.kernels.packed_linear.packing import ROWS
from zoo.kernels.thin_linear import FEW
from zoo.nn import PackedLinear


@dataclass(eq=False)
class Joined:
    """Packed matrices of one product whose codes lie one behind the other, so that it is one call.

    Attributes:
        activations: how x is multiplied, by all of them.
        parts: each with its codes, scales and minima, views of those of ``weight``, and the bytes at which they begin.
    """

    weight: PackedWeight
    activations: Activations
    parts: tuple[tuple[PackedLinear, tuple[tuple[str, torch.Tensor | None, int], ...]], ...]

    def intact(self) -> bool:
        """Nobody has moved or replaced a part, or put anything beside it."""
        starts = {"q": self.weight.q.data_ptr(), "scales": self.weight.scales.data_ptr(), "minima": 0}
        if self.weight.minima is not None:
            starts["minima"] = self.weight.minima.data_ptr()
        for one, views in self.parts:
            now = one._buffers
            if now.get("left") is not None:
                return False
            for name, view, begin in views:
                # ``view.data = ...`` keeps the tensor and not its memory.
                if now[name] is not view or (view is not None and view.data_ptr() != starts[name] + begin):
                    return False
        return True

    def bias(self) -> torch.Tensor | None:
        """Of all, as it is now."""
        biases: list[torch.Tensor] = [bias for one, _ in self.parts if (bias := one._parameters["bias"]) is not None]
        return torch.cat(biases) if biases else None


def joined(matrices: tuple[nn.Module, ...]) -> Joined | None:
    """Lay the codes of several packed matrices one behind the other; values stay. None: they are of different kinds."""
    if len(matrices) < 2 or not all(isinstance(one, PackedLinear) for one in matrices):
        return None
    several: list[PackedLinear] = [one for one in matrices if isinstance(one, PackedLinear)]
    first = several[0]
    kinds = {
        (one.bits, one.group_size, one.minima is None, one.in_features, one.q.device, one.activations)
        for one in several
    }  # fmt: skip
    # Rows of another number than whole blocks have an order of their own at the end.
    ragged = any(one.out_features % ROWS for one in several[:-1])
    if len(kinds) > 1 or ragged or any(one.left is not None or one.q.is_meta for one in several):
        return None
    views: list[list[tuple[str, torch.Tensor | None, int]]] = [[] for _ in several]
    alls: list[torch.Tensor | None] = []
    for name in ("q", "scales", "minima"):
        own: list[torch.Tensor | None] = [getattr(one, name) for one in several]
        parts = [t for t in own if t is not None]
        whole = torch.cat(parts) if parts else None
        alls.append(whole)
        cut: Sequence[torch.Tensor | None] = own if whole is None else torch.split(whole, [len(t) for t in parts])
        for one, view, of in zip(several, cut, views, strict=True):
            setattr(one, name, view)
            of.append((name, view, 0 if view is None or whole is None else view.data_ptr() - whole.data_ptr()))
    q, scales, minima = alls
    shape = (sum(one.out_features for one in several), first.in_features)
    weight = PackedWeight(q, scales, minima, shape, first.bits, first.group_size)  # type: ignore[arg-type]
    return Joined(weight, first.activations, tuple((one, tuple(of)) for one, of in zip(several, views, strict=True)))


def by_codes(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activations: Activations, *, invariant: bool
) -> torch.Tensor:  # fmt: skip
    """y = x·Wᵀ + b. invariant: by as many tokens at a time as are never multiplied in another way."""
    tokens = x.numel() // max(x.shape[-1], 1)
    if not invariant or tokens <= FEW or activations == "int8":  # those bits depend on no other token
        return packed_linear(x, weight, bias, activations=activations)
    rows = torch.split(x.reshape(tokens, x.shape[-1]), FEW)
    return torch.cat([packed_linear(one, weight, bias) for one in rows]).view(*x.shape[:-1], weight.shape[0])
