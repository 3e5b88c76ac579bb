"""Rotary positions and the cache in plain torch, operation by operation as ``rotary_cache.h`` writes it."""

from __future__ import annotations

import torch

from zoo.kernels.elementary import wide

Tensor = torch.Tensor


def rotary_cache_(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor | None, values: Tensor | None, places: Tensor | None,
    q_heads: int, kv_heads: int, interleaved: bool,
) -> None:  # fmt: skip
    """See :func:`zoo.kernels.rotary_cache.rotary_cache_`."""
    batch, tokens, width = qkv.shape
    heads = qkv.view(batch, tokens, q_heads + 2 * kv_heads, width // (q_heads + 2 * kv_heads))
    q, k, v = torch.split(heads, [q_heads, kv_heads, kv_heads], 2)
    c, s = (wide(t).expand(batch, -1, -1).unsqueeze(2) for t in (cos, sin))
    rotated = _rotated(k, c, s, interleaved)
    q.copy_(_rotated(q, c, s, interleaved))
    if keys is None or values is None or places is None:
        k.copy_(rotated)
        return
    slots = places.expand(batch, -1)
    row, token = ((slots >= 0) & (slots < keys.shape[2])).nonzero(as_tuple=True)
    keys[row, :, slots[row, token]] = rotated[row, token]
    values[row, :, slots[row, token]] = v[row, token]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary = cos.shape[-1]
    turned, rest = torch.split(wide(x), [rotary, x.shape[-1] - rotary], -1)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        c, s = [cos[..., ::2], cos[..., 1::2]], [sin[..., ::2], sin[..., 1::2]]
    else:
        first, second = turned.chunk(2, -1)
        c, s = list(cos.chunk(2, -1)), list(sin.chunk(2, -1))
    both = first * c[0] - second * s[0], second * c[1] + first * s[1]
    joined = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([joined, rest], -1).to(x.dtype)
