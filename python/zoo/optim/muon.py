"""Muon."""

from __future__ import annotations

import math
from typing import Any

import torch

from zoo.kernels.update import Flag, Rule, Scalars
from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.options import at_least_zero
from zoo.optim.plan import Batch

COEFFICIENTS = (3.4445, -4.775, 2.0315)


class Muon(ElementwiseOptimizer):
    """b ← μ·b + (1-μ)·g,  p ← (1 - lr·weight_decay)·p - lr·s·orthogonal(b, or (1-μ)·g + μ·b with nesterov).

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the arguments of torch.optim.Muon.
    ``orthogonal`` replaces the singular values of a matrix by numbers near 1 (:func:`orthogonal`). s depends on the
    shape (A, B): with adjust_lr_fn "original" (the default) √max(1, A/B), with "match_rms_adamw" 0.2·√max(A, B) (Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2). For the matrices of hidden layers; embeddings, the head
    and vectors belong to AdamW. States: ``step``, ``momentum_buffer`` (b), ``master`` for bf16 and fp16 parameters.

    The matrix products are torch's: there is nothing for a kernel to win. A matrix must be whole, so Muon does not run
    on the flat shards of a ZeRO optimizer, which refuses it.

    Raises:
        ValueError: an option out of its range, a parameter that is not a matrix.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7, ns_steps: int = 5,
        adjust_lr_fn: str | None = None, *, maximize: bool = False, master_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        at_least_zero(lr=float(lr), weight_decay=weight_decay, momentum=momentum, eps=eps)
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}; it must be 'original', 'match_rms_adamw' or None.")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_coefficients={ns_coefficients}, ns_steps={ns_steps}; needed are 1 to 99 steps.")
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype)
        for p in self._all_params():
            if p.dim() != 2:
                raise ValueError(
                    f"Muon got a parameter of shape {tuple(p.shape)}; it takes matrices only. Give vectors, embeddings "
                    "and the head to AdamW."
                )

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """b."""
        return ("momentum_buffer",)

    def scalars(self, group: dict[str, Any], step: int, grad_scale: float) -> tuple[Rule, Flag, Scalars]:
        """Muon is not elementwise: it has no rule among the kernels."""
        raise AssertionError("Muon updates by itself")

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float) -> bool:
        if any(p.grad is None for p in batch.params):
            return False
        mu, lr = group["momentum"], float(group["lr"])
        for i, p in enumerate(batch.params):
            master = batch.lists["master"][i] if "master" in batch.lists else p
            grad = p.grad.to(master.dtype) * grad_scale if p.grad is not None else None
            if grad is None:
                raise AssertionError("a gradient vanished during the step")
            b = batch.lists["momentum_buffer"][i]
            b.mul_(mu).add_(grad * (1 - mu))
            d = grad * (1 - mu) + b * mu if group["nesterov"] else b
            d = orthogonal(d, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(master.dtype)
            rows, columns = p.shape
            matched = group["adjust_lr_fn"] == "match_rms_adamw"
            shape = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1.0, rows / max(columns, 1)))
            master.mul_(1 - lr * group["weight_decay"]).sub_(d * (lr * shape))
            if master is not p:
                p.copy_(master)
        return True


def orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> torch.Tensor:
    """X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ, ``steps`` times, from X = matrix / max(‖matrix‖, eps).

    A Newton-Schulz iteration of degree five, towards singular values of 1. With the default coefficients those that
    are not tiny end up in about [0.7, 1.2], which training does not tell from 1 (Jordan et al. 2024). Computed in bf16;
    shape and device as ``matrix``.
    """
    a, b, c = coefficients
    x: torch.Tensor = matrix.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.t() if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.t() if tall else x
