"""A transformer layer's forward and backward as one autograd function.

Legend: N = B·T tokens, C hidden size, I inner size; x, y (N, C). A is attention with its output projection, F the
feed-forward part, each with bias; d is dropout, n and a are the normalisations by ``norm_*`` and ``attn_n*``.

    pre-norm    s = x + d(A(n(x)))    y = s + d(F(a(s)))
    post-norm   s = x + d(A(x))       y = n(a(s) + d(F(a(s))))

Products are torch's; all between them is ``zoo.kernels``, so its order of roundings is that of their headers. What the
backward starts from is the table of :mod:`.saved`; what it makes again has the bits it had, but for what
``normalize_invertible`` computes back: s = ((y - b)/w)/ρ + μ, whose error is that of y times 1/(w·ρ).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zoo.kernels.bias_dropout_residual import bias_dropout_residual, bias_dropout_residual_backward
from zoo.kernels.bias_gelu import bias_gelu, bias_gelu_backward
from zoo.kernels.layer_norm import LayerNorm, layer_norm, layer_norm_backward
from zoo.nn.transformer.attention import Attention
from zoo.nn.transformer.config import TransformerLayerConfig
from zoo.nn.transformer.saved import Kept, kept_rows

Tensor = torch.Tensor


class Weights(NamedTuple):
    """The parameters; what is multiplied by a matrix is of the dtype of the products."""

    attn_qkvw: Tensor
    """(3·C, C): of queries, keys and values."""
    attn_qkvb: Tensor
    """(3·C,)."""
    attn_ow: Tensor
    """(C, C), of the output of attention."""
    attn_ob: Tensor
    """(C,)."""
    attn_nw: Tensor
    """(C,): weight of the normalisation after attention's residual."""
    attn_nb: Tensor
    """(C,)."""
    inter_w: Tensor
    """(I, C)."""
    inter_b: Tensor
    """(I,)."""
    output_w: Tensor
    """(C, I)."""
    output_b: Tensor
    """(C,)."""
    norm_w: Tensor
    """(C,): weight of the normalisation of the layer's input (pre-norm) or of its output."""
    norm_b: Tensor
    """(C,)."""

    def cast(self, dtype: torch.dtype) -> Weights:
        """Those that meet in products as ``dtype``; the kernels take the others as they are."""
        names = ("attn_qkvw", "attn_qkvb", "attn_ow", "inter_w", "output_w")
        return self._replace(**{name: getattr(self, name).to(dtype) for name in names})


@dataclass(frozen=True)
class Norm:
    """A normalisation: its parameters, what its statistics begin with, and the rows that it was given and gave."""

    weight: str
    bias: str
    stats: str
    given: str
    gave: str


INPUT = Norm("norm_w", "norm_b", "norm", "input", "input_normed")
MIDDLE = Norm("attn_nw", "attn_nb", "attn", "attn_sum", "attn_normed")
OUTPUT = Norm("norm_w", "norm_b", "norm", "output_sum", "output")


@dataclass(frozen=True)
class Call:
    """What one call is told: the dtype of its products, whether it drops, and the place of its random words."""

    config: TransformerLayerConfig
    dtype: torch.dtype
    dropping: bool
    offset: int

    @property
    def attention(self) -> Attention:
        """What its attention is told."""
        c = self.config
        p = c.attn_dropout_ratio if self.dropping else 0.0
        return Attention(heads=c.heads, p=p, seed=c.seed or 0, offset=self.offset)

    def generator(self, place: int) -> dict[str, Any]:
        """Of the dropout after attention, 1, or after the feed-forward part, 2."""
        p = self.config.hidden_dropout_ratio if self.dropping else 0.0
        return {"p": p, "seed": self.config.seed or 0, "offset": self.offset + place}

    def normed(self, x: Tensor, weight: Tensor, bias: Tensor) -> LayerNorm:
        """Normalised rows and their statistics."""
        return layer_norm(x, weight, bias, eps=self.config.layer_norm_eps)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """What is computed here has the dtypes that it says; "meta" has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def forward_of(x: Tensor, mask: Tensor | None, weights: Weights, call: Call, kept: Kept) -> Tensor:
    """y (B, T, C) of x (B, T, C), of the dtype of the call; ``kept`` is told what there is to be kept."""
    c, w, shape = call.config, weights.cast(call.dtype), x.shape
    flat = x.to(call.dtype).contiguous().flatten(0, 1)
    kept.keep(input=flat)
    total = _attended(flat, shape, mask, w, call, kept)
    middle = call.normed(total, w.attn_nw, w.attn_nb)
    kept.keep(attn_sum=total, attn_normed=middle.y, attn_mean=middle.mean, attn_rstd=middle.rstd)
    inner = middle.y @ w.inter_w.t()
    active = bias_gelu(inner, w.inter_b, approximate=c.gelu)
    kept.keep(intermediate=inner, activated=active)
    del inner
    residual = total if c.pre_layer_norm else middle.y
    out = bias_dropout_residual(active @ w.output_w.t(), w.output_b, residual, **call.generator(2))
    if not c.pre_layer_norm:
        last = call.normed(out, w.norm_w, w.norm_b)
        kept.keep(output_sum=out, norm_mean=last.mean, norm_rstd=last.rstd)
        out = last.y
    # No view: what an autograd function returns as one cannot be written to in place.
    result: Tensor = torch.ops.aten._unsafe_view(out, list(shape))
    return result


def _attended(flat: Tensor, shape: Sequence[int], mask: Tensor | None, w: Weights, call: Call, kept: Kept) -> Tensor:
    """s (N, C): x and what attention adds to it."""
    source = flat
    if call.config.pre_layer_norm:
        first = call.normed(flat, w.norm_w, w.norm_b)
        kept.keep(input_normed=first.y, norm_mean=first.mean, norm_rstd=first.rstd)
        source = first.y
    qkv = torch.addmm(w.attn_qkvb, source, w.attn_qkvw.t())
    by_sequence = qkv.view(*shape[:2], 3 * call.config.hidden_size)
    context = call.attention.forward(by_sequence, mask, kept, keep="probabilities" in kept.names).flatten(0, 1)
    kept.keep(qkv=qkv, context=context)
    return bias_dropout_residual(context @ w.attn_ow.t(), w.attn_ob, flat, **call.generator(1))


class _Backward:
    """The gradients of one call, part by part from the end; ``needs``: which parameters want one."""

    def __init__(
        self, mask: Tensor | None, weights: Weights, saved: dict[str, Tensor], call: Call, needs: frozenset[str]
    ) -> None:
        self.mask, self.w, self.saved, self.call, self.needs = mask, weights.cast(call.dtype), saved, call, needs
        self.grads: dict[str, Tensor] = {}

    def multiplied(self, grad: Tensor, weight: str, source: Tensor) -> None:
        """The gradient of a matrix, from those of its products and what it was multiplied with."""
        if weight in self.needs:
            self.grads[weight] = grad.t() @ source

    def parameters_of(self, norm: Norm) -> tuple[Tensor, Tensor]:
        """Its weight and bias."""
        return getattr(self.w, norm.weight), getattr(self.w, norm.bias)

    def statistics_of(self, norm: Norm) -> tuple[Tensor, Tensor]:
        """μ and ρ, (N,)."""
        return self.saved[f"{norm.stats}_mean"], self.saved[f"{norm.stats}_rstd"]

    def given_to(self, norm: Norm) -> Tensor:
        """What a normalisation was given, kept or computed back from what it gave."""
        if norm.given in self.saved:
            return self.saved[norm.given]
        y, (mean, rstd) = self.saved[norm.gave], self.statistics_of(norm)
        weight, bias = (parameter.to(mean.dtype) for parameter in self.parameters_of(norm))
        hat = (y.to(mean.dtype) - bias).div_(weight)
        return torch.addcmul(mean.unsqueeze(-1), hat, rstd.reciprocal().unsqueeze(-1)).to(y.dtype)

    def given_by(self, norm: Norm) -> Tensor:
        """What a normalisation gave, kept or made again."""
        if norm.gave in self.saved:
            return self.saved[norm.gave]
        return self.call.normed(self.saved[norm.given], *self.parameters_of(norm)).y

    def normalised(self, norm: Norm, grad: Tensor, grad_sum: Tensor | None = None) -> Tensor:
        """The gradient of what a normalisation was given; ``grad_sum`` comes to it along a residual."""
        weight, _ = self.parameters_of(norm)
        out, self.grads[norm.weight], self.grads[norm.bias] = layer_norm_backward(
            grad, grad_sum, self.given_to(norm), weight, *self.statistics_of(norm)
        )
        return out

    def feed_forward(self, grad: Tensor, normed: Tensor) -> Tensor:
        """d inner (N, I), from the gradient of the sum that the output of the feed-forward part is in."""
        w, gelu = self.w, self.call.config.gelu
        raw, self.grads["output_b"] = bias_dropout_residual_backward(grad, w.output_b, **self.call.generator(2))
        inner, active = self.saved["intermediate"], self.saved.get("activated")
        if active is None:
            active = bias_gelu(inner, w.inter_b, approximate=gelu)
        self.multiplied(raw, "output_w", active)
        d_inner, self.grads["inter_b"] = bias_gelu_backward(raw @ w.output_w, inner, w.inter_b, approximate=gelu)
        self.multiplied(d_inner, "inter_w", normed)
        return d_inner

    def attention(self, grad: Tensor, shape: Sequence[int], source: Tensor) -> Tensor:
        """d qkv (N, 3·C), from the gradient of the sum that the output of attention is in."""
        raw, self.grads["attn_ob"] = bias_dropout_residual_backward(grad, self.w.attn_ob, **self.call.generator(1))
        self.multiplied(raw, "attn_ow", self.saved["context"])
        size = self.call.config.hidden_size
        d_context, qkv = (raw @ self.w.attn_ow).view(*shape, size), self.saved["qkv"].view(*shape, 3 * size)
        d_qkv = self.call.attention.backward(d_context, qkv, self.mask, self.saved.get("probabilities")).flatten(0, 1)
        if "attn_qkvb" in self.needs:
            self.grads["attn_qkvb"] = d_qkv.sum(0)
        self.multiplied(d_qkv, "attn_qkvw", source)
        return d_qkv


def backward_of(grad: Tensor, back: _Backward, *, needs_input: bool) -> Tensor | None:
    """dx (B, T, C) from dy, where it is needed; the gradients of parameters are in ``back.grads`` then."""
    pre, w, shape = back.call.config.pre_layer_norm, back.w, grad.shape[:2]
    grad = grad.contiguous().flatten(0, 1)
    if not pre:
        grad = back.normalised(OUTPUT, grad)
    d_inner = back.feed_forward(grad, back.given_by(MIDDLE))
    if pre:
        d_total = back.normalised(MIDDLE, d_inner @ w.inter_w, grad)
    else:  # the gradients of a residual and of a product are added up in the product
        d_total = back.normalised(MIDDLE, grad.addmm_(d_inner, w.inter_w))
    d_qkv = back.attention(d_total, shape, back.given_by(INPUT) if pre else back.saved["input"])
    if not needs_input and not (pre and back.needs & {"norm_w", "norm_b"}):
        return None
    dx = back.normalised(INPUT, d_qkv @ w.attn_qkvw, d_total) if pre else d_total.addmm_(d_qkv, w.attn_qkvw)
    return dx.view(*shape, back.call.config.hidden_size)


class LayerFunction(torch.autograd.Function):
    """The layer: :func:`forward_of` x, the mask, a :class:`Call` and the parameters. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, call: Call, *parameters: Tensor) -> Tensor:
        kept = Kept(frozenset(row.name for row in kept_rows(call.config)))
        with without_autocast(x):
            out = forward_of(x, mask, Weights(*parameters), call, kept)
        if "output" in kept.names:
            kept["output"] = out
        ctx.call, ctx.names, ctx.x_dtype = call, tuple(kept), x.dtype
        ctx.save_for_backward(mask if call.config.attn_dropout_checkpoint else None, *parameters, *kept.values())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, *tensors = ctx.saved_tensors
        weights = Weights(*tensors[: len(Weights._fields)])
        saved = dict(zip(ctx.names, tensors[len(weights) :], strict=True))
        if "output" in saved:
            saved["output"] = saved["output"].flatten(0, 1)
        wanted = zip(Weights._fields, ctx.needs_input_grad[3:], strict=True)
        back = _Backward(mask, weights, saved, ctx.call, frozenset(name for name, needed in wanted if needed))
        with without_autocast(grad):
            dx = backward_of(grad, back, needs_input=ctx.needs_input_grad[0])
        grads = (
            back.grads[name].to(parameter.dtype) if name in back.needs else None
            for name, parameter in zip(Weights._fields, weights, strict=True)
        )
        return (None if dx is None or not ctx.needs_input_grad[0] else dx.to(ctx.x_dtype), None, None, *grads)
