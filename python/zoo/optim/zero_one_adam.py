"""0/1 Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zoo.kernels.update import Settings
from zoo.optim.base import flattened
from zoo.optim.options import adam_compressed
from zoo.optim.plan import Batch
from zoo.optim.sync_policy import ZeroOneSchedule
from zoo.optim.synced import Flat, Peers, SyncedOptimizer
from zoo.optim.whole import Measured

Tensor = torch.Tensor


@dataclass
class _Made:
    """A batch whose moment is advanced.

    Attributes:
        step: which one it makes.
        flat: what :func:`~zoo.optim.base.flattened` gives.
        grads: of this rank, fp32; None where nobody needs them.
    """

    step: int
    flat: Flat
    grads: list[Tensor] | None


class ZeroOneAdam(SyncedOptimizer):
    """Adam that agrees on the variance, and on a momentum, only in some steps; in between ranks step by themselves.

    Legend: R ranks; g_r the gradient of rank r; γ_t the learning rate times the bias correction 1/(1 - β1^t); C the
    compressor of ``peers``; t' the latest step before t that is in T_u; x parameters.

        t in T_v:  v ← β2·v + (1-β2)·(1/R Σ_r g_r)²
        m_r ← β1·m_r + (1-β1)·g_r,   x_r ← x_r - γ_t·m_r / (√v̂ + ε),   u_r ← u_r + γ_t·m_r
        t in T_u:  ū = C(1/R Σ_r C(u_r + e_r) + s),   m_r ← ū / Σ_(t' < h ≤ t) γ_h,
                   x_r ← x_(t') - ū / (√v̂ + ε),   u_r ← 0

    T_v and T_u: :class:`~zoo.optim.sync_policy.ZeroOneSchedule`.

    Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", algorithm 1.
    Departures: v is updated before it divides (the paper's v_0 = 0 would divide by ε); bias correction (an option; the
    paper has none), where v̂ counts updates of v; weight decay λ (the paper has none), decoupled, which x_(t') has had
    when ū moves it; u / Σγ travels, so that errors are in the unit of m, whatever the learning rate does, and a step
    with a learning rate of 0 is none; no momentum where v is zero (:class:`~zoo.optim.synced.SyncedOptimizer`). States,
    fp32: ``exp_avg`` (m_r), ``exp_avg_sq`` (v); with local steps also ``moved`` (u_r) and ``anchor`` (x_(t')).

    Args:
        var_freeze_step: the last step that may be in T_v; up to it every step is in T_u. At least 1.
        var_update_scaler: κ: so many steps of T_v before their distance doubles.
        local_step_scaler: after so many steps the distance of steps in T_u doubles.
        local_step_clipper: H, the largest distance; 1 for no local steps.
        eps_inside_sqrt: √(v̂ + ε) in the place of √v̂ + ε.
        amsgrad: refused; v does not change for most of the time.
        compressor, peers: see :class:`~zoo.optim.synced.SyncedOptimizer`.

    Raises:
        ValueError: an option out of its range, or groups with different schedules.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, var_freeze_step: int = 100_000, var_update_scaler: int = 16,
        local_step_scaler: int = 32_678, local_step_clipper: int = 16, bias_correction: bool = True,
        eps_inside_sqrt: bool = False, amsgrad: bool = False, maximize: bool = False,
        master_dtype: torch.dtype | None = torch.float32, compressor: Any = None, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt, "decoupled_weight_decay": True, "maximize": maximize,
            "var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper,
            "amsgrad": amsgrad,
        }  # fmt: skip
        adam_compressed("ZeroOneAdam", defaults)
        super().__init__(params, defaults, master_dtype=master_dtype, compressor=compressor, peers=peers)

    def policy(self, group: dict[str, Any]) -> ZeroOneSchedule:
        """See :class:`~zoo.optim.sync_policy.ZeroOneSchedule`."""
        names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
        given = {name: group[name] for name in names}
        for name, value in given.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}; it must be a number of steps, at least 1.")
        key = tuple(given.values())
        if key not in self._schedules:
            self._schedules[key] = ZeroOneSchedule(**given)
        return self._schedules[key]

    @property
    def _schedules(self) -> dict[tuple[int, ...], ZeroOneSchedule]:
        found: dict[tuple[int, ...], ZeroOneSchedule] = self.__dict__.setdefault("_made_schedules", {})
        return found

    def _is_frozen(self) -> bool:
        return self.num_steps >= int(self.param_groups[0]["var_freeze_step"])

    def steps_by_itself(self) -> bool:
        """There are local steps."""
        return any(group["local_step_clipper"] > 1 for group in self.param_groups)

    def together(self) -> bool:
        """All ranks have the same parameters and states."""
        return not self.param_groups[0]["local_steps"]

    def counters(self, num_steps: int = 0) -> dict[str, Any]:
        """Steps since the latest of T_u, Σγ over them, and what weight decay has left of x_(t')."""
        return {**super().counters(), "local_steps": 0, "moved_rate": 0.0, "kept": 1.0}

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m and v, and with local steps u and x_(t')."""
        local = group["local_step_clipper"] > 1 or group["local_steps"]
        return ("exp_avg", "exp_avg_sq", *(("moved", "anchor") if local else ()))

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """Of a step along m̂ / (√v̂ + ε)."""
        return self._direction(group, lr)

    # The step --------------------------------------------------------------------------------------------------------

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> bool:
        if any(p.grad is None for p in batch.params):
            return False
        if self._at == group["var_freeze_step"] + 1 and not self.forming:
            self._report(batch)
        found = flattened(batch)
        grads = [g.float() * float(grad_scale) for g in found[1]] if self._now.variance else None
        self._measured.append(Measured(group, batch, _Made(batch.step + 1, found, grads)))
        if not self._now.variance:
            self._advance(group, found, float(grad_scale))
        return True

    def _advance(self, group: dict[str, Any], found: Flat, grad_scale: float) -> None:
        for m, new in zip(found[2][0], self._momenta(group, found, grad_scale), strict=True):
            m.copy_(new)

    def _apply(self, measured: list[Measured]) -> None:
        if self.forming:
            return
        if self._now.variance:
            self._update_variance(measured)
        begins = self.together()
        local = not begins or not self._now.momentum
        for one in measured:
            if local:
                self._local_step(one, begins=begins)
        if self._now.momentum:
            self._agree(measured, local=local)

    def _update_variance(self, measured: list[Measured]) -> None:
        params = [p for one in measured for p in one.batch.params]
        grads = [g for one in measured for g in one.values.grads]
        means = iter(grads if self.peers is None else self.peers.mean(params, grads))
        for one in measured:
            beta2 = one.group["betas"][1]
            for v in one.values.flat[2][1]:
                mean = next(means)
                v.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            params, _, states, masters = one.values.flat
            self._advance(one.group, (params, one.values.grads, states, masters), 1.0)

    def _rate(self, group: dict[str, Any], step: int) -> float:
        """γ of a step."""
        return float(group["lr"]) * self._direction(group, 0.0).at(step).gain

    def _variances(self, group: dict[str, Any], step: int) -> int:
        """How many updates the variance of parameters has had that make step ``step`` now."""
        schedule = self.policy(group)
        return max(schedule.num_variances(self._at) - schedule.num_variances(self._at - step), 1)

    def _local_step(self, one: Measured, *, begins: bool) -> None:
        group, made = one.group, one.values
        params, _, (m, _, moved, anchor), masters = made.flat
        if begins:
            for kept, value in zip(anchor, masters or params, strict=True):
                kept.copy_(value)
        for u, own in zip(moved, m, strict=True):
            u.add_(own, alpha=self._rate(group, made.step))
        variances = self._variances(group, made.step)
        self._move(group, made.flat, m, lr=float(group["lr"]), step=made.step, variances=variances)

    def _agree(self, measured: list[Measured], *, local: bool) -> None:
        given = []
        for one in measured:
            rate = one.group["moved_rate"] + self._rate(one.group, one.values.step)
            _, _, (m, _, *more), _ = one.values.flat
            for i, own in enumerate(m):
                given.append(more[0][i] / rate if local and rate else own.clone())
        means = iter(self._compressed_mean(measured, given))
        for one in measured:
            group, made = one.group, one.values
            params, _, (m, _, *more), masters = made.flat
            for own in m:
                own.copy_(next(means))
            variances = self._variances(group, made.step)
            if not local:
                self._move(group, made.flat, m, lr=float(group["lr"]), step=made.step, variances=variances)
                continue
            rate = group["moved_rate"] + self._rate(group, made.step)
            kept = group["kept"] * (1.0 - float(group["lr"]) * group["weight_decay"])
            for u, anchor, value in zip(more[0], more[1], masters or params, strict=True):
                u.zero_()
                value.copy_(anchor).mul_(kept)
            self._move(group, made.flat, m, lr=rate, step=0, variances=variances, decays=False)

    def finish_step(self) -> None:
        """See :class:`~zoo.optim.synced.SyncedOptimizer`; counts what x_(t') is behind."""
        super().finish_step()
        if self.forming:
            return
        for group in self.param_groups:
            if self._now.momentum:
                group["local_steps"], group["moved_rate"], group["kept"] = 0, 0.0, 1.0
            else:
                group["local_steps"] += 1
                group["moved_rate"] += self._rate(group, self._at)
                group["kept"] *= 1.0 - float(group["lr"]) * group["weight_decay"]
