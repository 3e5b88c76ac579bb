"""What an operator computes and moves, from its sizes alone: multiply-accumulate operations, FLOPs and bytes.

Three numbers are kept apart, because the field calls each of them FLOPs somewhere:

* ``macs``: multiply-accumulate operations of products (matrices, convolutions, attention). Of this kind are
  ``flops = 2 · macs``, which papers, torch and DeepSpeed compare with the peak of a device.
* ``masked_macs``: those of ``macs`` that lie above the diagonal of a causal mask. A kernel may leave them out; by
  convention they are counted ("dense"). ``causal_flops`` leaves them out.
* ``elementwise``: operations on single elements (activations, sums, norms, softmax): each addition, multiplication,
  division, comparison, root or exponential is one. They are never part of ``flops``: on every device of today they run
  at the speed of memory, not at its peak.

Bytes are those of an ideal kernel: each operand is read once and each result written once. A copy, a gather, a lookup
in a table computes nothing. Complex numbers: one of their products is four real ones (:data:`COMPLEX`).

Legend: B batch, m, k, n sizes of matrices, H heads, Q queries, K keys, D size of a head, T tokens, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "COMPLEX",
    "NOTHING",
    "Work",
    "attention",
    "attention_backward",
    "batch_norm",
    "convolution",
    "elementwise",
    "embedding",
    "fft",
    "hidden_scores",
    "layer_norm",
    "matrix_product",
    "mixture_of_experts",
    "recurrent_cell",
    "recurrent_layers",
    "reduction",
    "rms_norm",
    "softmax",
]

COMPLEX = 4
"""Real multiply-accumulate operations of a complex one: (a + bi)(c + di) has four products and, with the sum that it is
added to, four additions."""

Cell = Literal["rnn", "gru", "lstm"]
GATES: dict[str, int] = {"rnn": 1, "gru": 3, "lstm": 4}
"""Products with the input, and as many with the state, of each kind of recurrent cell."""
_STATE_OPERATIONS = {"rnn": 2, "gru": 11, "lstm": 13}  # a unit's, after its products; see recurrent_cell
_LAYER_NORM, _RMS_NORM, _SOFTMAX = 5, 3, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What an operator does. Two of them add up; ``3 * work`` is three times it."""

    macs: int = 0
    """Multiply-accumulate operations of products."""
    masked_macs: int = 0
    """Of these, above the diagonal of a causal mask."""
    elementwise: int = 0
    """Operations on single elements, in no other number."""
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def flops(self) -> int:
        """2 · macs: a multiply and an addition each."""
        return 2 * self.macs

    @property
    def causal_flops(self) -> int:
        """2 · (macs - masked_macs): what a kernel computes that leaves out what a causal mask hides."""
        return 2 * (self.macs - self.masked_macs)

    @property
    def moved_bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            macs=self.macs + other.macs, masked_macs=self.masked_macs + other.masked_macs,
            elementwise=self.elementwise + other.elementwise, read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
        )  # fmt: skip

    def __mul__(self, times: int) -> Work:
        return Work(
            macs=self.macs * times, masked_macs=self.masked_macs * times, elementwise=self.elementwise * times,
            read_bytes=self.read_bytes * times, written_bytes=self.written_bytes * times,
        )  # fmt: skip

    __rmul__ = __mul__


NOTHING = Work()


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}={size}; a size is at least 0.")


# -- products ---------------------------------------------------------------------------------------------------------


def matrix_product(m: int, k: int, n: int, *, batch: int = 1, bias: bool = False, itemsize: int = 2) -> Work:
    """(m, k) times (k, n), ``batch`` times: B·m·k·n multiply-accumulates, 2·B·m·k·n FLOPs.

    Reads B·(m·k + k·n) elements and writes B·m·n. A bias of n elements is read once and added: B·m·n elementwise
    operations.

    Args:
        itemsize: bytes of an element.

    Raises:
        ValueError: a size below 0; as of all functions here.
    """
    _check(m=m, k=k, n=n, batch=batch, itemsize=itemsize)
    out = batch * m * n
    return Work(
        macs=out * k, elementwise=out if bias else 0, written_bytes=out * itemsize,
        read_bytes=(batch * (m * k + k * n) + (n if bias else 0)) * itemsize,
    )  # fmt: skip


def convolution(
    batch: int, in_channels: int, out_channels: int, in_size: Sequence[int], out_size: Sequence[int],
    kernel: Sequence[int], *, groups: int = 1, transposed: bool = False, bias: bool = False, itemsize: int = 2,
) -> Work:  # fmt: skip
    """B·C_out·(C_in / groups)·∏kernel·∏out_size multiply-accumulates; transposed with ∏in_size for ∏out_size.

    Each output position takes the whole kernel once; each input position of a transposed convolution spreads it once.
    Positions in padding count as others do. Stride and dilation are in ``out_size``. Any number of dims.

    Args:
        in_size, out_size, kernel: of the spatial dims alone.
        bias: adds B·C_out·∏out_size elementwise operations.

    Raises:
        ValueError: other numbers of dims, or groups that do not divide the channels.
    """
    if not len(in_size) == len(out_size) == len(kernel):
        raise ValueError(
            f"in_size has {len(in_size)} dims, out_size {len(out_size)} and kernel {len(kernel)}; give as many of each."
        )
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise ValueError(
            f"groups={groups} of {in_channels} input and {out_channels} output channels; it must divide both."
        )
    positions = math.prod(in_size if transposed else out_size)
    weights = in_channels * out_channels // groups * math.prod(kernel)
    out = batch * out_channels * math.prod(out_size)
    read = batch * in_channels * math.prod(in_size) + weights + (out_channels if bias else 0)
    _check(batch=batch, positions=positions, weights=weights, itemsize=itemsize)
    return Work(
        macs=batch * positions * weights, elementwise=out if bias else 0,
        read_bytes=read * itemsize, written_bytes=out * itemsize,
    )  # fmt: skip


def hidden_scores(queries: int, keys: int, *, align: Literal["start", "end"] = "start") -> int:
    """Scores that a causal mask hides, of Q·K.

    Query i sees the keys up to i ("start": the first query and the first key are one token, as
    ``scaled_dot_product_attention(is_causal=True)`` has it) or up to i + K - Q ("end": the last ones are one token, as
    with a cache of keys). With Q = K both are Q·(Q - 1) / 2.
    """
    _check(queries=queries, keys=keys)
    shift = keys - queries if align == "end" else 0
    # Query i sees s_i = min(K, max(0, i + 1 + shift)) keys: none of the first ones, then one more each, then all.
    first = min(queries, max(0, -shift))
    last = max(first, min(queries, keys - shift))
    growing = last - first
    seen = growing * (first + last + 1 + 2 * shift) // 2 + (queries - last) * keys
    return queries * keys - seen


def attention(
    batch: int, heads: int, queries: int, keys: int, head_size: int, *, value_size: int | None = None,
    kv_heads: int | None = None, causal: bool | Literal["start", "end"] = False, itemsize: int = 2,
) -> Work:  # fmt: skip
    """softmax(q·kᵀ·c)·v: B·H·Q·K·(D + D_v) multiply-accumulates, whether there is a mask or not.

    Of these B·H·h·(D + D_v) are ``masked_macs`` where a causal mask hides h scores of each head
    (:func:`hidden_scores`). Softmax and scale are 6 elementwise operations a score. Bytes are those of a kernel that
    keeps scores on chip (Dao et al. 2022, "FlashAttention", section 3): q, k, v are read and the output is written.

    Args:
        value_size: D_v; that of a head of q and k if not given.
        kv_heads: heads of k and v; as many as of q if not given.
        causal: True is "start".
    """
    wide = head_size if value_size is None else value_size
    groups = heads if kv_heads is None else kv_heads
    _check(batch=batch, heads=heads, head_size=head_size, value_size=wide, kv_heads=groups, itemsize=itemsize)
    hidden = hidden_scores(queries, keys, align="end" if causal == "end" else "start") if causal else 0
    of_scores = batch * heads * (head_size + wide)
    read = batch * (heads * queries * head_size + groups * keys * (head_size + wide))
    return Work(
        macs=of_scores * queries * keys, masked_macs=of_scores * hidden,
        elementwise=(_SOFTMAX + 1) * batch * heads * queries * keys,
        read_bytes=read * itemsize, written_bytes=batch * heads * queries * wide * itemsize,
    )  # fmt: skip


def attention_backward(
    batch: int, heads: int, queries: int, keys: int, head_size: int, *, value_size: int | None = None,
    kv_heads: int | None = None, causal: bool | Literal["start", "end"] = False, itemsize: int = 2,
) -> tuple[Work, Work]:  # fmt: skip
    """(gradients, recomputation) of :func:`attention` by a kernel that has not kept the scores.

    Gradients: dV = Pᵀ·dO, dP = dO·Vᵀ, dQ = dS·K, dK = dSᵀ·Q: B·H·Q·K·2·(D + D_v) multiply-accumulates, twice those of
    the forward, as for every product. Recomputation: S = Q·Kᵀ once more, B·H·Q·K·D (Dao et al. 2022, algorithm 4).

    dS = P ⊙ (dP - row sums) and the exponentials of S are 6 elementwise operations a score. q, k, v, output and its
    gradient are read, and three gradients written.
    """
    wide = head_size if value_size is None else value_size
    groups = heads if kv_heads is None else kv_heads
    forward = attention(
        batch, heads, queries, keys, head_size, value_size=wide, kv_heads=groups, causal=causal, itemsize=itemsize
    )
    scores = batch * heads * queries * keys
    hidden = forward.masked_macs // (head_size + wide) if head_size + wide else 0
    gradients = Work(
        macs=2 * forward.macs, masked_macs=2 * forward.masked_macs, elementwise=forward.elementwise,
        read_bytes=forward.read_bytes + 2 * forward.written_bytes, written_bytes=forward.read_bytes,
    )  # fmt: skip
    return gradients, Work(macs=scores * head_size, masked_macs=hidden * head_size)


def recurrent_cell(
    kind: Cell, batch: int, input_size: int, hidden_size: int, *, projection: int = 0, bias: bool = True,
    itemsize: int = 2,
) -> Work:  # fmt: skip
    """One step of a recurrent cell: B·g·h·(i + r) multiply-accumulates with g = 1 ("rnn"), 3 ("gru"), 4 ("lstm").

    i is the input's size, h the state's, and r what the state is multiplied by: h, or p with a projection (LSTM only;
    Sak et al. 2014), which costs B·h·p more. Two biases of g·h are 2·B·g·h elementwise operations. A gate adds two
    products and has an activation: 2 operations a unit. After them an LSTM has c' = f·c + i·j and h' = o·tanh(c'), 5
    more (13 in all), a GRU r·n, 1 - z, and (1 - z)·n + z·h, 5 more (11), an RNN none (2).

    Bytes: weights and biases, input and state once; the new state, and of an LSTM its cell state too.
    """
    if kind not in GATES:
        raise ValueError(f"kind={kind!r}; allowed are {', '.join(map(repr, GATES))}.")
    if projection and kind != "lstm":
        raise ValueError(f"projection={projection} of {kind!r}; only an LSTM has one.")
    _check(batch=batch, input_size=input_size, hidden_size=hidden_size, projection=projection, itemsize=itemsize)
    gates, back = GATES[kind], projection or hidden_size
    weights = gates * hidden_size * (input_size + back) + hidden_size * projection
    states = back + (hidden_size if kind == "lstm" else 0)
    biases = 2 * gates * hidden_size if bias else 0
    return Work(
        macs=batch * weights, elementwise=batch * (biases + _STATE_OPERATIONS[kind] * hidden_size),
        read_bytes=(weights + biases + batch * (input_size + states)) * itemsize,
        written_bytes=batch * states * itemsize,
    )  # fmt: skip


def recurrent_layers(
    kind: Cell, batch: int, steps: int, input_size: int, hidden_size: int, *, layers: int = 1,
    bidirectional: bool = False, projection: int = 0, bias: bool = True, itemsize: int = 2,
) -> Work:  # fmt: skip
    """``steps`` times :func:`recurrent_cell` for each layer and direction; the input of the layers after the first one
    has the size r (h, or the projection) of each direction."""
    directions = 2 if bidirectional else 1
    found = NOTHING
    for layer in range(layers):
        wide = input_size if layer == 0 else (projection or hidden_size) * directions
        cell = recurrent_cell(kind, batch, wide, hidden_size, projection=projection, bias=bias, itemsize=itemsize)
        found += cell * (steps * directions)
    return found


def mixture_of_experts(
    tokens: int, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, gated: bool = False,
    shared_size: int = 0, itemsize: int = 2,
) -> Work:  # fmt: skip
    """Router and the experts that are active: T·D·E + T·k·w·D·I multiply-accumulates, w = 2, or 3 with a gate.

    Each token goes through ``top_k`` of E experts, multi-layer perceptrons D → I → D; none is dropped. A shared expert
    of size ``shared_size`` sees every token: T·w·D·I_shared more. The router's softmax is 5 elementwise operations for
    each token and expert; the activation one for each hidden number, two with a gate; the weighted sum 2·T·k·D.

    Bytes: the router, the weights of ``min(E, T·k)`` experts, tokens in and out once.
    """
    if not 0 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} of {num_experts} experts; it is from 0 to that number.")
    _check(tokens=tokens, hidden_size=hidden_size, intermediate_size=intermediate_size, shared_size=shared_size)
    products, rows = (3 if gated else 2), tokens * top_k
    of_one = products * hidden_size * intermediate_size
    router, shared = hidden_size * num_experts, products * hidden_size * shared_size
    hidden = rows * intermediate_size + tokens * shared_size
    weights = router + min(num_experts, rows) * of_one + shared
    return Work(
        macs=tokens * (router + shared) + rows * of_one,
        elementwise=(products - 1) * hidden + _SOFTMAX * tokens * num_experts + 2 * rows * hidden_size,
        read_bytes=(weights + tokens * hidden_size) * itemsize, written_bytes=tokens * hidden_size * itemsize,
    )  # fmt: skip


# -- everything else --------------------------------------------------------------------------------------------------


def embedding(tokens: int, size: int, *, itemsize: int = 2, index_bytes: int = 8) -> Work:
    """Rows of a table: nothing is computed; T indices and T rows are read, T rows written."""
    _check(tokens=tokens, size=size, itemsize=itemsize)
    rows = tokens * size * itemsize
    return Work(read_bytes=rows + tokens * index_bytes, written_bytes=rows)


def elementwise(numel: int, *, operations: int = 1, operands: int = 1, itemsize: int = 2) -> Work:
    """``operations`` for each of ``numel`` elements; ``operands`` tensors of that size are read and one written."""
    _check(numel=numel, operations=operations, operands=operands, itemsize=itemsize)
    return Work(
        elementwise=operations * numel, read_bytes=operands * numel * itemsize, written_bytes=numel * itemsize
    )  # fmt: skip


def reduction(numel: int, out: int = 1, *, operations: int = 1, itemsize: int = 2) -> Work:
    """A sum, mean, maximum or norm of ``numel`` elements to ``out``: ``operations`` for each element that is read."""
    _check(numel=numel, out=out, operations=operations, itemsize=itemsize)
    return Work(elementwise=operations * numel, read_bytes=numel * itemsize, written_bytes=out * itemsize)


def softmax(numel: int, *, itemsize: int = 2) -> Work:
    """5 operations an element: the maximum, its subtraction, the exponential, the sum, the division."""
    return elementwise(numel, operations=_SOFTMAX, itemsize=itemsize)


def _norm(operations: int, numel: int, affine: int, parameters: int, itemsize: int) -> Work:
    found = elementwise(numel, operations=operations + affine, itemsize=itemsize)
    return found + Work(read_bytes=parameters * itemsize)


def layer_norm(numel: int, size: int, *, affine: bool = True, itemsize: int = 2) -> Work:
    """5 operations an element (sum, difference to the mean, square, sum of squares, scale), 7 with weight and bias.

    Args:
        size: elements of the weight, and of the bias. Group norms count alike.
    """
    return _norm(_LAYER_NORM, numel, 2 if affine else 0, 2 * size if affine else 0, itemsize)


def rms_norm(numel: int, size: int, *, affine: bool = True, itemsize: int = 2) -> Work:
    """3 operations an element (square, sum, scale), 4 with a weight of ``size`` elements."""
    return _norm(_RMS_NORM, numel, 1 if affine else 0, size if affine else 0, itemsize)


def batch_norm(
    numel: int, channels: int, *, training: bool = True, affine: bool = True, itemsize: int = 2
) -> Work:  # fmt: skip
    """As :func:`layer_norm` in training. In evaluation the statistics of each channel are read: 2 operations an element
    (difference, scale), 4 with weight and bias."""
    operations, kept = (_LAYER_NORM, 0) if training else (2, 2 * channels)
    return _norm(operations, numel, 2 if affine else 0, (2 * channels if affine else 0) + kept, itemsize)


def fft(numel: int, length: int, *, real: bool = False, itemsize: int = 8) -> Work:
    """5·N·log₂(L) elementwise operations for N complex numbers in transforms of length L, half as many of real ones:
    the convention of FFTW's benchmarks (Frigo & Johnson 2005), whatever the algorithm."""
    _check(numel=numel, length=length)
    operations = round(5 * numel * math.log2(length)) if length > 1 else 0
    return Work(
        elementwise=operations // 2 if real else operations, read_bytes=numel * itemsize, written_bytes=numel * itemsize
    )  # fmt: skip
