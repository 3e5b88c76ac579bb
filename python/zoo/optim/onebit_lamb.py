"""1-bit LAMB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.kernels.update import Settings, lamb_apply_, lamb_direction_, trust_ratios
from zoo.optim.base import flattened
from zoo.optim.frozen import FreezeStep, FrozenVariance
from zoo.optim.options import coefficients_in_order
from zoo.optim.plan import Batch
from zoo.optim.synced import Flat, Peers
from zoo.optim.whole import Measured, Parts

Tensor = torch.Tensor


@dataclass
class _WarmUp:
    """A batch whose moments are advanced: the sums of each tensor, and what its second pass needs."""

    norms: Tensor
    found: Flat
    settings: Settings
    scalars: Any


class OnebitLamb(FrozenVariance):
    """LAMB whose variance and trust ratios are frozen after a warm-up, so that momentum can travel as signs.

    Legend: T = ``freeze_step``; R ranks; g_r the gradient of rank r; C the compressor of ``peers``; φ_t the trust ratio
    of a tensor in step t, c its average.

        t ≤ T:  LAMB with the mean gradient;  c ← β3·c + (1-β3)·φ_t
        t > T:  m_r = β1·m + (1-β1)·g_r,   m' = C(1/R Σ_r C(m_r + e_r) + s)
                g̃ = (m' - β1·m) / (1-β1),   w ← β2·w + (1-β2)·g̃²   (w = v_T at first),   m ← m'
                ρ_t = max (√v_T + ε) / (√w + ε) over the tensor, clamped to [factor_min, factor_max] and then to
                      [1 - factor_threshold, 1 + factor_threshold]·ρ_(t-1), where ρ_T = 1
                p ← p - lr·c·ρ_t·(m̂ / (√v̂_T + ε) + λ·p)

    Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence
    Speed", algorithm 1. Departures: bias correction, which v keeps from step T (an option; the paper has none); weight
    decay λ (the paper has none); no momentum where v is zero (:class:`~zoo.optim.synced.SyncedOptimizer`); messages
    have a scale for each group of elements, where the paper scales tensors to a common magnitude first. States, fp32:
    ``exp_avg``, ``exp_avg_sq``, ``fresh_sq`` (w); ``coeff`` (c) and ``factor`` (ρ) of each tensor.

    Args:
        freeze_step: T, at least 1 / (1 - coeff_beta), which c needs to forget that it began at zero; or "auto", see
            :class:`~zoo.optim.frozen.FrozenVariance`.
        max_coeff, min_coeff: limits of φ; None for none.
        coeff_beta: β3.
        factor_max, factor_min, factor_threshold: limits of ρ.
        eps_inside_sqrt: √(v + ε) in the place of √v + ε.
        amsgrad: refused; v does not change.
        compressor, peers: see :class:`~zoo.optim.synced.SyncedOptimizer`.
        parts: see :class:`~zoo.optim.whole.WholeTensorOptimizer`.

    Raises:
        ValueError: an option out of its range, or groups with different ``freeze_step``.
    """

    needs_whole_tensors = adds_up_parts = True

    def __init__(
        self, params: Any, lr: float = 1e-3, freeze_step: FreezeStep = 100_000,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, *,
        bias_correction: bool = True, eps_inside_sqrt: bool = False, max_coeff: float | None = 10.0,
        min_coeff: float | None = 0.01, coeff_beta: float = 0.9, factor_max: float = 4.0, factor_min: float = 0.5,
        factor_threshold: float = 0.1, amsgrad: bool = False, maximize: bool = False,
        master_dtype: torch.dtype | None = torch.float32, compressor: Any = None, peers: Peers | None = None,
        parts: Parts | None = None,
    ) -> None:  # fmt: skip
        coefficients_in_order(min_coeff, max_coeff)
        if not 0 <= coeff_beta < 1:
            raise ValueError(f"coeff_beta={coeff_beta}; it must be a number in [0, 1).")
        if freeze_step != "auto" and 1 / (1 - coeff_beta) > freeze_step + 1e-9:
            raise ValueError(
                f"freeze_step={freeze_step} with coeff_beta={coeff_beta}: the average of the trust ratios begins at "
                f"zero, and takes 1/(1 - coeff_beta) = {1 / (1 - coeff_beta):g} steps. Give a freeze_step of at least "
                "that, or a smaller coeff_beta."
            )
        if not 0 < factor_min <= factor_max or not 0 <= factor_threshold < 1:
            raise ValueError(
                f"factor_min={factor_min}, factor_max={factor_max}, factor_threshold={factor_threshold}; needed are "
                "0 < factor_min <= factor_max and a factor_threshold in [0, 1)."
            )
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt, "decoupled_weight_decay": True, "min_coeff": min_coeff,
            "max_coeff": max_coeff, "coeff_beta": coeff_beta, "factor_max": factor_max, "factor_min": factor_min,
            "factor_threshold": factor_threshold, "maximize": maximize, "amsgrad": amsgrad,
        }  # fmt: skip
        more = {"master_dtype": master_dtype, "compressor": compressor, "peers": peers, "parts": parts}
        super().__init__(params, "OnebitLamb", freeze_step, defaults, **more)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m, v and w."""
        return ("exp_avg", "exp_avg_sq", "fresh_sq")

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.lamb``."""
        return self._direction(group, lr)

    def _make_states(self, group: dict[str, Any], p: Tensor, names: tuple[str, ...]) -> None:
        super()._make_states(group, p, names)
        for name, value in (("coeff", 0.0), ("factor", 1.0)):
            if name not in self.state[p]:
                self.state[p].put(name, torch.tensor(value, device=p.device))

    @property
    def num_sums(self) -> int:
        """Of the next step, over the parts of each tensor: ‖p‖² and ‖d‖², later the factor."""
        return 1 if self.now.momentum else 2

    # The warm-up -----------------------------------------------------------------------------------------------------

    def _warm_up(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> bool:
        if any(p.grad is None for p in batch.params):
            return False
        found, settings = flattened(batch), self._direction(group, float(group["lr"]))
        params, grads, (m, v, _), masters = found
        scalars = settings.at(batch.step + 1, grad_scale=float(grad_scale))
        norms = lamb_direction_(settings.flags, params, grads, m, v, masters, scalars=scalars)
        self._measured.append(Measured(group, batch, _WarmUp(norms, found, settings, scalars)))
        return True

    def _apply(self, measured: list[Measured]) -> None:
        if self._now.momentum:
            super()._apply(measured)
            return
        sums = self._brought(measured, [one.values.norms for one in measured], width=2)
        for one, norms in zip(measured, sums, strict=True):
            group, warm = one.group, one.values
            ratios = trust_ratios(norms, min_coeff=group["min_coeff"], max_coeff=group["max_coeff"])
            params, _, (m, v, _), masters = warm.found
            lamb_apply_(warm.settings.flags, params, m, v, masters, ratios=ratios, scalars=warm.scalars)
            averages, beta3 = self._numbers(one.batch, "coeff"), group["coeff_beta"]
            self._keep(one.batch, "coeff", averages * beta3 + ratios * (1 - beta3))

    def _brought(self, measured: list[Measured], rows: list[Tensor], *, width: int, largest: bool = False) -> Any:
        """Sums, or the largest, of rows over all parts of their tensors, batch by batch."""
        params = [p for one in measured for p in one.batch.params]
        found = torch.cat(rows) if rows else torch.empty((0, width), dtype=torch.float64)
        if self.parts is not None:
            found = self.parts.largest(params, found) if largest else self.parts.sum(params, found)
        return torch.split(found, [len(one.batch.params) for one in measured])

    def _numbers(self, batch: Batch, name: str) -> Tensor:
        """(T,) a number of each tensor."""
        return torch.stack([self.state[p][name] for p in batch.params])

    def _keep(self, batch: Batch, name: str, values: Tensor) -> None:
        torch._foreach_copy_([self.state[p][name] for p in batch.params], list(values.unbind()))

    # Later -----------------------------------------------------------------------------------------------------------

    def _compressed_steps(self, measured: list[Measured], means: list[list[Tensor]]) -> None:
        rows = [self._advance(one, mean) for one, mean in zip(measured, means, strict=True)]
        for one, largest in zip(measured, self._brought(measured, rows, width=1, largest=True), strict=True):
            group, (step, found, _) = one.group, one.values
            before, by = self._numbers(one.batch, "factor"), group["factor_threshold"]
            factor = largest[:, 0].float().clamp(group["factor_min"], group["factor_max"])
            factor = torch.minimum(torch.maximum(factor, before * (1 - by)), before * (1 + by))
            self._keep(one.batch, "factor", factor)
            ratios = self._numbers(one.batch, "coeff") * factor
            variances = self._num_variances(group, one.batch)
            self._move(
                group, found, found[2][0], lr=float(group["lr"]), step=step, variances=variances, ratios=ratios
            )  # fmt: skip

    def _advance(self, one: Measured, means: Sequence[Tensor]) -> Tensor:
        """m and w of a batch after the step; (T, 1) fp64, the largest (√v + ε) / (√w + ε) of each part."""
        group, (_, found, _) = one.group, one.values
        beta1, beta2 = group["betas"]
        begins = self._just_frozen(group, one.batch)
        rows = []
        for m, v, w, mean in zip(*found[2], means, strict=True):
            if begins:
                w.copy_(v)
            g = mean.sub(m, alpha=beta1).div_(1 - beta1)
            w.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            m.copy_(mean)
            ratio = self._below(group, v).div_(self._below(group, w))
            rows.append(ratio.amax() if ratio.numel() else ratio.new_zeros(()))
        return torch.stack(rows).double().view(-1, 1)

    @staticmethod
    def _below(group: dict[str, Any], v: Tensor) -> Tensor:
        return v.add(group["eps"]).sqrt_() if group["eps_inside_sqrt"] else v.sqrt().add_(group["eps"])
