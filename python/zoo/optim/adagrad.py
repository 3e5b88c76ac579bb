"""Adagrad."""

from __future__ import annotations

from collections.abc import Callable
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
            lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps,
            initial_accumulator_value=initial_accumulator_value,
        )  # fmt: skip
        not_supported("Adagrad", differentiable=differentiable)
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
            "capturable": capturable,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype, state_dtype=state_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float | torch.Tensor = 1.0) -> Any:
        """See :meth:`~zoo.optim.base.ElementwiseOptimizer.step`. A sparse gradient is taken as the dense one that it
        stands for: what is zero there moves nothing.

        Raises:
            ValueError: a sparse gradient in a group with ``weight_decay``, which moves every element.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.layout is torch.sparse_coo:
                    if group["weight_decay"]:
                        raise ValueError(
                            f"a sparse gradient of a tensor of shape {tuple(p.shape)}, and weight_decay = "
                            f"{group['weight_decay']}, which moves every element. Use dense gradients "
                            "(torch.nn.Embedding(sparse=False)), or a group without weight_decay."
                        )
                    p.grad = p.grad.to_dense()
        super().step(grad_scale=grad_scale)
        return loss

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """h."""
        return ("sum",)

    def initial(self, group: dict[str, Any], name: str) -> float:
        """``initial_accumulator_value``."""
        return float(group["initial_accumulator_value"])

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.adagrad``."""
        return adagrad(lr=lr, **{k: group[k] for k in ("lr_decay", "eps", "weight_decay")})
