"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import Settings, adagrad
from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.options import at_least_zero, not_supported


class Adagrad(ElementwiseOptimizer):
    """h ← h + g²,  p ← p - lr/(1 + (t-1)·lr_decay) · g / (√h + ε); with g + weight_decay·p.

    Duchi, Hazan and Singer 2011, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization"; the
    arguments of ``torch.optim.Adagrad``. States: ``step``, ``sum`` (h), ``master`` for bf16 and fp16 parameters. Unlike
    torch's they are made in the first step, not at construction.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, foreach: bool | None = None, *,
        maximize: bool = False, capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        master_dtype: torch.dtype | None = torch.float32, state_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        at_least_zero(
            lr=float(lr), lr_decay=lr_decay, weight_decay=weight_decay, eps=eps,
            initial_accumulator_value=initial_accumulator_value,
        )  # fmt: skip
        not_supported("Adagrad", differentiable=differentiable)
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
            "capturable": capturable,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype, state_dtype=state_dtype)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """h."""
        return ("sum",)

    def initial(self, group: dict[str, Any], name: str) -> float:
        """``initial_accumulator_value``."""
        return float(group["initial_accumulator_value"])

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.adagrad``."""
        return adagrad(lr=lr, **{k: group[k] for k in ("lr_decay", "eps", "weight_decay")})
