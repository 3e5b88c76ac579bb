"""1-bit Adam."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import Settings, adam, lamb_apply_, lamb_direction_
from zoo.optim.base import ElementwiseOptimizer, flattened
from zoo.optim.frozen import FreezeStep, FrozenVariance
from zoo.optim.plan import Batch
from zoo.optim.synced import Peers
from zoo.optim.whole import Measured


class OnebitAdam(FrozenVariance):
    """Adam whose variance is frozen after a warm-up, so that momentum can travel as signs.

    Legend: T = ``freeze_step``; R ranks; g_r the gradient of rank r; C the compressor of ``peers``; e_r and s what was
    left out at workers and servers (``zoo.comm.compression.errors``).

        t ≤ T:  Adam with the mean gradient
        t > T:  m_r = β1·m + (1-β1)·g_r,   m ← C(1/R Σ_r C(m_r + e_r) + s),   p ← (1 - lr·λ)·p - lr·m̂ / (√v̂_T + ε)

    Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    algorithm 1. Departures: bias correction, which v keeps from step T (an option; the paper has none); weight decay λ
    (the paper has none), decoupled unless ``decoupled_weight_decay`` is false; no momentum where v is zero
    (:class:`~zoo.optim.synced.SyncedOptimizer`). States as :class:`~zoo.optim.Adam`, in fp32.

    Args:
        freeze_step: T, at least 1, or "auto": see :class:`~zoo.optim.frozen.FrozenVariance`.
        eps_inside_sqrt: √(v̂ + ε) in the place of √v̂ + ε.
        amsgrad: refused; v does not change.
        compressor: see :class:`~zoo.optim.synced.SyncedOptimizer`.
        peers: the other ranks, see :class:`~zoo.optim.synced.Peers`; ZeRO gives them.

    Raises:
        ValueError: an option out of its range, or groups with different ``freeze_step``.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, freeze_step: FreezeStep = 100_000,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, *,
        bias_correction: bool = True, eps_inside_sqrt: bool = False, decoupled_weight_decay: bool = True,
        amsgrad: bool = False, maximize: bool = False, master_dtype: torch.dtype | None = torch.float32,
        compressor: Any = None, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        if eps_inside_sqrt and weight_decay and not decoupled_weight_decay:
            raise ValueError(
                f"eps_inside_sqrt=True with weight_decay={weight_decay} that is not decoupled: there is no such "
                "warm-up. Leave decoupled_weight_decay=True, or eps_inside_sqrt out."
            )
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt, "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize, "amsgrad": amsgrad,
        }  # fmt: skip
        super().__init__(
            params, "OnebitAdam", freeze_step, defaults, master_dtype=master_dtype, compressor=compressor, peers=peers
        )

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """Of a step in the warm-up: see ``zoo.kernels.update.adam``."""
        beta1, beta2 = group["betas"]
        return adam(
            lr=lr, beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"], bias_correction=group["bias_correction"],
        )  # fmt: skip

    def _warm_up(self, group: dict[str, Any], batch: Batch, grad_scale: float | torch.Tensor) -> bool:
        if not group["eps_inside_sqrt"]:
            return ElementwiseOptimizer._update(self, group, batch, grad_scale)
        if any(p.grad is None for p in batch.params):
            return False
        # Adam's own pass has ε outside of the root: LAMB's two, with a trust ratio of 1.
        params, grads, (m, v), masters = flattened(batch)
        settings, step = self._direction(group, float(group["lr"])), batch.step + 1
        scalars = settings.at(step, grad_scale=float(grad_scale))
        lamb_direction_(settings.flags, params, grads, m, v, masters, scalars=scalars)
        ratios = torch.ones(len(params), device=params[0].device)
        lamb_apply_(settings.flags, params, m, v, masters, ratios=ratios, scalars=scalars)
        return True

    def _compressed_steps(self, measured: list[Measured], means: list[list[torch.Tensor]]) -> None:
        for one, of_batch in zip(measured, means, strict=True):
            step, found, _ = one.values
            for m, mean in zip(found[2][0], of_batch, strict=True):
                m.copy_(mean)
            variances = self._num_variances(one.group, one.batch)
            self._move(one.group, found, found[2][0], lr=float(one.group["lr"]), step=step, variances=variances)
