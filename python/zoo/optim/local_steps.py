"""Ranks that train by themselves and bring their parameters together every so many steps: Local SGD and DiLoCo."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import Settings, adam, num_states, sgd, update_
from zoo.optim.base import flattened
from zoo.optim.options import at_least_zero, betas_in_range, nesterov_possible
from zoo.optim.plan import Batch
from zoo.optim.sync_policy import EverySteps
from zoo.optim.synced import Peers, SyncedOptimizer
from zoo.optim.whole import Measured

Tensor = torch.Tensor


class LocalSteps(SyncedOptimizer):
    """Base: an elementwise optimizer of each rank, and an outer one on what the ranks came to.

    Legend: R ranks; H = ``sync_every``; x_r parameters of rank r, a those that the ranks had in common last; η', μ and
    b learning rate, momentum and buffer of the outer optimizer, SGD.

        every step:         x_r ← a step of rank r with its own gradient
        every H-th step:    Δ = 1/R Σ_r (a - x_r),   b ← μ·b + Δ,   a ← a - η'·d,   x_r ← a

    with d = b, or Δ + μ·b (Nesterov's). With a ``compressor`` Δ is C(1/R Σ_r C(a - x_r + e_r) + s), and what that
    leaves out is added the next time. The states of the step itself stay each rank's own, as in the papers.

    States beside those of the step, fp32: ``anchor`` (a), ``outer_momentum`` (b) where μ is not 0.
    """

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, sync_every: int, outer_lr: float, outer_momentum: float,
        outer_nesterov: bool, compressor: Any, **more: Any,
    ) -> None:  # fmt: skip
        at_least_zero(outer_lr=outer_lr)
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum}; it must be a number in [0, 1).")
        outer = {
            "sync_every": sync_every, "outer_lr": outer_lr, "outer_momentum": outer_momentum,
            "outer_nesterov": outer_nesterov,
        }  # fmt: skip
        super().__init__(params, {**defaults, **outer}, compressor=compressor, **more)

    follows = ("anchor",)

    def policy(self, group: dict[str, Any]) -> EverySteps:
        """See :class:`~zoo.optim.sync_policy.EverySteps`."""
        every = group["sync_every"]
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"sync_every={every!r}; it must be a number of steps, at least 1.")
        return EverySteps(interval=every)

    @property
    def gradient_unit(self) -> float:
        """Gradients are never compressed."""
        return 1.0

    def steps_by_itself(self) -> bool:
        """That is the point."""
        return True

    def together(self) -> bool:
        """Of what the step keeps each rank has its own."""
        kept = any(self.inner_names(group) for group in self.param_groups)
        return self.num_steps == 0 or (not kept and self.agreed())

    def agreed(self) -> bool:
        """All ranks have the same parameters."""
        return not self.param_groups[0]["local_steps"]

    def counters(self, num_steps: int = 0) -> dict[str, Any]:
        """Steps since the ranks agreed on parameters."""
        return {**super().counters(), "local_steps": 0}

    def finish_step(self) -> None:
        """See :class:`~zoo.optim.synced.SyncedOptimizer`."""
        super().finish_step()
        for group in self.param_groups if not self.forming else ():
            group["local_steps"] = 0 if self._now.parameters else group["local_steps"] + 1

    def inner_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The states of the step."""
        raise NotImplementedError

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The states of the step, a, and b if there is outer momentum."""
        return (*self.inner_names(group), "anchor", *(("outer_momentum",) if group["outer_momentum"] else ()))

    def _make_states(self, group: dict[str, Any], p: Tensor, names: tuple[str, ...]) -> None:
        begins = "anchor" not in self.state[p]
        super()._make_states(group, p, names)
        if begins:
            self.state[p]["anchor"].copy_(self.state[p].get("master", p.detach()))

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> bool:
        if any(p.grad is None for p in batch.params):
            return False
        params, grads, states, masters = found = flattened(batch)
        settings = self.settings(group, float(group["lr"]))
        own = states[: num_states(settings.rule, settings.flags)]
        scalars = settings.at(batch.step + 1, grad_scale=float(grad_scale))
        update_(settings.rule, settings.flags, params, grads, own, masters, scalars=scalars)
        self._measured.append(Measured(group, batch, found))
        return True

    def _apply(self, measured: list[Measured]) -> None:
        if self.forming or not self._now.parameters:
            return
        deltas, tensors, measured = [], [], [*measured, *self._waiting()]
        for one in measured:
            params, _, states, masters = one.values
            anchors = states[len(self.inner_names(one.group))]
            deltas += [a - x for a, x in zip(anchors, masters or params, strict=True)]
            tensors += one.batch.params
        means = deltas
        if self.peers is not None:
            together = self.peers.mean if self.compressor is None else self.peers.compressed_mean
            means = together(tensors, deltas)
        left = iter(means)
        for one in measured:
            self._outer_step(one, [next(left) for _ in one.batch.params])

    def _waiting(self) -> list[Measured]:
        """The parameters that have moved since ranks agreed, and have no gradient in the step in which they do."""
        found = []
        for group, idle in self._idle():
            params, _, states, masters = flat = flattened(idle)
            anchor = states[len(self.inner_names(group))][0]
            if self.peers is not None or not torch.equal(anchor, (masters or params)[0].to(anchor.dtype)):
                found.append(Measured(group, idle, flat))
        return found

    @torch.no_grad()
    def forget_moved(self) -> None:
        """See :class:`~zoo.optim.synced.SyncedOptimizer`; the outer momentum stays."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if "anchor" in state:
                    state["anchor"].copy_(state.get("master", p.detach()))

    def _outer_step(self, one: Measured, means: list[Tensor]) -> None:
        group, (params, _, states, masters) = one.group, one.values
        anchors, *more = states[len(self.inner_names(group)) :]
        momentum = group["outer_momentum"]
        for i, (anchor, mean) in enumerate(zip(anchors, means, strict=True)):
            along = mean
            if more:
                more[0][i].mul_(momentum).add_(mean)
                along = mean.add(more[0][i], alpha=momentum) if group["outer_nesterov"] else more[0][i]
            anchor.add_(along, alpha=-group["outer_lr"])
            if masters:
                masters[i].copy_(anchor)
            params[i].copy_(anchor)


class LocalSGD(LocalSteps):
    """SGD on each rank, and the mean of the parameters every ``sync_every`` steps.

    Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1: :class:`LocalSteps` with η' = 1, μ = 0.
    States beside those of :class:`LocalSteps`: ``momentum_buffer`` with momentum.

    Args:
        lr, momentum, dampening, weight_decay, nesterov: as in :class:`~zoo.optim.SGD`.
        sync_every: H.
        outer_lr, outer_momentum, outer_nesterov: η', μ, and which d.
        compressor: None brings parameters together in full precision; else see
            :class:`~zoo.optim.synced.SyncedOptimizer`.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, sync_every: int = 8, outer_lr: float = 1.0, outer_momentum: float = 0.0,
        outer_nesterov: bool = False, maximize: bool = False, master_dtype: torch.dtype | None = torch.float32,
        compressor: Any = None, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay)
        nesterov_possible(momentum, dampening, nesterov=nesterov)
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        super().__init__(
            params, defaults, sync_every=sync_every, outer_lr=outer_lr, outer_momentum=outer_momentum,
            outer_nesterov=outer_nesterov, compressor=compressor, master_dtype=master_dtype, peers=peers,
        )  # fmt: skip

    def inner_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.sgd``."""
        return sgd(lr=lr, **{k: group[k] for k in ("momentum", "dampening", "weight_decay", "nesterov")})


class DiLoCo(LocalSteps):
    """AdamW on each rank, and a step of SGD with Nesterov's momentum along what the ranks moved, every ``sync_every``.

    Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1, whose
    values the defaults are. States beside those of :class:`LocalSteps`: ``exp_avg``, ``exp_avg_sq``.

    Args:
        lr, betas, eps, weight_decay, bias_correction: as in :class:`~zoo.optim.AdamW`.
        sync_every: H.
        outer_lr, outer_momentum, outer_nesterov: η', μ, and which d.
        compressor: None brings parameters together in full precision; else see
            :class:`~zoo.optim.synced.SyncedOptimizer`.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, params: Any, lr: float = 4e-4, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.1, *, sync_every: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9,
        outer_nesterov: bool = True, bias_correction: bool = True, maximize: bool = False,
        master_dtype: torch.dtype | None = torch.float32, compressor: Any = None, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        betas_in_range(betas)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "maximize": maximize,
        }  # fmt: skip
        super().__init__(
            params, defaults, sync_every=sync_every, outer_lr=outer_lr, outer_momentum=outer_momentum,
            outer_nesterov=outer_nesterov, compressor=compressor, master_dtype=master_dtype, peers=peers,
        )  # fmt: skip

    def inner_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m and v."""
        return ("exp_avg", "exp_avg_sq")

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.adam``."""
        beta1, beta2 = group["betas"]
        return adam(
            lr=lr, beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
            bias_correction=group["bias_correction"],
        )  # fmt: skip
