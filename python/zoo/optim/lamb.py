"""LAMB."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import Settings, lamb, lamb_apply_, lamb_direction_, trust_ratios
from zoo.optim.base import flattened
from zoo.optim.options import at_least_zero, betas_in_range, coefficients_in_order
from zoo.optim.plan import Batch
from zoo.optim.whole import Measured, Parts, WholeTensorOptimizer


class Lamb(WholeTensorOptimizer):
    """d = m̂ / (√v̂ + ε) + weight_decay·p,  p ← p - lr·φ·d with φ = clamp(‖p‖/‖d‖, min_coeff, max_coeff) of each tensor.

    You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2; m̂ and v̂ are
    Adam's moments, corrected for their bias. φ is 1 where a norm is zero. Two passes: moments and norms, then the
    parameters. States as :class:`~zoo.optim.Adam`; the moments are fp32.

    The norms are of whole tensors: where processes hold parts of one, ``parts`` adds their sums up between the passes.

    Args:
        bias_correction: False takes m and v as they are.
        eps_inside_sqrt: √(v̂ + ε) in the place of √v̂ + ε.
        min_coeff, max_coeff: limits of the trust ratio φ; None for none.
        parts: see :class:`~zoo.optim.whole.WholeTensorOptimizer`.

    Raises:
        ValueError: an option out of its range.
    """

    adds_up_parts = True
    num_sums = 2
    """Of a step, over the parts of each tensor: ‖p‖² and ‖d‖²."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.0, *, bias_correction: bool = True, eps_inside_sqrt: bool = False,
        min_coeff: float | None = 0.01, max_coeff: float | None = 10.0, maximize: bool = False,
        foreach: bool | None = None, capturable: bool = False, fused: bool | None = None,
        master_dtype: torch.dtype | None = torch.float32, parts: Parts | None = None,
    ) -> None:  # fmt: skip
        at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        betas_in_range(betas)
        coefficients_in_order(min_coeff, max_coeff)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt, "min_coeff": min_coeff, "max_coeff": max_coeff, "maximize": maximize,
            "capturable": capturable,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype, parts=parts)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m and v."""
        return ("exp_avg", "exp_avg_sq")

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.lamb``."""
        beta1, beta2 = group["betas"]
        options = {k: group[k] for k in ("eps", "weight_decay", "bias_correction", "eps_inside_sqrt")}
        return lamb(lr=lr, beta1=beta1, beta2=beta2, **options)

    def _measure(self, group: dict[str, Any], batch: Batch, grad_scale: float | torch.Tensor) -> tuple[Any, ...]:
        with self._scalars(group, batch, grad_scale) as (settings, scalars):
            params, grads, (m, v), masters = flattened(batch)
            flags = settings.flags
            norms = lamb_direction_(flags, params, grads, m, v, masters, scalars=scalars)
        return norms, lambda ratios: lamb_apply_(flags, params, m, v, masters, ratios=ratios, scalars=scalars)

    def _apply(self, measured: list[Measured]) -> None:
        params = [p for one in measured for p in one.batch.params]
        norms = torch.cat([one.values[0] for one in measured]) if measured else torch.empty((0, 2), dtype=torch.float64)
        if self.parts is not None:
            norms = self.parts.sum(params, norms)
        for one, sums in zip(measured, torch.split(norms, [len(one.batch.params) for one in measured]), strict=True):
            ratios = trust_ratios(sums, min_coeff=one.group["min_coeff"], max_coeff=one.group["max_coeff"])
            one.values[1](ratios)
