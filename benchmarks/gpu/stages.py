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

from zoo.kernels.bias_gelu import bias_gelu, bias_gelu_backward
from zoo.kernels.layer_norm import layer_norm, layer_norm_backward
from zoo.kernels.norm import scale_sum_squares_, sum_squares
from zoo.kernels.onebit import compress_, decompress_
from zoo.kernels.quantise import dequantise_, quantise
from zoo.optim import AdamW, Lamb

Tensor = torch.Tensor
Contenders = dict[str, Callable[[], Any]]
OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
SMALL = 4160


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


def onebit_decompress(device: str, elements: int) -> tuple[Contenders, int]:
    """Into fp32."""
    x, error = normal([elements], torch.float32, device)[0], torch.zeros(elements, device=device)
    sent, out = compress_(x, error), torch.empty_like(x)
    return {"zoo": lambda: decompress_(out, *sent)}, 4 * elements + elements // 8


def quantise_bits(bits: int) -> Callable[[str, int], tuple[Contenders, int]]:
    """bf16, groups of 256."""

    def make(device: str, elements: int) -> tuple[Contenders, int]:
        x = normal([elements], torch.bfloat16, device)[0]
        return {"zoo": lambda: quantise(x, bits=bits)}, 2 * elements + elements * bits // 8

    return make


def dequantise(ranks: int) -> Callable[[str, int], tuple[Contenders, int]]:
    """int8 of ``ranks`` ranks into bf16, groups of 256."""

    def make(device: str, elements: int) -> tuple[Contenders, int]:
        n = max(256, elements // ranks // 256 * 256)
        q, s = quantise(normal([n * ranks], torch.bfloat16, device)[0])
        out = torch.empty(n, dtype=torch.bfloat16, device=device)
        return {"zoo": lambda: dequantise_(out, q, s, ranks=ranks)}, n * (ranks + 2)

    return make


def rows(elements: int, device: str) -> tuple[Tensor, Tensor]:
    """bf16 (T, 4096), and (4096,)."""
    x = normal([max(1, elements // 4096) * 4096], torch.bfloat16, device)[0].view(-1, 4096)
    return x, torch.ones(4096, dtype=torch.bfloat16, device=device)


def layer_norm_forward(device: str, elements: int) -> tuple[Contenders, int]:
    """bf16, rows of 4,096."""
    x, w = rows(elements, device)
    steps = {"zoo": lambda: layer_norm(x, w, w), "torch": lambda: F.layer_norm(x, (4096,), w, w)}
    return steps, 4 * x.numel()


def layer_norm_grad(device: str, elements: int) -> tuple[Contenders, int]:
    """bf16, rows of 4,096: gradients of x, weight and bias."""
    x, w = rows(elements, device)
    made = layer_norm(x, w, w)
    leaf, weight, bias = (t.clone().requires_grad_() for t in (x, w, w))
    y = F.layer_norm(leaf, (4096,), weight, bias)
    steps = {
        "zoo": lambda: layer_norm_backward(x, None, x, w, made.mean, made.rstd),
        "torch": lambda: torch.autograd.grad(y, (leaf, weight, bias), x, retain_graph=True),
    }
    return steps, 6 * x.numel()


def bias_gelu_forward(device: str, elements: int) -> tuple[Contenders, int]:
    """bf16, rows of 4,096, tanh form."""
    x, b = rows(elements, device)
    steps = {"zoo": lambda: bias_gelu(x, b, approximate="tanh"), "torch": lambda: F.gelu(x + b, approximate="tanh")}
    return steps, 4 * x.numel()


def bias_gelu_grad(device: str, elements: int) -> tuple[Contenders, int]:
    """bf16, rows of 4,096, tanh form: gradients of x and bias."""
    x, b = rows(elements, device)
    leaf, bias = x.clone().requires_grad_(), b.clone().requires_grad_()
    y = F.gelu(leaf + bias, approximate="tanh")
    steps = {
        "zoo": lambda: bias_gelu_backward(x, x, b, approximate="tanh"),
        "torch": lambda: torch.autograd.grad(y, (leaf, bias), x, retain_graph=True),
    }
    return steps, 6 * x.numel()


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
    Stage(name="1-bit decompress", make=onebit_decompress),
    Stage(name="quantise to int8", make=quantise_bits(8)),
    Stage(name="quantise to int4", make=quantise_bits(4)),
    Stage(name="dequantise int8", make=dequantise(1)),
    Stage(name="dequantise and reduce int8 of 4 ranks", make=dequantise(4)),
    Stage(name="layer norm", make=layer_norm_forward),
    Stage(name="layer norm, gradient", make=layer_norm_grad),
    Stage(name="bias and GELU", make=bias_gelu_forward, note="torch: two operations"),
    Stage(name="bias and GELU, gradient", make=bias_gelu_grad, note="torch: two operations"),
)  # fmt: skip
