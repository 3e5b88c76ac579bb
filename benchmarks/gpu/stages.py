"""What is timed. A new operation is one more entry of :data:`STAGES`.

A stage makes contenders, each a function without arguments over tensors of its own, and says how many bytes the
operation has to move at least: the fraction of the device's copy bandwidth follows from them. A peer that moves more
shows a smaller fraction for the same seconds; ``note`` says where it does something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu import decoding, packed

from zoo.kernels import gating
from zoo.kernels.activation import activate_, activate_backward_
from zoo.kernels.bias_dropout_residual import bias_dropout_residual, bias_dropout_residual_backward
from zoo.kernels.bias_gelu import bias_gelu, bias_gelu_backward
from zoo.kernels.layer_norm import layer_norm, layer_norm_backward
from zoo.kernels.norm import scale_sum_squares_, sum_squares
from zoo.kernels.onebit import compress_, decompress_, owed_
from zoo.kernels.quantise import dequantise_, dequantise_asymmetric_, quantise, quantise_asymmetric
from zoo.kernels.softmax import softmax, softmax_backward
from zoo.optim import AdamW, Lamb

Tensor = torch.Tensor
Contenders = dict[str, Callable[[], Any]]
OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
SMALL = 4160
BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Stage:
    """``make(device, elements)`` returns the contenders and the bytes that zoo's operation moves."""

    name: str
    make: Callable[[str, int], tuple[Contenders, int]]
    note: str = ""


def normal(sizes: Sequence[int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Normal numbers."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(n, generator=generator, device=device, dtype=torch.float32).to(dtype) for n in sizes]


def parameters(sizes: Sequence[int], dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    made = [torch.nn.Parameter(t) for t in normal(sizes, dtype, device)]
    for p, g in zip(made, normal(sizes, dtype, device), strict=True):
        p.grad = g
    return made


def one(elements: int) -> list[int]:
    """One tensor."""
    return [elements]


def layers(elements: int) -> list[int]:
    """168 tensors."""
    return [max(1, elements // 168)] * 168


def small(elements: int) -> list[int]:
    """4,807 tensors of 4,160 elements, or fewer where few elements are asked for: a model of many narrow layers."""
    return [SMALL] * min(4807, max(1, elements // SMALL))


def three_passes(sizes: Sequence[int], device: str, **more: bool) -> Callable[[], None]:
    """The mixed step as torch can do it: gradients to fp32, the step on the masters, masters back to bf16."""
    low = parameters(sizes, torch.bfloat16, device)
    masters = [torch.nn.Parameter(p.detach().float()) for p in low]
    for p in masters:
        p.grad = torch.empty_like(p)
    optimizer = torch.optim.AdamW(masters, **OPTIONS, **more)
    low_grads, grads = [p.grad for p in low], [p.grad for p in masters]
    values, sources = [p.detach() for p in low], [p.detach() for p in masters]

    def step() -> None:
        torch._foreach_copy_(grads, low_grads)
        optimizer.step()
        torch._foreach_copy_(values, sources)

    return step


def adamw(sizes_of: Callable[[int], list[int]], *, mixed: bool) -> Callable[[str, int], tuple[Contenders, int]]:
    """AdamW beside torch's fused and foreach versions; 28 bytes a parameter, in fp32 as in the mixed step."""

    def make(device: str, elements: int) -> tuple[Contenders, int]:
        sizes = sizes_of(elements)
        steps: Contenders = {}
        steps["zoo"] = AdamW(parameters(sizes, torch.bfloat16 if mixed else torch.float32, device), **OPTIONS).step
        for name in ("fused", "foreach"):
            more = {name: True}
            steps[f"torch {name}"] = (
                three_passes(sizes, device, **more)
                if mixed
                else torch.optim.AdamW(parameters(sizes, torch.float32, device), **OPTIONS, **more).step
            )
        return steps, 28 * sum(sizes)

    return make


def lamb(device: str, elements: int) -> tuple[Contenders, int]:
    """LAMB: p, g, m, v in, m, v out; then p, m, v in, p out. torch has none."""
    sizes = layers(elements)
    return {"zoo": Lamb(parameters(sizes, torch.float32, device), lr=1e-6).step}, 40 * sum(sizes)


def grad_norm(device: str, elements: int) -> tuple[Contenders, int]:
    """Σx² of each tensor and the norm of all."""
    ours, theirs = normal(layers(elements), torch.float32, device), normal(layers(elements), torch.float32, device)
    steps = {
        "zoo": lambda: sum_squares(ours).sum().sqrt(),
        "torch foreach": lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(theirs))),
    }
    return steps, 4 * sum(t.numel() for t in ours)


def unscale(device: str, elements: int) -> tuple[Contenders, int]:
    """Scaling and the norm of what comes out, against clip_grad_norm_."""
    ours, theirs = normal(layers(elements), torch.float32, device), parameters(layers(elements), torch.float32, device)
    steps = {
        "zoo": lambda: scale_sum_squares_(ours, 0.999).sum().sqrt(),
        "torch foreach": lambda: torch.nn.utils.clip_grad_norm_(theirs, 1e9, foreach=True),
    }
    return steps, 8 * sum(t.numel() for t in ours)


def onebit_compress(device: str, elements: int) -> tuple[Contenders, int]:
    """fp32 with error feedback, groups of 2,048."""
    x, error = normal([elements], torch.float32, device)[0], torch.zeros(elements, device=device)
    return {"zoo": lambda: compress_(x, error)}, 12 * elements + elements // 8


def onebit_owed(device: str, elements: int) -> tuple[Contenders, int]:
    """What the wire leaves out, into the error."""
    x, error = normal([elements], torch.float32, device)[0], torch.zeros(elements, device=device)
    sent = compress_(x)
    return {"zoo": lambda: owed_(error, x, *sent)}, 8 * elements + elements // 8


def onebit_decompress(device: str, elements: int) -> tuple[Contenders, int]:
    """Into fp32."""
    x = normal([elements], torch.float32, device)[0]
    sent, out = compress_(x), torch.empty_like(x)
    return {"zoo": lambda: decompress_(out, *sent)}, 4 * elements + elements // 8


def quantise_by_steps(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """As torch can do it: groups of 256, the greatest magnitude onto 127 or 7; two int4 a byte."""
    groups = x.view(-1, 256).float()
    scales = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    q = (groups / scales).round_().to(torch.int8)
    return (q if bits == 8 else (q[:, 0::2] & 15) | (q[:, 1::2] << 4)), scales


def dequantise_by_steps(out: Tensor, q: Tensor, scales: Tensor, bits: int) -> None:
    """The way back."""
    if bits == 4:
        q = torch.stack([(q << 4) >> 4, q >> 4], -1).view(len(q), -1)
    torch.mul(q, scales, out=out.view(-1, 256)) if out.dtype is torch.float32 else out.copy_((q * scales).view(-1))


def quantise_bits(bits: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[str, int], tuple[Contenders, int]]:
    """Groups of 256."""

    def make(device: str, elements: int) -> tuple[Contenders, int]:
        x = normal([max(256, elements // 256 * 256)], dtype, device)[0]
        steps = {"zoo": lambda: quantise(x, bits=bits), "torch": lambda: quantise_by_steps(x, bits)}
        return steps, x.nbytes + x.numel() * bits // 8

    return make


def quantise_asymmetric_by_steps(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """As torch can do it: groups of 256, the least onto 0, the greatest onto 255 or 15; two of 4 bits a byte."""
    groups = x.view(-1, 256).float()
    minima, most = groups.aminmax(dim=1, keepdim=True)
    scales = (most - minima) / (2**bits - 1)
    q = ((groups - minima) / scales).round_().to(torch.uint8)
    return (q if bits == 8 else q[:, 0::2] | (q[:, 1::2] << 4)), scales, minima


def dequantise_asymmetric_by_steps(out: Tensor, q: Tensor, scales: Tensor, minima: Tensor, bits: int) -> None:
    """The way back."""
    if bits == 4:
        q = torch.stack([q & 15, q >> 4], -1).view(len(q), -1)
    if out.dtype is torch.float32:
        torch.addcmul(minima, q, scales, out=out.view(-1, 256))
    else:
        out.copy_(torch.addcmul(minima, q, scales).view(-1))


def quantise_asymmetric_bits(
    bits: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[str, int], tuple[Contenders, int]]:
    """Groups of 256."""

    def make(device: str, elements: int) -> tuple[Contenders, int]:
        x = normal([max(256, elements // 256 * 256)], dtype, device)[0]
        steps = {
            "zoo": lambda: quantise_asymmetric(x, bits=bits),
            "torch": lambda: quantise_asymmetric_by_steps(x, bits),
        }
        return steps, x.nbytes + x.numel() * bits // 8

    return make


def dequantise_asymmetric(
    bits: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[str, int], tuple[Contenders, int]]:
    """Groups of 256."""

    def make(device: str, elements: int) -> tuple[Contenders, int]:
        x = normal([max(256, elements // 256 * 256)], dtype, device)[0]
        sent, by_steps = quantise_asymmetric(x, bits=bits), quantise_asymmetric_by_steps(x, bits)
        out, theirs = torch.empty_like(x), torch.empty_like(x)
        steps = {
            "zoo": lambda: dequantise_asymmetric_(out, *sent, bits=bits),
            "torch": lambda: dequantise_asymmetric_by_steps(theirs, *by_steps, bits),
        }
        return steps, out.nbytes + x.numel() * bits // 8

    return make


def dequantise(
    ranks: int, bits: int = 8, dtype: torch.dtype = torch.bfloat16
) -> Callable[[str, int], tuple[Contenders, int]]:
    """What ``ranks`` ranks sent, groups of 256; torch for one rank."""

    def make(device: str, elements: int) -> tuple[Contenders, int]:
        n = max(256, elements // ranks // 256 * 256)
        x = normal([n * ranks], dtype, device)[0]
        q, s = quantise(x, bits=bits)
        out, theirs = torch.empty(n, dtype=dtype, device=device), torch.empty(n, dtype=dtype, device=device)
        steps: Contenders = {"zoo": lambda: dequantise_(out, q, s, bits=bits, ranks=ranks)}
        if ranks == 1:
            sent = quantise_by_steps(x, bits)
            steps["torch"] = lambda: dequantise_by_steps(theirs, *sent, bits)
        return steps, out.nbytes + n * ranks * bits // 8

    return make


def rows(elements: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(T, 4096), and (4096,)."""
    x = normal([max(1, elements // 4096) * 4096], dtype, device)[0].view(-1, 4096)
    return x, torch.ones(4096, dtype=dtype, device=device)


def layer_norm_forward(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096."""
    x, w = rows(elements, device, dtype)
    steps = {"zoo": lambda: layer_norm(x, w, w), "torch": lambda: F.layer_norm(x, (4096,), w, w)}
    return steps, 2 * x.nbytes


def add_layer_norm_forward(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, and the residual added in."""
    (x, w), (r, _) = rows(elements, device, dtype), rows(elements, device, dtype)

    def theirs() -> tuple[Tensor, Tensor]:
        total = x + r
        return F.layer_norm(total, (4096,), w, w), total

    return {"zoo": lambda: layer_norm(x, w, w, residual=r), "torch": theirs}, 4 * x.nbytes


def layer_norm_grad(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096: gradients of x, weight and bias."""
    x, w = rows(elements, device, dtype)
    made = layer_norm(x, w, w)
    leaf, weight, bias = (t.clone().requires_grad_() for t in (x, w, w))
    y = F.layer_norm(leaf, (4096,), weight, bias)
    steps = {
        "zoo": lambda: layer_norm_backward(x, None, x, w, made.mean, made.rstd),
        "torch": lambda: torch.autograd.grad(y, (leaf, weight, bias), x, retain_graph=True),
    }
    return steps, 3 * x.nbytes


def bias_gelu_forward(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, tanh form."""
    x, b = rows(elements, device, dtype)
    steps = {"zoo": lambda: bias_gelu(x, b, approximate="tanh"), "torch": lambda: F.gelu(x + b, approximate="tanh")}
    return steps, 2 * x.nbytes


def bias_gelu_grad(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, tanh form: gradients of x and bias."""
    x, b = rows(elements, device, dtype)
    leaf, bias = x.clone().requires_grad_(), b.clone().requires_grad_()
    y = F.gelu(leaf + bias, approximate="tanh")
    steps = {
        "zoo": lambda: bias_gelu_backward(x, x, b, approximate="tanh"),
        "torch": lambda: torch.autograd.grad(y, (leaf, bias), x, retain_graph=True),
    }
    return steps, 3 * x.nbytes


def gated_silu(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, of which the activation has 2,048."""
    pre, _ = rows(elements, device, dtype)
    a = pre[:, :2048].contiguous()

    def of_torch() -> None:
        g, u = pre.chunk(2, -1)
        torch.mul(F.silu(g), u, out=a)

    return {"zoo": lambda: activate_(a, pre, "silu", gated=True), "torch": of_torch}, pre.nbytes + a.nbytes


def gated_silu_grad(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """The same: the activation once more, and the gradient of the rows."""
    pre, _ = rows(elements, device, dtype)
    a, dp, da = pre[:, :2048].contiguous(), torch.empty_like(pre), pre[:, 2048:].contiguous()
    leaf = pre.clone().requires_grad_()

    def of_torch() -> None:
        g, u = leaf.chunk(2, -1)
        torch.autograd.grad(F.silu(g) * u, leaf, da)

    steps = {"zoo": lambda: activate_backward_(a, dp, da, pre, "silu", gated=True), "torch": of_torch}
    return steps, 2 * pre.nbytes + 2 * a.nbytes


def softmax_forward(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096 keys, scaled."""
    x, _ = rows(elements, device, dtype)
    steps = {"zoo": lambda: softmax(x, scale=0.125), "torch": lambda: F.softmax(0.125 * x, -1)}
    return steps, 2 * x.nbytes


def softmax_grad(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096 keys, scaled."""
    x, _ = rows(elements, device, dtype)
    y, leaf = softmax(x, scale=0.125), x.clone().requires_grad_()
    theirs = F.softmax(0.125 * leaf, -1)
    steps = {
        "zoo": lambda: softmax_backward(x, y, scale=0.125),
        "torch": lambda: torch.autograd.grad(theirs, leaf, x, retain_graph=True),
    }
    return steps, 3 * x.nbytes


def dropout_forward(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, p = 0.1."""
    (x, b), (r, _) = rows(elements, device, dtype), rows(elements, device, dtype)
    steps = {
        "zoo": lambda: bias_dropout_residual(x, b, r, p=0.1, seed=1),
        "torch": lambda: r + F.dropout(x + b, 0.1),
    }
    return steps, 3 * x.nbytes


def dropout_grad(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, p = 0.1: gradients of x and bias."""
    x, b = rows(elements, device, dtype)
    leaf, bias = x.clone().requires_grad_(), b.clone().requires_grad_()
    y = F.dropout(leaf + bias, 0.1)
    steps = {
        "zoo": lambda: bias_dropout_residual_backward(x, b, p=0.1, seed=1),
        "torch": lambda: torch.autograd.grad(y, (leaf, bias), x, retain_graph=True),
    }
    return steps, 2 * x.nbytes


EXPERTS, CHOICES = 64, 2


def gate(device: str, elements: int) -> tuple[Contenders, int]:
    """fp32 logits of 64 experts, two chosen."""
    tokens = max(1, elements // EXPERTS)
    logits = normal([tokens * EXPERTS], torch.float32, device)[0].view(tokens, EXPERTS)
    steps = {
        "zoo": lambda: gating.top_k_gate(logits, CHOICES),
        "torch": lambda: torch.topk(logits.softmax(-1), CHOICES),
    }
    return steps, tokens * (4 * EXPERTS + 12 * CHOICES)


def chosen(tokens: int, device: str) -> Tensor:
    """Two of 64 experts for each token."""
    logits = normal([tokens * EXPERTS], torch.float32, device)[0].view(tokens, EXPERTS)
    return logits.topk(CHOICES).indices


def places(device: str, elements: int) -> tuple[Contenders, int]:
    """As many tokens as there are rows of 4,096, two of 64 experts each."""
    indices = chosen(max(1, elements // 4096), device)

    def one_hot() -> Tensor:
        sequence = indices.t().reshape(-1)
        before = F.one_hot(sequence, EXPERTS).cumsum(0) - 1
        return before.gather(1, sequence[:, None]).view(CHOICES, -1).t()

    return {"zoo": lambda: gating.positions_in_expert(indices, EXPERTS), "torch": one_hot}, 16 * indices.numel()


def places_by_key(device: str, elements: int) -> tuple[Contenders, int]:
    """The same, where an expert keeps as many as there are for each on average: those of the greatest keys."""
    indices = chosen(max(1, elements // 4096), device)
    key = normal([indices.numel()], torch.float32, device)[0].view(indices.shape)
    limit = max(1, indices.numel() // EXPERTS)

    def among(sequence: Tensor, counted: Tensor) -> Tensor:
        before = (F.one_hot(sequence, EXPERTS) * counted[:, None]).cumsum(0) - 1
        return before.gather(1, sequence[:, None])[:, 0]

    def by_sort() -> Tensor:
        sequence, order = indices.reshape(-1), torch.sort(key.reshape(-1), descending=True, stable=True).indices
        kept = torch.empty_like(sequence)
        kept[order] = (among(sequence[order], torch.ones_like(order)) < limit).long()
        return torch.where(kept > 0, among(sequence, kept), -1).view(indices.shape)

    def by_key() -> Any:
        return gating.positions_in_expert(indices, EXPERTS, capacity=limit, priority=key)

    return {"zoo": by_key, "torch": by_sort}, 20 * indices.numel()


def assigned(device: str, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, 4096); rows (T, 2), grouped by expert; and the token of each of the 2·T rows."""
    x, _ = rows(elements, device, dtype)
    indices = chosen(len(x), device)
    order = torch.sort(indices.view(-1), stable=True).indices
    taken = torch.empty_like(order)
    taken[order] = torch.arange(len(order), device=device)
    return x, taken.view(-1, CHOICES), order // CHOICES


def permute(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, two places for each."""
    x, taken, tokens = assigned(device, elements, dtype)
    steps = {"zoo": lambda: gating.permute(x, taken), "torch": lambda: x.index_select(0, tokens)}
    return steps, (1 + CHOICES) * x.nbytes


def unpermute(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, two weighted ones for each."""
    x, taken, tokens = assigned(device, elements, dtype)
    y, w = x[tokens], normal([taken.numel()], dtype, device)[0].view(taken.shape)
    steps = {"zoo": lambda: gating.unpermute(y, taken, w), "torch": lambda: (w[..., None] * y[taken]).sum(1)}
    return steps, (1 + CHOICES) * x.nbytes


def unpermute_grad(device: str, elements: int, dtype: torch.dtype = BF16) -> tuple[Contenders, int]:
    """Rows of 4,096, two weighted ones for each: gradients of the rows and the weights."""
    x, taken, tokens = assigned(device, elements, dtype)
    y, w = x[tokens], normal([taken.numel()], dtype, device)[0].view(taken.shape)
    leaf, weights = y.clone().requires_grad_(), w.clone().requires_grad_()
    out = (weights[..., None] * leaf[taken]).sum(1)
    steps = {
        "zoo": lambda: gating.unpermute_backward(x, y, taken, w),
        "torch": lambda: torch.autograd.grad(out, (leaf, weights), x, retain_graph=True),
    }
    return steps, (1 + 2 * CHOICES) * x.nbytes


BY_STEPS = "torch: several operations"
MIXED = "torch needs three passes: gradients to fp32, the step, masters to bf16"
STAGES = (
    Stage(name="AdamW fp32, one tensor", make=adamw(one, mixed=False)),
    Stage(name="AdamW fp32, 168 tensors", make=adamw(layers, mixed=False)),
    Stage(name="AdamW fp32, 4,807 tensors", make=adamw(small, mixed=False)),
    Stage(name="AdamW mixed bf16, one tensor", make=adamw(one, mixed=True), note=MIXED),
    Stage(name="AdamW mixed bf16, 168 tensors", make=adamw(layers, mixed=True), note=MIXED),
    Stage(name="AdamW mixed bf16, 4,807 tensors", make=adamw(small, mixed=True), note=MIXED),
    Stage(name="LAMB fp32, 168 tensors", make=lamb),
    Stage(name="norm, 168 tensors", make=grad_norm),
    Stage(
        name="scale and norm, 168 tensors", make=unscale,
        note="zoo scales, then takes the norm, in one pass; torch (clip_grad_norm_) takes the norm, then scales",
    ),
    Stage(name="1-bit compress", make=onebit_compress),
    Stage(name="1-bit, what is owed", make=onebit_owed),
    Stage(name="1-bit decompress", make=onebit_decompress),
    Stage(name="quantise to int8", make=quantise_bits(8), note=BY_STEPS),
    Stage(name="quantise to int4", make=quantise_bits(4), note=BY_STEPS),
    Stage(name="dequantise int8", make=dequantise(1), note=BY_STEPS),
    Stage(name="dequantise int4", make=dequantise(1, 4), note=BY_STEPS),
    Stage(name="quantise to 8 bits, asymmetric", make=quantise_asymmetric_bits(8), note=BY_STEPS),
    Stage(name="quantise to 4 bits, asymmetric", make=quantise_asymmetric_bits(4), note=BY_STEPS),
    Stage(name="dequantise 8 bits, asymmetric", make=dequantise_asymmetric(8), note=BY_STEPS),
    Stage(name="dequantise 4 bits, asymmetric", make=dequantise_asymmetric(4), note=BY_STEPS),
    Stage(name="dequantise and reduce int8 of 4 ranks", make=dequantise(4)),
    Stage(name="layer norm", make=layer_norm_forward),
    Stage(name="layer norm of a sum", make=add_layer_norm_forward, note="torch: two operations"),
    Stage(name="layer norm, gradient", make=layer_norm_grad),
    Stage(name="bias and GELU", make=bias_gelu_forward, note="torch: two operations"),
    Stage(name="bias and GELU, gradient", make=bias_gelu_grad, note="torch: two operations"),
    Stage(name="gated SiLU", make=gated_silu, note="torch: two operations"),
    Stage(name="gated SiLU, gradient", make=gated_silu_grad, note="torch: activation and gradient, several operations"),
    Stage(name="softmax", make=softmax_forward, note="torch: two operations"),
    Stage(name="softmax, gradient", make=softmax_grad, note="torch: two operations"),
    Stage(
        name="bias, dropout and residual", make=dropout_forward,
        note="torch: three operations, with a mask that is kept",
    ),
    Stage(
        name="bias, dropout and residual, gradient", make=dropout_grad,
        note="torch reads the mask that was kept; zoo makes it again",
    ),
    Stage(name="two of 64 experts", make=gate, note="torch: softmax and topk"),
    Stage(name="places within 64 experts", make=places, note="torch: one_hot and cumsum"),
    Stage(name="places within 64 experts, by a key", make=places_by_key, note="torch: sort, and twice the same"),
    Stage(
        name="permute to two experts", make=permute,
        note="torch is given the token of each row; zoo makes it from the row of each token",
    ),
    Stage(name="unpermute, weighted", make=unpermute, note="torch: indexing, product and sum"),
    Stage(name="unpermute, gradient", make=unpermute_grad, note="torch: those of the three"),
    Stage(name="packed linear, int8, 4 tokens", make=packed.decode(8), note="torch: W in bf16"),
    Stage(name="packed linear, int4, 4 tokens", make=packed.decode(4), note="torch: W in bf16"),
    Stage(name="thin linear, 1 token", make=decoding.decode(1)),
    Stage(name="thin linear, 8 tokens", make=decoding.decode(8)),
)  # fmt: skip
