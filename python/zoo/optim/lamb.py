"""LAMB."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import lamb, lamb_apply_, lamb_direction_, trust_ratios
from zoo.optim.base import ElementwiseOptimizer, flattened
from zoo.optim.options import at_least_zero, betas_in_range
from zoo.optim.plan import Batch


class Lamb(ElementwiseOptimizer):
    """d = m̂ / (√v̂ + ε) + weight_decay·p,  p ← p - lr·φ·d with φ = clamp(‖p‖/‖d‖, min_coeff, max_coeff) of each tensor.

    You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2; m̂ and v̂ are
    Adam's moments, corrected for their bias. φ is 1 where a norm is zero. Two passes: moments and norms, then the
    parameters. States as :class:`~zoo.optim.Adam`; the moments are fp32.

    The norms are of whole tensors, so LAMB does not run on the flat shards of a ZeRO optimizer, which refuses it.

    Args:
        bias_correction: False takes m and v as they are.
        eps_inside_sqrt: √(v̂ + ε) in the place of √v̂ + ε.
        min_coeff, max_coeff: limits of the trust ratio φ; None for none.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.0, *, bias_correction: bool = True, eps_inside_sqrt: bool = False,
        min_coeff: float | None = 0.01, max_coeff: float | None = 10.0, maximize: bool = False,
        foreach: bool | None = None, fused: bool | None = None, master_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        at_least_zero(lr=float(lr), eps=eps, weight_decay=weight_decay)
        betas_in_range(betas)
        if min_coeff is not None and max_coeff is not None and not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"min_coeff={min_coeff}, max_coeff={max_coeff}; needed is 0 <= min_coeff <= max_coeff.")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt, "min_coeff": min_coeff, "max_coeff": max_coeff, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m and v."""
        return ("exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float) -> bool:
        if any(p.grad is None for p in batch.params):
            return False
        beta1, beta2 = group["betas"]
        options = {k: group[k] for k in ("eps", "weight_decay", "bias_correction", "eps_inside_sqrt")}
        flags, scalars = lamb(
            lr=float(group["lr"]), beta1=beta1, beta2=beta2, step=batch.step + 1, grad_scale=grad_scale, **options
        )
        params, grads, (m, v), masters = flattened(batch)
        norms = lamb_direction_(flags, params, grads, m, v, masters, scalars=scalars)
        ratios = trust_ratios(norms, min_coeff=group["min_coeff"], max_coeff=group["max_coeff"])
        lamb_apply_(flags, params, m, v, masters, ratios=ratios, scalars=scalars)
        return True
