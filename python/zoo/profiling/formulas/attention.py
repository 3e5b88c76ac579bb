"""Formulas of torch's attention: the products and the softmax of fused kernels.

Legend: B batch, H heads, Q queries, K keys, D size of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

from zoo.cost.operators import Work, attention, attention_backward, elementwise, layer_norm, matrix_product
from zoo.profiling.formulas.call import Call, Counted, Formula, is_real

__all__ = ["ATTENTION", "HIGHER_ORDER"]

Causal = bool | Literal["start", "end"]


def _bare(work: Work) -> Work:
    return Work(macs=work.macs, masked_macs=work.masked_macs, elementwise=work.elementwise)


def _sizes(call: Call) -> tuple[tuple[int, int, int, int, int], dict[str, int]]:
    """Of q (B, H, Q, D) and k, v (B, G, K, D) as scaled_dot_product_attention has them."""
    q, k, v = call.shape("query"), call.shape("key"), call.shape("value")
    return (q[0], q[1], q[2], k[2], q[3]), {"value_size": v[3], "kv_heads": k[1]}


def _forward(causal: Causal = "start") -> Formula:
    def formula(call: Call) -> Counted:
        sizes, how = _sizes(call)
        return _bare(attention(*sizes, **how, causal=causal if call["is_causal"] else False))

    return formula


def _backward(causal: Causal = "start") -> Formula:
    def formula(call: Call) -> Counted:
        sizes, how = _sizes(call)
        shown = causal if call["is_causal"] else False
        found, again = attention_backward(*sizes, **how, causal=shown)
        return _bare(found), again

    return formula


def _ragged(call: Call) -> list[tuple[tuple[int, int, int, int, int], dict[str, int]]]:
    """The sequences of a kernel that takes (B, Q, H, D), or rows of sequences of several lengths, (T, H, D).

    Where lengths cannot be read every sequence is taken to be of the mean length, rounded up.
    """
    q, k, v = call.shape("query"), call.shape("key"), call.shape("value")
    how = {"value_size": v[-1], "kv_heads": k[-2]}
    ends = [_first(call, names) for names in (("cum_seq_q", "cu_seqlens_q"), ("cum_seq_k", "cu_seqlens_k"))]
    if ends[0] is None or ends[1] is None:
        return [((q[0], q[1 + 1], q[1], k[1], q[3]), how)]
    rows = q[0] * q[1] if len(q) == 4 else q[0], k[0] * k[1] if len(k) == 4 else k[0]
    lengths = [_lengths(end, total) for end, total in zip(ends, rows, strict=True)]
    return [((1, q[-2], many, keys, q[-1]), how) for many, keys in zip(*lengths, strict=True)]


def _lengths(ends: Any, rows: int) -> Sequence[int]:
    if is_real(ends):
        found = ends.tolist()
        return [stop - start for start, stop in itertools.pairwise(found)]
    number = int(ends.shape[0]) - 1
    return [-(-rows // number)] * number


def _first(call: Call, names: Sequence[str]) -> Any:
    for name in names:
        try:
            return call[name]
        except KeyError:
            continue
    return None


def _hides(call: Call) -> Causal:
    """The kernels on rows: FlashAttention aligns a causal mask at the end, the memory-efficient one by its number."""
    kind = _first(call, ("custom_mask_type",))
    if kind is None:
        return "end" if call["is_causal"] else False
    return {0: False, 1: "start", 2: "end"}.get(kind, False)  # type: ignore[return-value]


def _ragged_forward(call: Call) -> Counted:
    causal = _hides(call)
    return _sum(_bare(attention(*sizes, **how, causal=causal)) for sizes, how in _ragged(call))


def _ragged_backward(call: Call) -> Counted:
    causal = _hides(call)
    pairs = [attention_backward(*sizes, **how, causal=causal) for sizes, how in _ragged(call)]
    return _sum(_bare(found) for found, _ in pairs), _sum(again for _, again in pairs)


def _sum(works: Any) -> Work:
    found = Work()
    for work in works:
        found += work
    return found


def _fast_path(call: Call) -> Counted:
    """MultiheadAttention in evaluation: four linear maps around attention."""
    return _heads(call, "query", call["num_head"], keys=call.shape("key")[1])


def _heads(call: Call, x: str, heads: int, *, keys: int) -> Work:
    batch, queries, _ = call.shape(x)
    wide = int(call["embed_dim"])
    projections = (
        matrix_product(batch * queries, wide, wide, bias=True) * 2  # q and the output
        + matrix_product(batch * keys, wide, wide, bias=True) * 2
    )
    return _bare(projections + attention(batch, heads, queries, keys, wide // heads))


def _encoder_layer(call: Call) -> Counted:
    """TransformerEncoderLayer in evaluation: attention, the perceptron, two norms and two sums."""
    batch, tokens, wide = call.shape("src")
    rows, hidden = batch * tokens, call.shape("ffn_weight_1")[0]
    found = (
        matrix_product(rows, wide, hidden, bias=True) + elementwise(rows * hidden)
        + matrix_product(rows, hidden, wide, bias=True)
        + 2 * (layer_norm(rows * wide, wide) + elementwise(rows * wide))
    )  # fmt: skip
    return _heads(call, "src", call["num_heads"], keys=tokens) + _bare(found)


def _flex(call: Call) -> Counted:
    """Whatever scores are changed or masked by: the products that all keys need."""
    q, k, v = (tuple(int(n) for n in t.shape) for t in call.given[:3])
    return _bare(attention(q[0], q[1], q[2], k[2], q[3], value_size=v[3], kv_heads=k[1]))


def _flex_backward(call: Call) -> Counted:
    q, k, v = (tuple(int(n) for n in t.shape) for t in call.given[:3])
    found, again = attention_backward(q[0], q[1], q[2], k[2], q[3], value_size=v[3], kv_heads=k[1])
    return _bare(found), again


HIGHER_ORDER: dict[str, Formula] = {"flex_attention": _flex, "flex_attention_backward": _flex_backward}
"""Of operators that take functions."""

ATTENTION: dict[str, Formula] = {
    "_scaled_dot_product_flash_attention": _forward(),
    "_scaled_dot_product_flash_attention_for_cpu": _forward(),
    "_scaled_dot_product_efficient_attention": _forward(),
    "_scaled_dot_product_cudnn_attention": _forward(),
    "_scaled_dot_product_fused_attention_overrideable": _forward(),
    "_scaled_dot_product_attention_math_for_mps": _forward(),
    "_scaled_dot_product_flash_attention_backward": _backward(),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _backward(),
    "_scaled_dot_product_efficient_attention_backward": _backward(),
    "_scaled_dot_product_cudnn_attention_backward": _backward(),
    "_scaled_dot_product_fused_attention_overrideable_backward": _backward(),
    "_flash_attention_forward": _ragged_forward,
    "_flash_attention_backward": _ragged_backward,
    "_efficient_attention_forward": _ragged_forward,
    "_efficient_attention_backward": _ragged_backward,
    "_native_multi_head_attention": _fast_path,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
"""Of operators of ``aten``."""
