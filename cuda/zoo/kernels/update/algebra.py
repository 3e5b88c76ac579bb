"""The rules of ``update.h`` and their scalars, from the arguments that optimizers have.

    g   <- σ·g [+ λ·p]          s' = S(s, g)         d = D(s, s', g)          p' = δ·p - η·d

``update.h`` says what S and D are for each rule. Here: σ, λ, δ, η and the rest from lr, betas, step and so on, computed
in fp64; the kernels round each of them to fp32 once.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from enum import IntEnum, IntFlag


class Rule(IntEnum):
    """Which S and D; the numbers are those of ``update.h``."""

    ADAM = 0
    SGD = 1
    LION = 2
    ADAGRAD = 3
    LAMB = 4


class Flag(IntFlag):
    """Variants of a rule; the numbers are those of ``update.h``."""

    NONE = 0
    COUPLED = 1
    AMSGRAD = 2
    MOMENTUM = 4
    NESTEROV = 8
    EPS_INSIDE = 16


ALLOWED: dict[Rule, tuple[Flag, ...]] = {
    Rule.ADAM: tuple(a | b for a in (Flag.NONE, Flag.AMSGRAD) for b in (Flag.NONE, Flag.COUPLED)),
    Rule.SGD: tuple(
        a | b for a in (Flag.NONE, Flag.MOMENTUM, Flag.MOMENTUM | Flag.NESTEROV) for b in (Flag.NONE, Flag.COUPLED)
    ),
    Rule.LION: (Flag.NONE,),
    Rule.ADAGRAD: (Flag.NONE, Flag.COUPLED),
    Rule.LAMB: tuple(a | b for a in (Flag.NONE, Flag.EPS_INSIDE) for b in (Flag.NONE, Flag.COUPLED)),
}
"""Rule → the flags it may have together."""


def num_states(rule: Rule, flags: Flag) -> int:
    """How many tensors of state a rule keeps for each parameter."""
    if rule is Rule.SGD:
        return 1 if flags & Flag.MOMENTUM else 0
    if rule is Rule.ADAM:
        return 3 if flags & Flag.AMSGRAD else 2
    return 2 if rule is Rule.LAMB else 1


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The numbers of one step, the same for all tensors of a call; the order is that of ``update.h``."""

    grad_scale: float = 1.0
    coupled: float = 0.0
    decay: float = 1.0
    rate: float
    beta1: float = 0.0
    beta1_rest: float = 0.0
    beta2: float = 0.0
    beta2_rest: float = 0.0
    correction2: float = 1.0
    eps: float = 0.0
    gain: float = 1.0

    def values(self) -> list[float]:
        """As the operators take them."""
        return [float(x) for x in astuple(self)]


def adam(
    *, lr: float, beta1: float, beta2: float, eps: float, step: int, weight_decay: float = 0.0, decoupled: bool = True,
    amsgrad: bool = False, bias_correction: bool = True, grad_scale: float = 1.0,
) -> tuple[Flag, Scalars]:  # fmt: skip
    """Adam (Kingma and Ba 2015, algorithm 1), AdamW with ``decoupled`` (Loshchilov and Hutter 2019, algorithm 2).

    ``step`` counts from 1. η = lr/(1-β1^t), ρ = 1/√(1-β2^t), δ = 1 - lr·weight_decay or λ = weight_decay. Without
    ``bias_correction`` η = lr and ρ = 1.
    """
    first, second = (1.0 - beta1**step, 1.0 - beta2**step) if bias_correction else (1.0, 1.0)
    flags = Flag.AMSGRAD if amsgrad else Flag.NONE
    if weight_decay and not decoupled:
        flags |= Flag.COUPLED
    return flags, Scalars(
        grad_scale=grad_scale,
        coupled=0.0 if decoupled else weight_decay,
        decay=1.0 - lr * weight_decay if decoupled else 1.0,
        rate=lr / first,
        beta1=beta1,
        beta1_rest=1.0 - beta1,
        beta2=beta2,
        beta2_rest=1.0 - beta2,
        correction2=1.0 / math.sqrt(second),
        eps=eps,
    )


def sgd(
    *, lr: float, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
    step: int, grad_scale: float = 1.0,
) -> tuple[Flag, Scalars]:  # fmt: skip
    """SGD with momentum as PyTorch has it: the first step puts the gradient into the buffer undampened."""
    flags = Flag.COUPLED if weight_decay else Flag.NONE
    if momentum:
        flags |= Flag.MOMENTUM | (Flag.NESTEROV if nesterov else Flag.NONE)
    return flags, Scalars(
        grad_scale=grad_scale,
        coupled=weight_decay,
        rate=lr,
        beta1=momentum,
        beta1_rest=1.0 if step == 1 else 1.0 - dampening,
    )


def lion(
    *, lr: float, beta1: float, beta2: float, weight_decay: float = 0.0, grad_scale: float = 1.0
) -> tuple[Flag, Scalars]:
    """Lion (Chen et al. 2023, algorithm 2); the decay is decoupled."""
    return Flag.NONE, Scalars(
        grad_scale=grad_scale,
        decay=1.0 - lr * weight_decay,
        rate=lr,
        beta1=beta1,
        beta1_rest=1.0 - beta1,
        beta2=beta2,
        beta2_rest=1.0 - beta2,
    )


def adagrad(
    *, lr: float, lr_decay: float = 0.0, eps: float, weight_decay: float = 0.0, step: int, grad_scale: float = 1.0
) -> tuple[Flag, Scalars]:
    """Adagrad (Duchi et al. 2011), with PyTorch's lr_decay: η = lr/(1 + (t-1)·lr_decay)."""
    flags = Flag.COUPLED if weight_decay else Flag.NONE
    rate = lr / (1.0 + (step - 1) * lr_decay)
    return flags, Scalars(grad_scale=grad_scale, coupled=weight_decay, rate=rate, eps=eps)


def lamb(
    *, lr: float, beta1: float, beta2: float, eps: float, step: int, weight_decay: float = 0.0,
    bias_correction: bool = True, eps_inside_sqrt: bool = False, grad_scale: float = 1.0,
) -> tuple[Flag, Scalars]:  # fmt: skip
    """LAMB (You et al. 2020, algorithm 2): the weight decay is part of the direction."""
    flags = (Flag.EPS_INSIDE if eps_inside_sqrt else Flag.NONE) | (Flag.COUPLED if weight_decay else Flag.NONE)
    second = 1.0 - beta2**step if bias_correction else 1.0
    return flags, Scalars(
        grad_scale=grad_scale,
        coupled=weight_decay,
        rate=lr,
        beta1=beta1,
        beta1_rest=1.0 - beta1,
        beta2=beta2,
        beta2_rest=1.0 - beta2,
        correction2=1.0 / second if eps_inside_sqrt else 1.0 / math.sqrt(second),
        eps=eps,
        gain=1.0 / (1.0 - beta1**step) if bias_correction else 1.0,
    )
