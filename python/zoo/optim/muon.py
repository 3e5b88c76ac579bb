"""Muon."""

from __future__ import annotations

import math
from typing import Any

import torch

from zoo.kernels.update import Settings, adam
from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.options import at_least_zero, betas_in_range
from zoo.optim.plan import Batch
from zoo.optim.whole import Measured, Parts, WholeTensorOptimizer

COEFFICIENTS = (3.4445, -4.775, 2.0315)


class Muon(WholeTensorOptimizer):
    """b ← μ·b + (1-μ)·g,  p ← (1 - lr·weight_decay)·p - lr·s·orthogonal(b, or (1-μ)·g + μ·b with nesterov).

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the arguments of torch.optim.Muon.
    ``orthogonal`` replaces the singular values of a matrix by numbers near 1 (:func:`orthogonal`). s depends on the
    shape (A, B): with adjust_lr_fn "original" (the default) √max(1, A/B), with "match_rms_adamw" 0.2·√max(A, B) (Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2). States: ``step``, ``momentum_buffer`` (b), ``master``
    for bf16 and fp16 parameters. The matrix products are torch's: there is nothing for a kernel to win.

    It is for the matrices of hidden layers. Embeddings, the head and vectors go into a parameter group with
    ``"use_muon": False``, which is updated as :class:`~zoo.optim.AdamW` does with the group's ``lr``, ``weight_decay``,
    ``betas`` and ``adam_eps``; its states are AdamW's.

    Args:
        parts: see :class:`~zoo.optim.whole.WholeTensorOptimizer`. A matrix is then brought together, in bf16, wherever
            a part of it is updated.

    Raises:
        ValueError: an option out of its range, a parameter that is not a matrix in a group with ``use_muon``.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7, ns_steps: int = 5,
        adjust_lr_fn: str | None = None, *, use_muon: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8, maximize: bool = False, master_dtype: torch.dtype | None = torch.float32,
        parts: Parts | None = None,
    ) -> None:  # fmt: skip
        at_least_zero(lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps, adam_eps=adam_eps)
        betas_in_range(betas)
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}; it must be 'original', 'match_rms_adamw' or None.")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps}; needed are 1 to 99 steps.")
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon, "betas": betas, "adam_eps": adam_eps, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype, parts=parts)
        for group in self.param_groups:
            for p in group["params"] if group["use_muon"] else ():
                if len(self._shape(p)) != 2:
                    raise ValueError(
                        f"Muon got a parameter of shape {tuple(self._shape(p))}; it takes matrices only. Put vectors, "
                        'embeddings and the head into a parameter group with "use_muon": False, which AdamW updates.'
                    )

    def _shape(self, p: torch.Tensor) -> torch.Size:
        return p.shape if self.parts is None else self.parts.shape(p)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """b; m and v in a group of AdamW."""
        return ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """Of a group of AdamW; Muon itself is not elementwise and has no rule among the kernels."""
        if group["use_muon"]:
            raise AssertionError("a group with use_muon has no elementwise rule")
        beta1, beta2 = group["betas"]
        return adam(
            lr=lr, beta1=beta1, beta2=beta2, eps=group["adam_eps"], weight_decay=group["weight_decay"], decoupled=True
        )

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float | torch.Tensor) -> bool:
        if group["use_muon"]:
            return super()._update(group, batch, grad_scale)
        return ElementwiseOptimizer._update(self, group, batch, grad_scale)

    def _measure(self, group: dict[str, Any], batch: Batch, grad_scale: float | torch.Tensor) -> list[torch.Tensor]:
        mu, found = group["momentum"], []
        masters = batch.lists.get("master", batch.params)
        for p, master, b in zip(batch.params, masters, batch.lists["momentum_buffer"], strict=True):
            if p.grad is None:
                raise AssertionError("a gradient vanished during the step")
            grad = p.grad.to(master.dtype) * grad_scale
            b.mul_(mu).add_(grad * (1 - mu))
            found.append((grad * (1 - mu) + b * mu if group["nesterov"] else b).bfloat16())
        return found

    def _apply(self, measured: list[Measured]) -> None:
        directions = [d for one in measured for d in one.values]
        params = [p for one in measured for p in one.batch.params]
        if self.parts is not None:
            groups = [i for i, group in enumerate(self.param_groups) if group["use_muon"]]
            directions = self.parts.whole(groups, params, directions)
        whole = iter(directions)
        for one in measured:
            masters = one.batch.lists.get("master", one.batch.params)
            for p, master in zip(one.batch.params, masters, strict=True):
                self._apply_one(one.group, p, master, next(whole))

    def _apply_one(self, group: dict[str, Any], p: torch.Tensor, master: torch.Tensor, d: torch.Tensor) -> None:
        rows, columns = d.shape
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1.0, rows / max(columns, 1)))
        d = orthogonal(d, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(master.dtype)
        if self.parts is not None:
            start = self.parts.start(p)
            d = d.reshape(-1)[start : start + p.numel()]
        lr = float(group["lr"])
        master.mul_(1 - lr * group["weight_decay"]).sub_(d * (lr * scale))
        if master is not p:
            p.copy_(master)


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
