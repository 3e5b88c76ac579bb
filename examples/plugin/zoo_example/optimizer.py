"""Steps of one size along the sign of a running mean of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


class SignMomentum(torch.optim.Optimizer):
    """m' = β m + (1 - β) g; p' = p - lr · sign(m'): "Signum", Bernstein et al. 2018, "signSGD", algorithm 2.

    Every element is updated by itself, so that it runs at every ZeRO stage on flat shards of parameters.

    Args:
        config: the options that a configuration may give. params: parameters, or groups of them.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """``lr``: size of a step. ``beta``: how much of the mean is kept, from 0 to below 1."""

        lr: float = 1e-3
        beta: float = 0.9

        def __post_init__(self) -> None:
            if not 0 <= self.beta < 1:
                raise ValueError(f"SignMomentum got beta={self.beta}; it is from 0 to below 1, such as 0.9.")

    def __init__(self, config: Config, *, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": config.lr, "beta": config.beta})

    @torch.no_grad()
    def step(self, closure=None):
        """One step, for parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["beta"])
                p.sub_(mean.sign(), alpha=group["lr"])
        return loss
