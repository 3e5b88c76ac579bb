"""0/1 Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zoo.kernels.update import Settings
from zoo.optim.base import flat, flattened
from zoo.optim.options import adam_compressed
from zoo.optim.plan import Batch
from zoo.optim.sync_policy import ZeroOneSchedule
from zoo.optim.synced import Flat, Peers, SyncedOptimizer
from zoo.optim.whole import Measured

Tensor = torch.Tensor
_BEGINNING = {"moved_rate": 0.0, "kept": 1.0}
"""Of a parameter that has made no step since ranks agreed."""


@dataclass
class _Made:
    """A batch whose moment is advanced, or a parameter that has no gradient.

    Attributes:
        step: which one it makes; of a parameter without gradient its latest.
        flat: what :func:`~zoo.optim.base.flattened` gives.
        variances: how many updates its variance has had.
    """

    step: int
    flat: Flat
    variances: int


class ZeroOneAdam(SyncedOptimizer):
    """Adam that agrees on the variance, and on a momentum, only in some steps; in between ranks step by themselves.

    Legend: R ranks; g_r the gradient of rank r; γ_t the learning rate times the bias correction 1/(1 - β1^t); C the
    compressor of ``peers``; t' the latest step before t that is in T_u; x parameters.

        t in T_v:  g_r ← 1/R Σ_r g_r,   v ← β2·v + (1-β2)·g_r²
        m_r ← β1·m_r + (1-β1)·g_r,   x_r ← x_r - γ_t·m_r / (√v̂ + ε),   u_r ← u_r + γ_t·m_r
        t in T_u \\ T_v:  ū = C(1/R Σ_r C(u_r + e_r) + s),   m_r ← ū / Σ_(t' < h ≤ t) γ_h,
                        x_r ← x_(t') - ū / (√v̂ + ε),   u_r ← 0

    T_v and T_u: :class:`~zoo.optim.sync_policy.ZeroOneSchedule`.

    Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", algorithm 1.
    Departures: in T_v, where the mean gradient travels in any case, momentum takes it too and is not compressed (why:
    ``benchmarks/onebit/SCALE.md``); v is updated before it divides (the paper's v_0 = 0 would divide by ε); bias
    correction (an option; the paper has none), where v̂ counts updates of v; weight decay λ (the paper has none),
    decoupled, which x_(t') has had when ū moves it; u / Σγ travels, so that errors are in the unit of m, whatever the
    learning rate does, and a step with a learning rate of 0 is none; no momentum where v is zero
    (:class:`~zoo.optim.synced.SyncedOptimizer`). States,
    fp32: ``exp_avg`` (m_r), ``exp_avg_sq`` (v); with local steps also ``moved`` (u_r) and ``anchor`` (x_(t')), and of
    each tensor the numbers ``moved_rate`` (Σγ of u_r) and ``kept`` (what weight decay has left of x_(t')).

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

    counts_missed = True
    follows = ("anchor",)

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
        """Steps since the latest of T_u."""
        return {**super().counters(), "local_steps": 0}

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m and v, and with local steps u and x_(t')."""
        local = group["local_step_clipper"] > 1 or group["local_steps"]
        return ("exp_avg", "exp_avg_sq", *(("moved", "anchor") if local else ()))

    def _make_states(self, group: dict[str, Any], p: Tensor, names: tuple[str, ...]) -> None:
        super()._make_states(group, p, names)
        if "anchor" in names:
            for name, value in _BEGINNING.items():
                if name not in self.state[p]:
                    self.state[p].put(name, value)

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """Of a step along m̂ / (√v̂ + ε)."""
        return self._direction(group, lr)

    # The step --------------------------------------------------------------------------------------------------------

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> bool:
        if any(p.grad is None for p in batch.params):
            return False
        frozen_for = self._at - group["var_freeze_step"]
        if (frozen_for == 1 or (frozen_for > 1 and self._comes_late(batch))) and not self.forming:
            self._report(batch)
        found, (missed, variances) = flattened(batch), self._missed(batch.params[0])
        made = _Made(batch.step + 1, found, self._variances(group, batch.step + 1 + missed, variances))
        self._measured.append(Measured(group, batch, made))
        if not self.forming:
            self._advance(group, found, float(grad_scale))
        return True

    def _advance(self, group: dict[str, Any], found: Flat, grad_scale: float) -> None:
        _, grads, (m, v, *_), _ = found
        if self._now.variance:
            beta2 = group["betas"][1]
            for old, g in zip(v, grads, strict=True):
                mean = g.float() * grad_scale
                old.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
        for old, new in zip(m, self._momenta(group, found, grad_scale), strict=True):
            old.copy_(new)

    def begin_step(self) -> None:
        """See :class:`~zoo.optim.synced.SyncedOptimizer`.

        Raises:
            ValueError: ``var_freeze_step`` was raised after a step that each rank made by itself.
        """
        super().begin_step()
        if self._now.variance and not self.forming and not self.together():
            raise ValueError(
                f"var_freeze_step={self.param_groups[0]['var_freeze_step']} was given after "
                f"{self.param_groups[0]['local_steps']} steps that each rank made by itself, and step {self._at} would "
                "update the variance. Change it after a step that brings ranks together, or leave it as it was."
            )

    def _apply(self, measured: list[Measured]) -> None:
        if self.forming:
            return
        if self._now.variance:
            for one in measured:
                self._move_along(one)
        elif self._now.momentum and self.together():
            self._agree(measured)
        else:
            for one in measured:
                self._local_step(one)
            if self._now.momentum:
                self._agree_on_all([*measured, *self._waiting()])

    def _move_along(self, one: Measured) -> None:
        """A step along m, as this rank has it."""
        group, made = one.group, one.values
        self._move(group, made.flat, made.flat[2][0], lr=float(group["lr"]), step=made.step, variances=made.variances)

    def _rate(self, group: dict[str, Any], step: int) -> float:
        """γ of a step."""
        return float(group["lr"]) * self._direction(group, 0.0).at(step).gain

    def _variances(self, group: dict[str, Any], num_steps: int, missed: int) -> int:
        """How many of the latest ``num_steps`` steps have updated the variance, but for ``missed`` ones."""
        schedule = self.policy(group)
        return max(schedule.num_variances(self._at) - schedule.num_variances(self._at - num_steps) - missed, 1)

    def _local_step(self, one: Measured) -> None:
        group, made = one.group, one.values
        params, _, (m, _, moved, anchors), masters = made.flat
        rate, left = self._rate(group, made.step), 1.0 - float(group["lr"]) * group["weight_decay"]
        for i, (p, value) in enumerate(zip(one.batch.params, masters or params, strict=True)):
            state = self.state[p]
            if not state["moved_rate"]:  # its first step since ranks agreed
                anchors[i].copy_(value)
            moved[i].add_(m[i], alpha=rate)
            state.put("moved_rate", state["moved_rate"] + rate)
            state.put("kept", state["kept"] * left)
        self._move_along(one)

    def _agree(self, measured: list[Measured]) -> None:
        """In a step by which each rank has a momentum of its own, and no parameters."""
        means = iter(self._compressed_mean(measured, [m.clone() for one in measured for m in one.values.flat[2][0]]))
        for one in measured:
            for own in one.values.flat[2][0]:
                own.copy_(next(means))
            self._move_along(one)

    def _waiting(self) -> list[Measured]:
        """The parameters that have moved since ranks agreed, and have no gradient in the step in which they do."""
        found = []
        for group, idle in self._idle():
            state, (missed, variances) = self.state[idle.params[0]], self._missed(idle.params[0])
            if state.get("moved_rate"):
                num = self._variances(group, idle.step + missed + 1, variances)
                found.append(Measured(group, idle, _Made(idle.step, flattened(idle), num)))
        return found

    def _agree_on_all(self, measured: list[Measured]) -> None:
        """In a step that ends those which ranks made by themselves."""
        rates = [[float(self.state[p]["moved_rate"]) for p in one.batch.params] for one in measured]
        given = []
        for one, of in zip(measured, rates, strict=True):
            m, _, moved, _ = one.values.flat[2]
            given += [u / rate if rate else own.clone() for u, own, rate in zip(moved, m, of, strict=True)]
        means = iter(self._compressed_mean(measured, given))
        for one, of in zip(measured, rates, strict=True):
            params, _, (m, _, moved, anchors), masters = one.values.flat
            for i, (p, value) in enumerate(zip(one.batch.params, masters or params, strict=True)):
                m[i].copy_(next(means))
                value.copy_(anchors[i]).mul_(self.state[p]["kept"])
                self._begin_anew(p, moved[i])
            phi = torch.tensor(of, dtype=torch.float32, device=params[0].device)
            variances = one.values.variances
            self._move(one.group, one.values.flat, m, lr=1.0, step=0, variances=variances, ratios=phi, decays=False)

    def _begin_anew(self, p: Tensor, moved: Tensor) -> None:
        """Nothing has moved a parameter since ranks agreed."""
        moved.zero_()
        for name, value in _BEGINNING.items():
            dict.__setitem__(self.state[p], name, value)  # the optimizer's own: no plan changes

    @torch.no_grad()
    def forget_moved(self) -> None:
        """See :class:`~zoo.optim.synced.SyncedOptimizer`; each rank's momentum becomes the mean of all."""
        params = [p for g in self.param_groups for p in g["params"] if "anchor" in self.state.get(p, {})]
        for p in params:
            self._begin_anew(p, self.state[p]["moved"])
        if self.peers is not None and not self.together():
            momenta = [flat(self.state[p]["exp_avg"], p) for p in params]
            for m, mean in zip(momenta, self.peers.mean(params, momenta), strict=True):
                m.copy_(mean)

    def finish_step(self) -> None:
        """See :class:`~zoo.optim.synced.SyncedOptimizer`."""
        super().finish_step()
        for group in self.param_groups if not self.forming else ():
            group["local_steps"] = 0 if self._now.momentum or self._now.variance else group["local_steps"] + 1
