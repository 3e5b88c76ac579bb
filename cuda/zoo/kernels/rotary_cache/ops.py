"""Rotary positions and the cache as a function of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels.checks import check_input, check_like
from zoo.kernels.operators import Operator
from zoo.kernels.rotary_cache import reference

Tensor = torch.Tensor


@torch.no_grad()
def rotary_cache_(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, q_heads: int, kv_heads: int, keys: Tensor | None = None,
    values: Tensor | None = None, places: Tensor | None = None, interleaved: bool = False,
) -> None:  # fmt: skip
    """Rotate q and k by their positions; with a cache k and v go into it, else k is rotated in place. No gradient.

    Su et al. 2021, "RoFormer", equation 34; ``rotary_cache.h`` has the formula and the roundings.

    Args:
        qkv: (B, T, (H + 2 G)·D): of each token the heads of q, of k and of v; fp32, bf16 or fp16 (fp64 runs in the
            reference).
        cos, sin: (B or 1, T, R), R even and at most D: of each token the factors of the first R numbers of a head.
        q_heads: H. kv_heads: G.
        keys, values: (B, G, S, D), of the dtype of qkv.
        places: (B or 1, T), int64: the slot of each token; one outside of [0, S) takes nothing.
        interleaved: pairs are (2i, 2i + 1), as of GPT-J, and not (i, i + R/2), as of GPT-NeoX.

    All are contiguous.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be; with the numbers.
    """
    _rotate(
        qkv, cos, sin, keys, values, places, q_heads, kv_heads, interleaved,
        check=lambda: _check(qkv, cos, sin, keys, values, places, q_heads, kv_heads),
    )  # fmt: skip


_rotate = Operator("rotary_cache_", reference.rotary_cache_)


def _check(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor | None, values: Tensor | None, places: Tensor | None,
    q_heads: int, kv_heads: int,
) -> None:  # fmt: skip
    check_input("qkv", qkv)
    heads = q_heads + 2 * kv_heads
    if qkv.dim() != 3 or min(q_heads, kv_heads) < 1 or qkv.shape[2] % heads:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; it must have 3 dims, the last one whole heads of {q_heads} q, "
            f"{kv_heads} k and {kv_heads} v."
        )
    batch, tokens, dim = qkv.shape[0], qkv.shape[1], qkv.shape[2] // heads
    for name, t in (("cos", cos), ("places", places)):
        if t is not None and (t.dim() < 2 or t.shape[0] not in (1, batch) or t.shape[1] != tokens):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must begin with 1 or {batch} rows of {tokens} tokens."
            )
    check_input("cos", cos, like=qkv)
    check_like("sin", sin, cos.shape, qkv, cos.dtype)
    if cos.dim() != 3 or cos.shape[2] % 2 or cos.shape[2] > dim:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}; its last dim must be even, and at most {dim}, that of a head."
        )
    if len({keys is None, values is None, places is None}) > 1:
        raise ValueError("keys, values and places belong together; give all three, or none.")
    if keys is not None and values is not None and places is not None:
        room = keys.shape[2] if keys.dim() == 4 else 0
        check_like("keys", keys, (batch, kv_heads, room, dim), qkv)
        check_like("values", values, keys.shape, qkv)
        check_like("places", places, (len(places), tokens), qkv, torch.int64)
