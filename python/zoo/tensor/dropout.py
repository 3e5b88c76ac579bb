"""Dropout by the place in the whole tensor: ranks draw together what one rank alone draws.

Between a column-parallel and a row-parallel layer each rank has some heads, or some features, of a tensor. A mask that
each rank drew for its own part would be another one at every degree, and the same one on ranks with one seed. So every
rank draws the mask of the whole tensor from its generator, and takes its part: with one seed on all ranks of the axis
the masks are those of one process, and generators stay alike for what is drawn outside. The price is a mask of t times
the size.

Where attention is one operation with dropout inside (``scaled_dot_product_attention``), it is computed by its formula,
softmax(q k^T / √d + mask) v, as torch's own path for the CPU does where anything is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zoo.tensor.region import Region


@dataclass(frozen=True)
class Dealt:
    """[start, stop) of ``total`` heads or features are this rank's."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        """Of this rank."""
        return self.stop - self.start


def drops(module: nn.Module) -> bool:
    """Whether anything in it is dropped in training: a Dropout layer, or a rate that its forward reads."""
    rates = [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    for inner in module.modules():
        rates += [value for name, value in vars(inner).items() if "drop" in name and isinstance(value, float)]
    return any(rate > 0 for rate in rates)


class WholeMasks:
    """Hooks of a module in which layers of a region lie, ``path`` in the model.

    Args:
        heads: of a tensor (…, H, T, S); None where there are none. features: of tensors (…, features).
    """

    def __init__(self, path: str, region: Region, heads: Dealt | None, features: tuple[Dealt, ...]) -> None:
        self._path, self._region, self._heads, self._features = path, region, heads, features
        self._modes: list[_Mode] = []

    def attach(self, module: nn.Module) -> None:
        """For as long as the module lives."""
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end, always_call=True)

    def begin(self, module: nn.Module, args: Any) -> None:
        """Before the forward."""
        if module.training:
            self._modes.append(_Mode(self))
            self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: nn.Module, args: Any, found: Any) -> None:
        """After it, or after it has failed."""
        if self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def mask(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """What x is multiplied by: 0, or 1 / (1 - p).

        Raises:
            ValueError: it does not look like heads or features of this rank.
        """
        shape, heads = list(x.shape), self._heads
        features = [dealt for dealt in self._features if dealt.size == x.shape[-1]]
        tokens = None if self._region.inside else getattr(self._region, "tokens", None)
        if tokens is not None and x.dim() >= 2 and shape[-2] == tokens.mine[1] - tokens.mine[0]:
            dim, dealt = x.dim() - 2, Dealt(tokens.mine[0], tokens.mine[1], tokens.total)
        elif x.dim() >= 4 and heads is not None and shape[-3] == heads.size:
            dim, dealt = x.dim() - 3, heads
        elif len(features) == 1:
            dim, dealt = x.dim() - 1, features[0]
        else:
            raise ValueError(
                f"{self._path} drops elements of a tensor of shape {tuple(x.shape)} where each tensor-parallel rank "
                f"has a part ({heads}, {self._features}): which dim is dealt cannot be told. Set its rate to 0."
            )
        shape[dim] = dealt.total
        self._region.drawing = True
        try:
            whole = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)
        finally:
            self._region.drawing = False
        return whole.narrow(dim, dealt.start, dealt.size)

    @property
    def active(self) -> bool:
        """Tensors are parts now: between a column-parallel layer and a row-parallel one, or as shares of tokens."""
        region = self._region
        return not region.drawing and (region.inside or getattr(region, "tokens", None) is not None)


class _Mode(TorchFunctionMode):
    def __init__(self, masks: WholeMasks) -> None:
        super().__init__()
        self._masks = masks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._masks.active:
            if func is F.dropout:
                return self._dropout(*args, **kwargs)
            if func is F.scaled_dot_product_attention and _rate(args, kwargs) > 0:
                return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0:
            return x
        mask = self._masks.mask(x, p)
        return x.mul_(mask) if inplace else x * mask

    def _attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if enable_gqa:
            each = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(each, -3), value.repeat_interleave(each, -3)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        if attn_mask is not None:
            bools = attn_mask.dtype is torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if bools else scores + attn_mask
        weights = scores.softmax(-1)
        return (weights * self._masks.mask(weights, dropout_p)) @ value


def _rate(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    return float(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
