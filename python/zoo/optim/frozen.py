"""What 1-bit Adam and 1-bit LAMB share: a variance that is frozen, and a momentum that is compressed."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch

from zoo.optim.base import flattened
from zoo.optim.options import adam_compressed
from zoo.optim.plan import Batch
from zoo.optim.sync_policy import AfterWarmUp
from zoo.optim.synced import SyncedOptimizer
from zoo.optim.whole import Measured

Tensor = torch.Tensor
FreezeStep = int | Literal["auto"]
STABLE = 0.96
"""With ``freeze_step="auto"``: how near to 1 the ratio of the variance's norms must be (1-bit Adam, section 7.1)."""
_log = logging.getLogger("zoo.optim")


class FrozenVariance(SyncedOptimizer):
    """Base: steps up to ``freeze_step`` are those of Adam or LAMB; later ones leave v as it is, and compress m.

        m_r = β1·m + (1-β1)·g_r,   m ← C(1/R Σ_r C(m_r + e_r) + s)

    With ``freeze_step="auto"`` the variance is frozen at the first step t, a multiple of Δ = 1/(1-β2) and at least 2Δ,
    at which ‖v_(t-Δ)‖₁ and ‖v_t‖₁ differ by at most 4 % (Tang et al. 2021, section 7.1); the option is that number from
    then on. Of a learning rate that warms up it knows nothing: let that end before.
    """

    counts_missed = True

    def __init__(
        self, params: Any, name: str, freeze_step: FreezeStep, defaults: dict[str, Any], **more: Any
    ) -> None:  # fmt: skip
        adam_compressed(name, defaults)
        super().__init__(params, {**defaults, "freeze_step": freeze_step}, **more)

    def policy(self, group: dict[str, Any]) -> AfterWarmUp:
        """See :class:`~zoo.optim.sync_policy.AfterWarmUp`."""
        given = group["freeze_step"]
        if given != "auto" and not (isinstance(given, int) and given >= 1):
            raise ValueError(
                f"freeze_step={given!r}; it must be a number of steps, at least 1, or 'auto': the variance that is "
                "kept is that of this step, and without one every element would be divided by eps."
            )
        return AfterWarmUp(freeze_step=None if given == "auto" else given)

    def counters(self, num_steps: int = 0) -> dict[str, Any]:
        """How many steps updated v, how many have not since, and its norm when it was last looked at."""
        return {**super().counters(), "num_variances": num_steps, "frozen_steps": 0, "variance_norm": 0.0}

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m and v."""
        return ("exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> bool:
        if not self._now.momentum:
            return self._warm_up(group, batch, grad_scale)
        if any(p.grad is None for p in batch.params):
            return False
        if self._just_frozen(group, batch) or self._comes_late(batch):
            self._report(batch)
        found = flattened(batch)
        values = batch.step + 1, found, self._momenta(group, found, float(grad_scale))
        self._measured.append(Measured(group, batch, values))
        return True

    def _warm_up(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> bool:
        """A step before the variance is frozen."""
        raise NotImplementedError

    def _apply(self, measured: list[Measured]) -> None:
        if not self._now.momentum:
            return
        means = iter(self._compressed_mean(measured, [c for one in measured for c in one.values[2]]))
        self._compressed_steps(measured, [[next(means) for _ in one.values[2]] for one in measured])

    def _compressed_steps(self, measured: list[Measured], means: list[list[Tensor]]) -> None:
        """Steps with the momenta that ranks agreed on: of each batch those of its parameters.

        ``values`` of a batch are the number of its step, what :func:`~zoo.optim.base.flattened` gives, and the rank's
        own momenta.
        """
        raise NotImplementedError

    def _num_variances(self, group: dict[str, Any], batch: Batch) -> int:
        """How many updates the variance of parameters has had that have made their step now."""
        missed, variances = self._missed(batch.params[0])
        before = self._at - batch.step - missed  # steps before their first
        return max(int(group["num_variances"]) - before - variances, 1)

    def _just_frozen(self, group: dict[str, Any], batch: Batch) -> bool:
        """The step is the first that these parameters make with a variance that is frozen."""
        missed, variances = self._missed(batch.params[0])
        return int(group["frozen_steps"]) == missed - variances

    def _is_frozen(self) -> bool:
        return not self.now.variance

    def meetings(self) -> str:
        """See :class:`~zoo.optim.synced.SyncedOptimizer`; with "auto" they look at the variance every Δ steps."""
        auto = self.param_groups[0]["freeze_step"] == "auto"
        return super().meetings() + (f", looked at every {self._every} steps" if auto else "")

    @property
    def asks_for_total(self) -> bool:
        """See :class:`~zoo.optim.synced.SyncedOptimizer`."""
        group = self.param_groups[0]
        return group["freeze_step"] == "auto" and (self.num_steps + 1) % self._every == 0

    @property
    def _every(self) -> int:
        """Δ."""
        return round(1.0 / (1.0 - float(self.param_groups[0]["betas"][1])))

    @torch.no_grad()
    def finish_step(self) -> None:
        """With ``freeze_step="auto"``: freezes the variance when it has become stable. Collective."""
        super().finish_step()
        if self.forming:
            return
        for each in self.param_groups:
            each["num_variances"] += self._now.variance
            each["frozen_steps"] = each["frozen_steps"] + 1 if self._now.momentum else 0
        group, step = self.param_groups[0], self._at
        if group["freeze_step"] != "auto" or step % self._every:
            return
        states = {p: state["exp_avg_sq"] for p, state in self.state.items() if "exp_avg_sq" in state}
        if self.peers is None:
            norm = float(sum(v.double().sum() for v in states.values()))
        else:
            norm = float(self.peers.total(list(states.values()), list(states)))
        before = group["variance_norm"]
        for each in self.param_groups:
            each["variance_norm"] = norm
            if min(norm, before) >= STABLE * max(norm, before) > 0:
                each["freeze_step"] = step
        if group["freeze_step"] != "auto":
            _log.info("the variance is frozen at step %d: its norm was %g, and is %g", step, before, norm)
