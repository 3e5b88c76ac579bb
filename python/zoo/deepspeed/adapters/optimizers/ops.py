"""``deepspeed.ops``: the optimizers of ``zoo.optim`` under DeepSpeed's names and arguments.

On a GPU and on the CPU alike. Parameters of 16 bits have fp32 masters, as in ``zoo.optim``.
"""

from __future__ import annotations

from typing import Any

import torch

from zoo import optim

_MASTER = torch.float32


def _no_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise RuntimeError(f"{name} has no AMSGrad variant; leave amsgrad out, or take zoo.optim.Adam, which has it.")


class FusedAdam(optim.Adam):
    """Adam, or with ``adam_w_mode`` AdamW; see :class:`zoo.optim.Adam`.

    Raises:
        RuntimeError: ``amsgrad``.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
        set_grad_none: bool = True, *, master_dtype: torch.dtype | None = _MASTER,
    ) -> None:  # fmt: skip
        _no_amsgrad("FusedAdam", amsgrad)
        self.adam_w_mode, self.set_grad_none = adam_w_mode, set_grad_none
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=bool(adam_w_mode),
            bias_correction=bool(bias_correction), master_dtype=master_dtype,
        )  # fmt: skip

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros where ``set_grad_none=False`` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPUAdam(optim.Adam):
    """Adam, or with ``adamw_mode`` AdamW; ``fp32_optimizer_states=False`` keeps states in the parameters' dtype.

    Attributes:
        optimizer_id: how many were made, of the class.
        adam_w_mode, adamw_mode, fp32_optimizer_states: as given.

    Raises:
        RuntimeError: ``amsgrad``.
    """

    optimizer_id = 0

    def __init__(
        self, model_params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0, amsgrad: bool = False,
        adamw_mode: bool = True, fp32_optimizer_states: bool = True, *, master_dtype: torch.dtype | None = _MASTER,
    ) -> None:  # fmt: skip
        _no_amsgrad("DeepSpeedCPUAdam", amsgrad)
        self._opt_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        self.adam_w_mode = self.adamw_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(
            model_params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=bool(adamw_mode),
            bias_correction=bool(bias_correction), master_dtype=master_dtype,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )  # fmt: skip

    @property
    def opt_id(self) -> int:
        """Its number; not in ``vars``, which tell whether one built again is the same."""
        return self._opt_id

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Any = None) -> Any:
        """Update the parameters that have a gradient with the states of a subgroup, ``self.state[subgroup_id]``: those
        of one parameter, which a program moves through memory in turns. Returns what ``closure`` does."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p, options in self._with_gradients():
            state = self.state[subgroup_id]  # type: ignore[index]
            if not state:
                kind = torch.float32 if self.fp32_optimizer_states else p.dtype
                zeros = torch.zeros_like(p, dtype=kind)
                state |= {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
            state["step"] += 1
            (beta1, beta2), decay, lr = options["betas"], options["weight_decay"], options["lr"]
            grad = p.grad.float() + (0.0 if self.adamw_mode else decay * p.float())  # type: ignore[union-attr]
            state["exp_avg"].mul_(beta1).add_(grad * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).add_(grad * grad * (1 - beta2))
            kept = 1 - lr * decay if self.adamw_mode else 1.0
            p.copy_(p.float() * kept - self._moved(state, options))
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Any = None) -> Any:
        """Undo the latest :meth:`step_subgroup` of a subgroup, with the same gradients, up to rounding.

        Raises:
            RuntimeError: there was none.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        state = self.state.get(sub_group_id, {})  # type: ignore[call-overload]
        if not state:
            raise RuntimeError(f"Cannot rollback optimizer state for sub_group_id {sub_group_id}: it has made no step.")
        if state["step"] <= 0:
            raise RuntimeError(f"Cannot rollback sub_group_id {sub_group_id}: step count is {state['step']}.")
        for p, options in self._with_gradients():
            (beta1, beta2), decay, lr = options["betas"], options["weight_decay"], options["lr"]
            kept = 1 - lr * decay if self.adamw_mode else 1.0
            p.copy_((p.float() + self._moved(state, options)) / kept)
            grad = p.grad.float() + (0.0 if self.adamw_mode else decay * p.float())  # type: ignore[union-attr]
            state["exp_avg"].sub_(grad * (1 - beta1)).div_(beta1)
            state["exp_avg_sq"].sub_(grad * grad * (1 - beta2)).div_(beta2).clamp_(min=0)
            state["step"] -= 1
        return loss

    def _with_gradients(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        return [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]

    @staticmethod
    def _moved(state: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
        """lr · m̂ / (√v̂ + eps)."""
        corrects, (beta1, beta2) = options["bias_correction"], options["betas"]
        first, second = (1 - beta ** state["step"] if corrects else 1.0 for beta in (beta1, beta2))
        moved: torch.Tensor = state["exp_avg"] / first / ((state["exp_avg_sq"] / second).sqrt() + options["eps"])
        return moved.mul_(options["lr"])


class FusedLion(optim.Lion):
    """Lion; see :class:`zoo.optim.Lion`."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
        set_grad_none: bool = True, *, master_dtype: torch.dtype | None = _MASTER,
    ) -> None:  # fmt: skip
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay, master_dtype=master_dtype)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As :meth:`FusedAdam.zero_grad`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPULion(optim.Lion):
    """Lion; see :class:`DeepSpeedCPUAdam` for ``fp32_optimizer_states``."""

    def __init__(
        self, model_params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0,
        fp32_optimizer_states: bool = True, *, master_dtype: torch.dtype | None = _MASTER,
    ) -> None:  # fmt: skip
        self.fp32_optimizer_states = fp32_optimizer_states
        state = torch.float32 if fp32_optimizer_states else None
        super().__init__(model_params, lr, betas, weight_decay, master_dtype=master_dtype, state_dtype=state)


class DeepSpeedCPUAdagrad(optim.Adagrad):
    """Adagrad; see :class:`DeepSpeedCPUAdam` for ``fp32_optimizer_states``. ``amsgrad`` means nothing to it."""

    def __init__(
        self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0, amsgrad: bool = False,
        fp32_optimizer_states: bool = True, *, master_dtype: torch.dtype | None = _MASTER,
    ) -> None:  # fmt: skip
        self.amsgrad, self.fp32_optimizer_states = amsgrad, fp32_optimizer_states
        super().__init__(
            model_params, lr, weight_decay=weight_decay, eps=eps, master_dtype=master_dtype,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )  # fmt: skip


class FusedLamb(optim.Lamb):
    """LAMB; see :class:`zoo.optim.Lamb`.

    Raises:
        RuntimeError: ``amsgrad``. ValueError: ``max_grad_norm``: the configuration's ``gradient_clipping`` does that.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
        max_coeff: float = 10.0, min_coeff: float = 0.01, amsgrad: bool = False, *,
        master_dtype: torch.dtype | None = _MASTER, parts: Any = None,
    ) -> None:  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedLamb has no AMSGrad variant; leave amsgrad out.")
        if max_grad_norm:
            raise ValueError(
                f"FusedLamb got max_grad_norm={max_grad_norm}; gradients are clipped by the configuration's "
                "gradient_clipping, or by clip_grad_norm_ before the step."
            )
        self.max_grad_norm, self.amsgrad = max_grad_norm, amsgrad
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt,
            min_coeff=min_coeff, max_coeff=max_coeff, master_dtype=master_dtype, parts=parts,
        )  # fmt: skip


def known_as(kind: type[torch.optim.Optimizer], *, offloaded: bool = False) -> type[torch.optim.Optimizer]:
    """The class of ``deepspeed.ops`` that is meant where a configuration names the optimizer, else the class itself.

    Args:
        offloaded: its states are in host memory, for which DeepSpeed has classes of their own.
    """
    adam, lion = (DeepSpeedCPUAdam, DeepSpeedCPULion) if offloaded else (FusedAdam, FusedLion)
    found: dict[Any, type[torch.optim.Optimizer]] = {
        optim.Adam: adam, optim.AdamW: adam, optim.Lion: lion, optim.Lamb: FusedLamb,
        optim.Adagrad: DeepSpeedCPUAdagrad if offloaded else optim.Adagrad,
    }  # fmt: skip
    return found.get(kind, kind)
