"""Formulas of torch's products: matrices, grouped matrices, convolutions, recurrent layers.

Legend: m, k, n sizes of matrices, B batch, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from zoo.cost.operators import COMPLEX, NOTHING, Cell, Work, convolution, matrix_product, recurrent_cell
from zoo.profiling.formulas.call import Call, Counted, Formula, elements, is_real, numel

__all__ = ["PRODUCTS"]


def _plain(work: Work) -> Work:
    """Without bytes, which are those of the tensors."""
    return Work(macs=work.macs, masked_macs=work.masked_macs, elementwise=work.elementwise)


def _of(call: Call, name: str, m: int, k: int, n: int, *, batch: int = 1, bias: bool = False) -> Work:
    found = _plain(matrix_product(m, k, n, batch=batch, bias=bias))
    return COMPLEX * found if call[name].is_complex() else found


def _is_sparse(call: Call, *names: str) -> bool:
    return any(call[name].layout is not torch.strided for name in names)


def _of_stored(call: Call, left: str, right: str, m: int, n: int, *, bias: bool) -> Work:
    """A product of which one side is sparse: each of its stored elements meets a row, or a column, of the other side.

    Raises:
        ValueError: both are sparse: which elements meet is in their values.
    """
    if all(_is_sparse(call, name) for name in (left, right)):
        raise ValueError("a product of two sparse matrices has no formula.")
    macs = elements(call[left]) * n if _is_sparse(call, left) else elements(call[right]) * m
    out = next(call.outputs).numel() if bias else 0
    return (COMPLEX if call[left].is_complex() else 1) * Work(macs=macs, elementwise=out)


def _sampled(call: Call) -> Counted:
    """Only the elements that the sparse matrix has are computed."""
    work = Work(macs=elements(call["self"]) * call.shape("mat1")[-1], elementwise=elements(call["self"]))
    return COMPLEX * work if call["mat1"].is_complex() else work


def _mm(left: str, right: str, *, bias: bool = False) -> Formula:
    def formula(call: Call) -> Counted:
        (m, k), n = call.shape(left), call.shape(right)[1]
        if _is_sparse(call, left, right):
            return _of_stored(call, left, right, m, n, bias=bias)
        return _of(call, left, m, k, n, bias=bias)

    return formula


def _bmm(left: str, right: str, *, bias: bool = False) -> Formula:
    def formula(call: Call) -> Counted:
        (b, m, k), n = call.shape(left), call.shape(right)[2]
        if _is_sparse(call, left, right):
            return _of_stored(call, left, right, m, n, bias=bias)
        return _of(call, left, m, k, n, batch=b, bias=bias)

    return formula


def _mv(matrix: str, *, bias: bool = False) -> Formula:
    def formula(call: Call) -> Counted:
        m, k = call.shape(matrix)
        if _is_sparse(call, matrix):
            work = Work(macs=elements(call[matrix]), elementwise=m if bias else 0)
            return COMPLEX * work if call[matrix].is_complex() else work
        return _of(call, matrix, m, k, 1, bias=bias)

    return formula


def _dot(call: Call) -> Counted:
    return _of(call, "self", 1, call.shape("self")[0], 1)


def _addr(call: Call) -> Counted:
    return _of(call, "vec1", call.shape("vec1")[0], 1, call.shape("vec2")[0], bias=True)


def _linear(x: str, out_features: Callable[[Call], int]) -> Formula:
    def formula(call: Call) -> Counted:
        *rows, k = call.shape(x)
        return _of(call, x, math.prod(rows), k, out_features(call), bias=_given(call, "bias"))

    return formula


def _given(call: Call, name: str) -> bool:
    try:
        return call[name] is not None
    except KeyError:
        return False


def _grouped_mm(call: Call) -> Counted:
    """Of the ragged dim only what ``offs`` says is multiplied; where values cannot be read, all of it."""
    a, b, offs = call.shape("self"), call.shape("mat2"), call["offs"]
    used = int(offs[-1]) if offs is not None and offs.numel() and is_real(offs) else None
    bias = _given(call, "bias")
    if len(a) == 3 and len(b) == 3:
        return _of(call, "self", a[1], a[2], b[2], batch=a[0], bias=bias)
    if len(a) == 3:  # columns are grouped
        return _of(call, "self", a[1], a[2], b[1] if used is None else used, bias=bias)
    if len(b) == 3:  # rows are
        return _of(call, "self", a[0] if used is None else used, a[1], b[2], bias=bias)
    return _of(call, "self", a[0], a[1] if used is None else used, b[1], bias=bias)  # the contracted dim is


# -- convolutions -----------------------------------------------------------------------------------------------------


def _convolved(
    call: Call, x: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], *, groups: int, transposed: bool,
    bias: bool,
) -> Work:  # fmt: skip
    batch = x[0] if len(x) == len(weight) else 1
    spatial = len(weight) - 2
    # The weight of a transposed convolution is (C_in, C_out / groups, ...).
    channels = (weight[0], weight[1] * groups) if transposed else (weight[1] * groups, weight[0])
    return _plain(
        convolution(
            batch, *channels, x[len(x) - spatial :], out[len(out) - spatial :], weight[2:], groups=groups,
            transposed=transposed, bias=bias,
        )
    )  # fmt: skip


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in tensor.shape)


def _convolution(x: str, *, transposed: bool | None = None, groups: bool = True) -> Formula:
    def formula(call: Call) -> Counted:
        inputs, weight, out = call.shape(x), call.shape("weight"), _shape(next(call.outputs))
        channels = inputs[-(len(weight) - 1)]
        found = _convolved(
            call, inputs, weight, out, groups=call["groups"] if groups else channels // weight[1],
            transposed=bool(call["transposed"]) if transposed is None else transposed, bias=_given(call, "bias"),
        )  # fmt: skip
        return COMPLEX * found if call[x].is_complex() else found

    return formula


def _convolution_backward(call: Call) -> Counted:
    """The gradients of input and weight are as many multiply-accumulates as the forward each; the bias has a sum."""
    inputs, weight, grad = call.shape("input"), call.shape("weight"), call.shape("grad_output")
    forward = _convolved(
        call, inputs, weight, grad, groups=call["groups"], transposed=bool(call["transposed"]), bias=False
    )  # fmt: skip
    wanted = call["output_mask"]
    found = forward * (bool(wanted[0]) + bool(wanted[1])) + Work(elementwise=numel(grad) if wanted[2] else 0)
    return COMPLEX * found if call["input"].is_complex() else found


def _conv_tbc(call: Call) -> Counted:
    (_, batch, channels), (width, _, out_channels) = call.shape("self"), call.shape("weight")
    steps = next(call.outputs).shape[0]
    return _of(call, "self", int(steps) * batch, width * channels, out_channels, bias=True)


# -- recurrent layers -------------------------------------------------------------------------------------------------

_KINDS: dict[int, Cell] = {0: "rnn", 1: "rnn", 2: "lstm", 3: "gru"}  # torch's numbers: ReLU, tanh, LSTM, GRU


def _tokens(call: Call) -> int:
    """Steps times sequences; of packed sequences all steps that there are."""
    sizes, x = call["batch_sizes"], call.shape("input")
    return sum(int(n) for n in sizes) if sizes else numel(x[:-1])


def _recurrent(call: Call) -> Work:
    """Layers and directions of one call, whose weights are (g·h, i), (g·h, r) and so on."""
    kind, hidden = _KINDS[call["mode"]], int(call["hidden_size"])
    try:
        projection = int(call["proj_size"])
    except KeyError:
        projection = 0
    directions, tokens = 2 if call["bidirectional"] else 1, _tokens(call)
    found, wide = NOTHING, call.shape("input")[-1]
    for _ in range(int(call["num_layers"])):
        cell = recurrent_cell(kind, tokens, wide, hidden, projection=projection)
        found, wide = found + directions * cell, (projection or hidden) * directions
    return _plain(found)


def _mkldnn_layer(call: Call) -> Counted:
    return _plain(
        recurrent_cell(
            _KINDS[call["mode"]], _tokens(call), call.shape("input")[-1], int(call["hidden_size"]),
            bias=bool(call["has_biases"]),
        )
    )  # fmt: skip


def _twice(forward: Callable[[Call], Any]) -> Formula:
    """Each product has two gradients of as many multiply-accumulates; elementwise operations are taken as often."""

    def formula(call: Call) -> Counted:
        found: Work = 2 * forward(call)
        return found

    return formula


def _gates(name: str, operations: int) -> Formula:
    """What is left of a cell when its products are made: ``operations`` for each unit of its state."""

    def formula(call: Call) -> Counted:
        return Work(elementwise=operations * numel(call.shape(name)))

    return formula


def _made(call: Call) -> int:
    """Features of a linear layer whose weight is in codes of some layout."""
    return int(next(call.outputs).shape[-1])


def _trilinear(call: Call) -> Counted:
    """Σ x·w·z of three tensors that are broadcast together: x·w over the first summed dim, times z over the others."""
    dims = [1] * (call["i1"].dim() + len(call["expand1"]))
    for name, expand in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        sizes = iter(call.shape(name))
        given = [1 if dim in call[expand] else next(sizes) for dim in range(len(dims))]
        dims = [max(pair) for pair in zip(dims, given, strict=True)]
    whole, first = math.prod(dims), dims[call["sumdim"][0]]
    return Work(macs=whole + whole // first if first else 0)


PRODUCTS: dict[str, Formula] = {
    "mm": _mm("self", "mat2"),
    "addmm": _mm("mat1", "mat2", bias=True),
    "_sparse_addmm": _mm("mat1", "mat2", bias=True),
    "hspmm": _mm("mat1", "mat2"),
    "sparse_sampled_addmm": _sampled,
    "_addmm_activation": _mm("mat1", "mat2", bias=True),
    "_int_mm": _mm("self", "mat2"),
    "_scaled_mm": _mm("self", "mat2"),
    "_scaled_mm_v2": _mm("self", "mat2"),
    **dict.fromkeys(
        (
            "_weight_int8pack_mm",
            "_weight_int4pack_mm",
            "_weight_int4pack_mm_for_cpu",
            "_weight_int4pack_mm_with_scales_and_zeros",
        ),
        _linear("self", _made),
    ),
    "_dyn_quant_matmul_4bit": _linear("inp", _made),
    "_mixed_dtypes_linear": _linear("input", _made),
    "_sparse_semi_structured_linear": _linear("input", _made),
    "_trilinear": _trilinear,
    "bmm": _bmm("self", "mat2"),
    "baddbmm": _bmm("batch1", "batch2", bias=True),
    "addbmm": _bmm("batch1", "batch2", bias=True),
    "mv": _mv("self"),
    "addmv": _mv("mat", bias=True),
    "dot": _dot,
    "vdot": _dot,
    "addr": _addr,
    "linear": _linear("input", lambda call: call.shape("weight")[0]),
    "mkldnn_linear": _linear("self", lambda call: call.shape("weight")[0]),
    "_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm_v2": _grouped_mm,
    "convolution": _convolution("input"),
    "_convolution": _convolution("input"),
    "convolution_overrideable": _convolution("input"),
    "mkldnn_convolution": _convolution("self", transposed=False),
    "cudnn_convolution": _convolution("self", transposed=False),
    "cudnn_convolution_transpose": _convolution("self", transposed=True),
    "miopen_convolution": _convolution("self", transposed=False),
    "miopen_convolution_transpose": _convolution("self", transposed=True),
    "_conv_depthwise2d": _convolution("self", transposed=False, groups=False),
    "conv_depthwise3d": _convolution("self", transposed=False, groups=False),
    "convolution_backward": _convolution_backward,
    "conv_tbc": _conv_tbc,
    "mkldnn_rnn_layer": _mkldnn_layer,
    "mkldnn_rnn_layer_backward": _twice(_mkldnn_layer),
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _twice(_recurrent),
    "miopen_rnn": _recurrent,
    "miopen_rnn_backward": _twice(_recurrent),
    "_thnn_fused_lstm_cell": _gates("cx", 13),
    "_thnn_fused_lstm_cell_backward_impl": _gates("cx", 26),
    "_thnn_fused_gru_cell": _gates("hx", 11),
    "_thnn_fused_gru_cell_backward": _gates("grad_hy", 22),
}
"""Of operators of ``aten``, by their name without overload; operators in place ("addmm_") are the same."""
