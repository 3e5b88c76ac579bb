"""``deepspeed.runtime.fp16.onebit``: the 1-bit optimizers of ``zoo.optim`` with the documented arguments.

Given to ``initialize``, they are told of the other ranks by the engine, and clipped by its ``gradient_clipping``.
"""

from __future__ import annotations

import logging
from typing import Any

from zoo import optim

_log = logging.getLogger("zoo.deepspeed")


def _check(who: str, max_grad_norm: float, cuda_aware: bool, comm_backend_name: str) -> None:
    if max_grad_norm:
        raise ValueError(
            f"{who}(max_grad_norm={max_grad_norm}): say gradient_clipping in the configuration, which initialize reads."
        )
    if cuda_aware or comm_backend_name != "nccl":
        _log.info("%s: cuda_aware and comm_backend_name change nothing: messages go through the process group.", who)


class OnebitAdam(optim.OnebitAdam):
    """See :class:`zoo.optim.OnebitAdam`.

    Args:
        deepspeed, cuda_aware, comm_backend_name: make no difference.

    Raises:
        ValueError: ``amsgrad``, or ``max_grad_norm``: the configuration's ``gradient_clipping`` does that.
    """

    def __init__(
        self, params: Any, deepspeed: Any = None, lr: float = 1e-3, freeze_step: int = 100_000,
        bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0, amsgrad: bool = False,
        cuda_aware: bool = False, comm_backend_name: str = "nccl", **more: Any,
    ) -> None:  # fmt: skip
        _check("OnebitAdam", max_grad_norm, cuda_aware, comm_backend_name)
        super().__init__(
            params, lr, freeze_step, betas, eps, weight_decay, bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt, amsgrad=amsgrad, **more,
        )  # fmt: skip


class OnebitLamb(optim.OnebitLamb):
    """See :class:`zoo.optim.OnebitLamb`, and :class:`OnebitAdam`."""

    def __init__(
        self, params: Any, deepspeed: Any = None, lr: float = 1e-3, freeze_step: int = 100_000,
        bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
        max_coeff: float = 10.0, min_coeff: float = 0.01, amsgrad: bool = False, cuda_aware: bool = False,
        comm_backend_name: str = "nccl", coeff_beta: float = 0.9, factor_max: float = 4.0, factor_min: float = 0.5,
        factor_threshold: float = 0.1, **more: Any,
    ) -> None:  # fmt: skip
        _check("OnebitLamb", max_grad_norm, cuda_aware, comm_backend_name)
        super().__init__(
            params, lr, freeze_step, betas, eps, weight_decay, bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt, max_coeff=max_coeff, min_coeff=min_coeff, coeff_beta=coeff_beta,
            factor_max=factor_max, factor_min=factor_min, factor_threshold=factor_threshold, amsgrad=amsgrad, **more,
        )  # fmt: skip


class ZeroOneAdam(optim.ZeroOneAdam):
    """See :class:`zoo.optim.ZeroOneAdam`, and :class:`OnebitAdam`."""

    def __init__(
        self, params: Any, deepspeed: Any = None, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0, max_grad_norm: float = 0.0, var_freeze_step: int = 100_000,
        var_update_scaler: int = 16, local_step_scaler: int = 32_678, local_step_clipper: int = 16,
        amsgrad: bool = False, cuda_aware: bool = False, comm_backend_name: str = "nccl", **more: Any,
    ) -> None:  # fmt: skip
        _check("ZeroOneAdam", max_grad_norm, cuda_aware, comm_backend_name)
        super().__init__(
            params, lr, betas, eps, weight_decay, var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler, local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper, bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt,
            amsgrad=amsgrad, **more,
        )  # fmt: skip
