"""A transformer in numbers: its parameters, the operations of a layer, what a layer keeps for its backward.

Counted for one rank and one micro-batch of b sequences of s tokens, of a model of width h with a heads, split over t
ranks of the tensor axis. The bytes of passes over memory and of what is kept are those of Korthikanti et al. 2022
(arXiv:2205.05198), section 4.1: numbers of two bytes, masks of dropout of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = [
    "Attention",
    "Fused",
    "Pass",
    "Product",
    "Recompute",
    "Transformer",
    "backward_of",
    "forward_of_layer",
    "kept_of_layer",
]

Attention = Literal["eager", "flash"]
"""eager: the scores of all pairs of tokens are written and read; flash: they are not (Dao et al. 2022,
arXiv:2205.14135), and a causal model computes half of them."""
Bias = Literal["all", "qkv", "none"]
Recompute = Literal["none", "selective", "alternate", "full"]
"""What is computed again in backward: nothing; the attention's core; every second product and all that is no product
(torchtitan's "selective op"); the layer."""


_MOST = 1 << 62


def whole(what: str, value: object, *, least: int) -> None:
    """Refuse what is no whole number, below ``least``, or so large that a float would not hold what is made of it.

    Raises:
        ValueError: it is.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        above = "above 0" if least else "of at least 0"
        raise ValueError(f"{what}={repr(value)[:40]}; it is a whole number {above}, and below 2^62.")


@dataclass(frozen=True, kw_only=True)
class Product:
    """``batch`` products (m, k) · (k, n). ``weight``: k by n are parameters."""

    m: int
    n: int
    k: int
    batch: int = 1
    weight: bool = True

    @property
    def flops(self) -> int:
        """2 m n k a product."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Attention in one operation, of a causal model: 4 · heads · s² · dim FLOPs forward, half of that computed.

    Backward has twice as many, and computes the scores again, one product of the two: 2.5 times as many in all.

    Attributes:
        flops: that are computed. dense_flops: of the model, with what the mask hides. again_flops: likewise, of what is
            computed again.
    """

    flops: float
    dense_flops: float
    again_flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Bytes read and written by what computes little (norms, activations, dropout, softmax)."""

    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The shape of a model of equal layers.

    Attributes:
        hidden: width h. heads: a. kv_heads: of keys and values, a by default. head_dim: h / a by default.
        layers: how many. seq: tokens of a sequence. vocab: rows of the embedding. tied: the head is the embedding.
        ffn: width inside of the second half of a layer, 4 h by default. gated: it has two matrices in (SwiGLU).
        positions: rows of a table of positions; 0 for none. attention: how it is computed.
        dropout: there is some, in the attention and after both halves. bias: which products add a vector; with "all"
            norms have one too. vectors: of a layer, its numbers that are in no matrix (norms, biases), and final: those
            of the last norm, where ``bias`` does not say how many they are.
    """

    hidden: int
    heads: int
    layers: int
    seq: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = True
    positions: int = 0
    attention: Attention = "eager"
    dropout: bool = True
    bias: Bias = "all"
    vectors: int | None = None
    final: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "layers", "seq", "vocab"):
            whole(f"a transformer got {name}", getattr(self, name), least=1)
        for name in ("kv_heads", "head_dim", "ffn", "positions"):
            whole(f"a transformer got {name}", getattr(self, name), least=0)
        for name, known in (("attention", Attention), ("bias", Bias)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"a transformer got {name}={getattr(self, name)!r}; allowed are {', '.join(get_args(known))}."
                )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"a transformer got kv_heads={self.kv_heads} of {self.heads} heads: it is to divide them.")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(f"a transformer of width {self.hidden} has no {self.heads} equal heads; give head_dim.")

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Width inside of the second half of a layer."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        return (self.kv_heads or self.heads) * self.dim

    @property
    def layer_parameters(self) -> int:
        """Of one layer: matrices, the vectors beside them, two norms."""
        h, q = self.hidden, self.heads * self.dim
        columns_in = self.inner * (2 if self.gated else 1)
        matrices = h * (q + 2 * self.kv_width) + q * h + h * columns_in + self.inner * h
        of_qkv = q + 2 * self.kv_width
        vectors = {"all": of_qkv + h + columns_in + h + 4 * h, "qkv": of_qkv + 2 * h, "none": 2 * h}
        return matrices + (vectors[self.bias] if self.vectors is None else self.vectors)

    @property
    def embedding_parameters(self) -> int:
        """The table of words and that of positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def parameters(self) -> int:
        """All."""
        head = 0 if self.tied else self.vocab * self.hidden
        final = self.hidden * (2 if self.bias == "all" else 1) if self.final is None else self.final
        return self.layers * self.layer_parameters + self.embedding_parameters + head + final


def forward_of_layer(
    model: Transformer, micro_batch: int, *, tensor: int = 1, sequence_parallel: bool = False
) -> Iterator[Product | Pass | Fused]:
    """The operations of a layer's forward on one rank, in order."""
    b, s, h, t = micro_batch, model.seq, model.hidden, tensor
    tokens, whole = b * s, b * s * h / (t if sequence_parallel else 1)
    q, kv, inner = model.heads * model.dim // t, model.kv_width // t, model.inner // t
    halves = 2 if model.gated else 1
    drop = 5 if model.dropout else 2  # after each half: residual in and out; dropout reads, writes, and writes a mask
    yield Pass(num_bytes=4 * whole)  # norm
    yield Product(m=tokens, n=q + 2 * kv, k=h)
    yield Pass(num_bytes=4 * tokens * (q + 2 * kv))  # heads apart, and together again
    yield from _attention(model, b, max(model.heads // t, 1))
    yield Product(m=tokens, n=h, k=q)
    yield Pass(num_bytes=(2 + drop) * whole)
    yield Pass(num_bytes=4 * whole)
    yield Product(m=tokens, n=halves * inner, k=h)
    yield Pass(num_bytes=2 * (halves + 1) * tokens * inner)  # activation
    yield Product(m=tokens, n=h, k=inner)
    yield Pass(num_bytes=(2 + drop) * whole)


def _attention(model: Transformer, b: int, heads: int) -> Iterator[Product | Pass | Fused]:
    s, dim = model.seq, model.dim
    if model.attention == "flash":
        yield Fused(flops=2 * b * heads * s * s * dim, dense_flops=4 * b * heads * s * s * dim)
        return
    yield Product(m=s, n=s, k=dim, batch=b * heads, weight=False)
    # Softmax reads and writes; dropout the same and a mask.
    yield Pass(num_bytes=(9 if model.dropout else 4) * b * heads * s * s)
    yield Product(m=s, n=dim, k=s, batch=b * heads, weight=False)


def backward_of(operation: Product | Pass | Fused) -> Iterator[Product | Pass | Fused]:
    """What comes back for an operation: of a product one for each operand; of a pass 1.2 times its bytes.

    (The gradient that comes in is read beside what was kept: 11 bytes for 9 of softmax and dropout, 26 for 22 of norms
    and residuals, 5 for 4 of an activation.)
    """
    if isinstance(operation, Pass):
        yield Pass(num_bytes=1.2 * operation.num_bytes)
        return
    if isinstance(operation, Fused):
        dense = operation.dense_flops
        yield Fused(flops=2.5 * operation.flops, dense_flops=2 * dense, again_flops=0.5 * dense)
        return
    batch, weight = operation.batch, operation.weight
    yield Product(m=operation.m, n=operation.k, k=operation.n, batch=batch, weight=weight)
    yield Product(m=operation.k, n=operation.n, k=operation.m, batch=batch, weight=weight)


def kept_of_layer(
    model: Transformer, micro_batch: int, *, tensor: int = 1, sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:  # fmt: skip
    """Bytes that a layer keeps for its backward: with s b h numbers of width h, t ranks and a heads::

        none                        s b h (10 + 24 / t + 5 a s / (h t))
        with sequence parallelism   s b h / t (34 + 5 a s / h)
        selective                   the same without 5 a s / h
        alternate                   s b (2 h + what q, v, the gate or the first matrix, the last one and attention give)
        full                        2 s b h

    which is equations 1 to 6 of Korthikanti et al. 2022 for a model with dropout and an inner width of 4 h.
    Elsewhere its parts are counted: norms and what products are given 2 bytes a number, masks 1.
    """
    b, s, h, t = micro_batch, model.seq, model.hidden, tensor
    tokens = b * s
    if recompute == "full":
        return 2.0 * tokens * h
    q, kv, inner = model.heads * model.dim / t, model.kv_width / t, model.inner / t
    if recompute == "alternate":  # of q, k, v, out, (gate,) in, out the first, third, …; attention's result and sums
        products = 2 * q + 2 * kv + 2 * inner + (2 * h if model.gated else 0)
        return tokens * (2 * h + products + 2 * q + 4 * model.heads / t)
    parts = t if sequence_parallel else 1
    mask = 1 if model.dropout else 0
    # Both norms, both inputs of split products, both masks after the halves.
    whole = tokens * h * (2 * 2 + 2 * 2 + 2 * mask) / parts
    split = tokens * (2 * q + 4 * kv + 2 * q)  # q, k and v; what the projection is given
    split += tokens * inner * (2 * (2 if model.gated else 1) + 2)  # before the activation, and after it
    if model.gated:
        split += tokens * inner * 2  # the activation's output, which the gate multiplies
    if recompute == "selective" or model.attention == "flash":
        core = 4.0 * tokens * model.heads / t if model.attention == "flash" and recompute != "selective" else 0.0
    else:
        core = (2 + 2 * mask + mask) * b * s * s * model.heads / t  # softmax; dropped; mask
    return whole + split + core
