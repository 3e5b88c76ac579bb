"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.update import Settings, adam
from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.options import at_least_zero, betas_in_range, not_supported


class Adam(ElementwiseOptimizer):
    """m ← β1·m + (1-β1)·g,  v ← β2·v + (1-β2)·g²,  p ← p - lr/(1-β1^t) · m / (√v/√(1-β2^t) + ε).

    The gradient g has weight_decay·p added to it.

    Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1; ``amsgrad``: Reddi et al. 2018,
    algorithm 2 (as in torch, the maximum is of v without bias correction). States: ``step``, ``exp_avg`` (m),
    ``exp_avg_sq`` (v), ``max_exp_avg_sq`` with amsgrad, ``master`` for bf16 and fp16 parameters.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.Adam``.
        decoupled_weight_decay: p ← (1 - lr·weight_decay)·p before the step instead, which is AdamW.
        bias_correction: False takes m and v as they are: p ← p - lr·m / (√v + ε).
        capturable: nothing of a step waits for the device; see :class:`~zoo.optim.base.ElementwiseOptimizer`.
        master_dtype, state_dtype: see :class:`~zoo.optim.base.ElementwiseOptimizer`.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, foreach: bool | None = None, maximize: bool = False,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        decoupled_weight_decay: bool = False, bias_correction: bool = True,
        master_dtype: torch.dtype | None = torch.float32, state_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        betas_in_range(betas)
        not_supported("Adam", differentiable=differentiable)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction, "capturable": capturable,
        }  # fmt: skip
        super().__init__(params, defaults, master_dtype=master_dtype, state_dtype=state_dtype)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """m, v, and the maximum of v with amsgrad."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """See ``zoo.kernels.update.adam``."""
        beta1, beta2 = group["betas"]
        return adam(
            lr=lr, beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"], amsgrad=group["amsgrad"],
            bias_correction=group["bias_correction"],
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("bias_correction", True)  # of a state_dict from before there was this option


class AdamW(Adam):
    """Adam with decoupled weight decay: p ← (1 - lr·weight_decay)·p before the step.

    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, with the decay scaled by lr as in
    ``torch.optim.AdamW``, whose arguments these are. See :class:`Adam`.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        bias_correction: bool = True, master_dtype: torch.dtype | None = torch.float32,
        state_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable,
            differentiable=differentiable, decoupled_weight_decay=True, bias_correction=bias_correction,
            master_dtype=master_dtype, state_dtype=state_dtype,
        )  # fmt: skip
