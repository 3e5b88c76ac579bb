"""Lion."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import Settings, lion
from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.options import at_least_zero, betas_in_range


class Lion(ElementwiseOptimizer):
    """p ← (1 - lr·weight_decay)·p - lr·sign(β1·m + (1-β1)·g),  m ← β2·m + (1-β2)·g.

    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2. Its rate is typically a third to a
    tenth of Adam's, its decay as much larger. States: ``step``, ``exp_avg`` (m), ``master`` for bf16 and fp16
    parameters. A NaN gradient gives a NaN parameter, not a step of zero.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, *,
        maximize: bool = False, foreach: bool | None = None, capturable: bool = False, fused: bool | None = None,
        master_dtype: torch.dtype | None = torch.float32, state_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        at_least_zero(lr=lr, weight_decay=weight_decay)
        betas_in_range(betas)
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "capturable": capturable,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype, state_dtype=state_dtype)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m."""
        return ("exp_avg",)

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.lion``."""
        beta1, beta2 = group["betas"]
        return lion(lr=lr, beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"])
