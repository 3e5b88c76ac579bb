"""SGD with momentum."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import Flag, Rule, Scalars, sgd
from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.options import at_least_zero, not_supported


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
        nesterov: bool = False, *, maximize: bool = False, foreach: bool | None = None, differentiable: bool = False,
        fused: bool | None = None, master_dtype: torch.dtype | None = torch.float32,
        state_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        at_least_zero(lr=float(lr), momentum=momentum, weight_decay=weight_decay)
        not_supported("SGD", differentiable=differentiable)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}; it needs a momentum > 0 and "
                "dampening=0."
            )
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype, state_dtype=state_dtype)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, group: dict[str, Any], step: int, grad_scale: float) -> tuple[Rule, Flag, Scalars]:
        """See ``zoo.kernels.update.sgd``."""
        options = {k: group[k] for k in ("momentum", "dampening", "weight_decay", "nesterov")}
        flags, scalars = sgd(lr=float(group["lr"]), step=step, grad_scale=grad_scale, **options)
        return Rule.SGD, flags, scalars
