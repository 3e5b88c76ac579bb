"""Dropout by the place in the whole tensor: ranks draw together what one rank alone draws.

Between a column-parallel and a row-parallel layer each rank has some heads, or some features, of a tensor. A mask that
each rank drew for its own part would be another one at every degree, and the same one on ranks with one seed. So every
rank draws the mask of the whole tensor from its generator, and takes its part: with one seed on all ranks of the axis
the masks are those of one process, and generators stay alike for what is drawn outside. The price is a mask of t times
the size.

Where attention is one operation with dropout inside (``scaled_dot_product_attention``), it is computed by its formula,
softmax(q k^T / √d + mask) v, as torch's own path for the CPU does where anything is dropped.

What draws otherwise for each element of a part (alpha dropout, noise) is told, in modules that drop something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from zoo.tensor.region import Region

_AT_TRAINING: Mapping[Any, int] = {
    F.alpha_dropout: 2, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2, F.feature_alpha_dropout: 2, F.rrelu: 3,
    torch.alpha_dropout: 2, torch.dropout: 2, torch.feature_alpha_dropout: 2, torch.feature_dropout: 2,
}  # fmt: skip
"""Functions that draw if their argument number so and so, ``training``, is true."""
_OF_CHANNELS = frozenset({
    F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_dropout,
})  # fmt: skip
"""Those that draw one number for all elements of [i, j] of a tensor (i, j, …)."""
_DRAWS = frozenset({
    F.gumbel_softmax, torch.bernoulli, torch.multinomial, torch.normal, torch.rand_like, torch.randint_like,
    torch.randn_like, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.cauchy_, torch.Tensor.exponential_,
    torch.Tensor.geometric_, torch.Tensor.log_normal_, torch.Tensor.multinomial, torch.Tensor.normal_,
    torch.Tensor.random_, torch.Tensor.uniform_,
})  # fmt: skip


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
    rates = [m.p for m in module.modules() if isinstance(m, _DropoutNd)]
    rates += [1.0 for m in module.modules() if isinstance(m, nn.RReLU)]  # draws, as dropout does
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
        self._layers: list[nn.Module] = []

    def attach(self, module: nn.Module) -> None:
        """For as long as the module lives."""
        self._layers = [inner for inner in module.modules() if isinstance(inner, _DropoutNd)]
        module.register_forward_pre_hook(self.begin)
        self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """A forward of ``module`` that fails ends the region: what a later one drops is no part because of it."""
        module.register_forward_hook(self.end, always_call=True)

    def begin(self, module: nn.Module, args: Any) -> None:
        """Before the forward."""
        if module.training or any(layer.training for layer in self._layers):
            self._modes.append(_Mode(self))
            self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: nn.Module, args: Any, found: Any) -> None:
        """After it, or after it has failed."""
        if self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if found is None:  # it failed, or stopped where what backward needs was computed again
            self._region.rest()

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

    def refuse_draws(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError where ``func`` draws a number for each element of a part: not those that one process draws,
        and the same ones on ranks with one seed."""
        at = _AT_TRAINING.get(func)
        given = kwargs.get("training", kwargs.get("train", args[at] if at is not None and len(args) > at else False))
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, torch.Tensor) or (at is not None and not given):
            return
        if self._is_part(x.shape, 2 if func in _OF_CHANNELS else x.dim()):
            raise ValueError(
                f"{self._path} draws by {func.__name__} for a tensor of shape {tuple(x.shape)} where each "
                f"tensor-parallel rank has a part ({self._heads}, {self._features}). torch.nn.functional.dropout and "
                "scaled_dot_product_attention are drawn as in one process; use these, or draw outside of such layers."
            )

    def _is_part(self, shape: torch.Size, num_dims: int) -> bool:
        """Whether the first ``num_dims`` dims have what looks like heads, features or tokens of this rank."""
        dims, tokens = len(shape), None if self._region.inside else getattr(self._region, "tokens", None)
        if tokens is not None:
            return 2 <= dims <= num_dims + 1 and shape[-2] == tokens.mine[1] - tokens.mine[0]
        heads = self._heads is not None and dims >= 4 and self._heads.size in shape[-3:-1][: num_dims - dims + 3]
        return heads or (0 < dims <= num_dims and any(dealt.size == shape[-1] for dealt in self._features))

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
            if func in _DRAWS or func in _AT_TRAINING:
                self._masks.refuse_draws(func, args, kwargs)
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
