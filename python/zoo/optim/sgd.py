"""SGD with momentum."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import Settings, sgd
from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.options import at_least_zero, nesterov_possible, not_supported


class SGD(ElementwiseOptimizer):
    """b ← μ·b + (1-τ)·g,  p ← p - lr·b, or p - lr·(g + μ·b) with nesterov; g + weight_decay·p. The first b is g.

    Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", in the form of
    ``torch.optim.SGD``, whose arguments these are. States: ``step``, ``momentum_buffer`` (b) with momentum, ``master``
    for bf16 and fp16 parameters. A change of ``momentum`` from 0 starts the buffer undampened only in step 1.

    Raises:
        ValueError: an option out of its range; nesterov without momentum or with dampening.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, maximize: bool = False, foreach: bool | None = None, capturable: bool = False,
        differentiable: bool = False, fused: bool | None = None, master_dtype: torch.dtype | None = torch.float32,
        state_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay)
        not_supported("SGD", differentiable=differentiable)
        nesterov_possible(momentum, dampening, nesterov=nesterov)
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "capturable": capturable,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype, state_dtype=state_dtype)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.sgd``."""
        return sgd(lr=lr, **{k: group[k] for k in ("momentum", "dampening", "weight_decay", "nesterov")})
