"""Attention with fewer heads: columns of the output projection, rows of queries, keys and values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.compression.attach import class_of
from zoo.compression.pruning.flow import Unknown
from zoo.compression.pruning.modules import inputs_of, outputs_of
from zoo.compression.pruning.removal import check_own, cut_inputs, cut_outputs, replace

_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_SIZES = ("head_dim", "attention_head_size", "head_size", "d_head")
_WIDTHS = ("all_head_size", "split_size", "inner_dim")


def remove_heads(
    model: nn.Module, modules: dict[str, nn.Module], output: str, related: tuple[str, ...], goes: Tensor
) -> int:  # fmt: skip
    """Take heads away whose columns in the output projection are zero.

    The module that has queries, keys and values as children must say the size of a head (``head_dim``,
    ``attention_head_size``), by which its forward cuts them, as those of Hugging Face's transformers do; where it has
    numbers of heads and widths over all heads, they follow. Where several query heads share one of keys and values,
    that one goes when all of them do.

    Args:
        output, related: names of the projections.
        goes: (H,) bool, the heads that are zero.

    Returns:
        how many went.

    Raises:
        Unknown: why they stay.
    """
    projections = [modules[name] for name in related]
    check_own(model, [modules[output], *projections])
    parents = {name.rpartition(".")[0] for name in related}
    if len(parents) != 1:
        raise Unknown(f"queries, keys and values are in several modules ({', '.join(sorted(parents))})")
    attention: Any = modules[parents.pop()]
    num, width = len(goes), inputs_of(modules[output])
    size = width // num
    name = class_of(attention).__name__
    if not any(getattr(attention, key, None) == size for key in _SIZES):
        raise Unknown(f"a {name} says nowhere that a head has {size} elements ({', '.join(_SIZES)})")
    packed = len(projections) == 1
    if packed and getattr(attention, "split_size", None) != width:
        raise Unknown(f"how a {name} cuts {related[0]!r} into queries, keys and values is not known")
    own = {id(p) for module in (modules[output], *projections) for p in module.parameters()}
    for key, tensor in (*attention.named_parameters(), *attention.named_buffers()):
        if id(tensor) not in own and {num, width} & set(tensor.shape):
            raise Unknown(f"a {name} has {key!r} of the shape {tuple(tensor.shape)} besides, which may go by heads")
    shared = [num] if packed else [outputs_of(module) // size for module in projections]
    groups = goes.reshape(min(shared), -1).all(1)  # heads of keys and values
    if bool(groups.all()):
        groups[0] = False
    goes = groups.repeat_interleave(num // len(groups))
    stays = elements((~goes).nonzero().squeeze(1), size)
    for module, many in zip(projections, shared, strict=True):
        rows = elements((~(goes if many == num else groups)).nonzero().squeeze(1), size)
        cut_outputs(module, torch.cat([rows, rows + width, rows + 2 * width]) if packed else rows)
    cut_inputs(modules[output], stays)
    left = {num: int((~goes).sum())} | ({len(groups): int((~groups).sum())} if len(groups) != num else {})
    for key in _COUNTS:
        if getattr(attention, key, None) in left:
            setattr(attention, key, left[getattr(attention, key)])
    for key in _WIDTHS:
        if getattr(attention, key, None) == width:
            setattr(attention, key, len(stays))
    return int(goes.sum())


def zero_heads(weight: Tensor, dim: int, num: int) -> Tensor:
    """(H,) bool: heads of which all columns of an output projection are zero."""
    return (weight.detach().movedim(dim, 0).reshape(num, -1) == 0).all(1).cpu()


def elements(heads: Tensor, size: int) -> Tensor:
    """Numbers of heads → numbers of their elements."""
    return (heads[:, None] * size + torch.arange(size)).reshape(-1)


class FewerHeads(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` of which heads are gone: num_heads · head_dim is smaller than embed_dim.

    Called and saved as before. Masks that go by heads are those of all heads that there were. Weights that are averaged
    are averaged over the heads that are left.
    """

    head_dim: int
    all_heads: int
    heads_left: list[int]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As ``nn.MultiheadAttention.forward``."""
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask, which is None; give the mask.")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._projected(query, key, value)
        mask = self._mask(q, k.shape[2], attn_mask, key_padding_mask)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * (1 / math.sqrt(self.head_dim))) @ k.transpose(-1, -2)
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, p) if p > 0 else weights
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        out = F.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _projected(self, *given: Tensor) -> list[Tensor]:
        """Each (N, L, E) → (N, H, L, head_dim), keys and values with what bias_k, bias_v and zeros add."""
        weights: Tensor | None = self._parameters["in_proj_weight"]
        each = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weights is None else weights.chunk(3)
        bias: Tensor | None = self._parameters["in_proj_bias"]
        biases = (None, None, None) if bias is None else bias.chunk(3)
        found: list[Tensor] = []
        for x, w, b, extra in zip(given, each, biases, (None, self.bias_k, self.bias_v), strict=True):
            y = F.linear(x, w, b)
            if extra is not None:
                y = torch.cat([y, extra.expand(y.shape[0], 1, -1)], dim=1)
            if found and self.add_zero_attn:
                y = F.pad(y, (0, 0, 0, 1))
            found.append(y.reshape(*y.shape[:2], self.num_heads, self.head_dim).transpose(1, 2))
        return found

    def _mask(self, q: Tensor, num_keys: int, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """(N or 1, H or 1, L, S), to be added."""
        whole = None
        if mask is not None:
            mask = _added(mask, q)
            if mask.dim() == 3:
                mask = mask.reshape(-1, self.all_heads, *mask.shape[1:])[:, self.heads_left]
            whole = mask if mask.dim() == 4 else mask[None, None]
        if padding is not None:
            padded = _added(padding, q)[:, None, None]
            whole = padded if whole is None else whole + padded
        lacking = 0 if whole is None else num_keys - whole.shape[-1]
        return F.pad(whole, (0, lacking)) if whole is not None and lacking else whole


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)
    return mask.to(like.dtype)


def remove_own_heads(model: nn.Module, attention: nn.MultiheadAttention, goes: Tensor) -> int:
    """Take heads of an ``nn.MultiheadAttention`` away, which becomes a :class:`FewerHeads`.

    Raises:
        Unknown: why they stay.
    """
    if type(attention) is not nn.MultiheadAttention:
        raise Unknown(f"a {class_of(attention).__name__} has a forward of its own, or lost heads before")
    check_own(model, [attention, attention.out_proj])
    num, size, width = attention.num_heads, attention.head_dim, attention.embed_dim
    if bool(goes.all()):
        goes = goes.clone()
        goes[0] = False
    left = (~goes).nonzero().squeeze(1)
    rows = elements(left, size)
    for key in ("in_proj_weight", "in_proj_bias"):
        tensor = attention._parameters.get(key)
        if tensor is not None:
            triple = torch.cat([rows, rows + width, rows + 2 * width])
            replace(attention, key, tensor.detach().index_select(0, triple.to(tensor.device)))
    for key in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        tensor = attention._parameters.get(key)
        if tensor is not None:
            replace(attention, key, tensor.detach().index_select(0, rows.to(tensor.device)))
    for key in ("bias_k", "bias_v"):
        tensor = attention._parameters.get(key)
        if tensor is not None:
            replace(attention, key, tensor.detach().index_select(2, rows.to(tensor.device)))
    cut_inputs(attention.out_proj, rows)
    attention.__class__ = FewerHeads
    attention.num_heads, attention._qkv_same_embed_dim = len(left), False  # the fused path has embed_dim / num_heads
    fewer: Any = attention
    fewer.all_heads, fewer.heads_left = num, left.tolist()
    return int(goes.sum())


def check_projection(where: str, name: str, module: nn.Module, *, num: int, width: int, packed: bool) -> None:
    """Raise ValueError unless a related module can be that of queries, keys or values of ``num`` heads."""
    gives, size = outputs_of(module), width // num
    fits = gives == 3 * width if packed else gives % size == 0 and 0 < gives <= width and num % (gives // size) == 0
    if not fits and not (packed and gives == width):
        raise ValueError(
            f"{where}.related_modules: {name!r} ({class_of(module).__name__}) has {gives} outputs, and the heads are "
            f"{num} of {size} elements; queries, keys and values have {width} each (keys and values also a divisor of "
            f"the heads), or one module all three, {3 * width}. Correct the pattern or num_heads."
        )
