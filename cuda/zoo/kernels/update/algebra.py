"""The rules of ``update.h`` and their scalars, from the arguments that optimizers have.

    g   <- σ·g [+ λ·p]          s' = S(s, g)         d = D(s, s', g)          p' = δ·p - η·d

``update.h`` says what S and D are for each rule. Here: σ, λ, δ, η and the rest from lr, betas, step and so on, computed
in fp64; the kernels round each of them to fp32 once. What is the same in every step is a :class:`Settings`, which makes
the :class:`Scalars` of a step; where only the device knows the step or a scale, a kernel does, with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

    @classmethod
    def of(cls, values: Sequence[float]) -> Scalars:
        """From what :meth:`values` returns."""
        return cls(**dict(zip(cls.__dataclass_fields__, values, strict=True)))

    def values(self) -> list[float]:
        """As the operators take them."""
        return [
            self.grad_scale, self.coupled, self.decay, self.rate, self.beta1, self.beta1_rest, self.beta2,
            self.beta2_rest, self.correction2, self.eps, self.gain,
        ]  # fmt: skip


def power(base: float, n: int) -> float:
    """``base`` to the power n >= 0, by squaring: with the roundings of ``update.h``, on every machine."""
    result = 1.0
    while n > 0:
        if n & 1:
            result *= base
        base *= base
        n >>= 1
    return result


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A rule with its options: what is the same in every step; the order of the numbers is that of ``update.h``."""

    rule: Rule
    flags: Flag = Flag.NONE
    lr: float
    coupled: float = 0.0
    decoupled: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    dampening: float = 0.0
    lr_decay: float = 0.0
    corrected: bool = False

    @classmethod
    def of(cls, rule: Rule, flags: Flag, values: Sequence[float]) -> tuple[Settings, float]:
        """Settings and ``grad_scale`` from what :meth:`values` returns."""
        *first, grad_scale, corrected = values
        names = list(cls.__dataclass_fields__)[2:-1]
        options = dict(zip(names, first, strict=True))
        return cls(rule=rule, flags=flags, corrected=corrected != 0, **options), grad_scale

    def values(self, grad_scale: float = 1.0) -> list[float]:
        """As ``update_scalars_`` takes them."""
        return [
            self.lr, self.coupled, self.decoupled, self.beta1, self.beta2, self.eps, self.dampening, self.lr_decay,
            grad_scale, float(self.corrected),
        ]  # fmt: skip

    def at(self, step: int, *, lr: float | None = None, grad_scale: float = 1.0) -> Scalars:
        """The scalars of step ``step``, which counts from 1; ``lr`` in the place of that of the settings."""
        rule, rate = self.rule, self.lr if lr is None else lr
        first = 1.0 - power(self.beta1, step) if self.corrected else 1.0
        second = 1.0 - power(self.beta2, step) if self.corrected else 1.0
        decay, beta1_rest = 1.0 - rate * self.decoupled, 1.0 - self.beta1
        if rule is Rule.ADAM:
            rate = rate / first
        elif rule is Rule.ADAGRAD:
            rate = rate / (1.0 + (step - 1) * self.lr_decay)
        elif rule is Rule.SGD:  # the first step puts the gradient into the buffer undampened
            beta1_rest = 1.0 if step == 1 else 1.0 - self.dampening
        return Scalars(
            grad_scale=grad_scale,
            coupled=self.coupled,
            decay=decay,
            rate=rate,
            beta1=self.beta1,
            beta1_rest=beta1_rest,
            beta2=self.beta2,
            beta2_rest=1.0 - self.beta2,
            correction2=1.0 / second if self.flags & Flag.EPS_INSIDE else 1.0 / math.sqrt(second),
            eps=self.eps,
            gain=1.0 / first if rule is Rule.LAMB else 1.0,
        )


def adam(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float = 0.0, decoupled: bool = True,
    amsgrad: bool = False, bias_correction: bool = True,
) -> Settings:  # fmt: skip
    """Adam (Kingma and Ba 2015, algorithm 1), AdamW with ``decoupled`` (Loshchilov and Hutter 2019, algorithm 2).

    η = lr/(1-β1^t), ρ = 1/√(1-β2^t), δ = 1 - lr·weight_decay or λ = weight_decay. Without ``bias_correction`` η = lr
    and ρ = 1.
    """
    flags = Flag.AMSGRAD if amsgrad else Flag.NONE
    if weight_decay and not decoupled:
        flags |= Flag.COUPLED
    return Settings(
        rule=Rule.ADAM,
        flags=flags,
        lr=lr,
        coupled=0.0 if decoupled else weight_decay,
        decoupled=weight_decay if decoupled else 0.0,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        corrected=bias_correction,
    )


def sgd(
    *, lr: float, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Settings:
    """SGD with momentum as PyTorch has it: the first step puts the gradient into the buffer undampened."""
    flags = Flag.COUPLED if weight_decay else Flag.NONE
    if momentum:
        flags |= Flag.MOMENTUM | (Flag.NESTEROV if nesterov else Flag.NONE)
    return Settings(rule=Rule.SGD, flags=flags, lr=lr, coupled=weight_decay, beta1=momentum, dampening=dampening)


def lion(*, lr: float, beta1: float, beta2: float, weight_decay: float = 0.0) -> Settings:
    """Lion (Chen et al. 2023, algorithm 2); the decay is decoupled."""
    return Settings(rule=Rule.LION, lr=lr, decoupled=weight_decay, beta1=beta1, beta2=beta2)


def adagrad(*, lr: float, lr_decay: float = 0.0, eps: float, weight_decay: float = 0.0) -> Settings:
    """Adagrad (Duchi et al. 2011), with PyTorch's lr_decay: η = lr/(1 + (t-1)·lr_decay)."""
    flags = Flag.COUPLED if weight_decay else Flag.NONE
    return Settings(rule=Rule.ADAGRAD, flags=flags, lr=lr, lr_decay=lr_decay, coupled=weight_decay, eps=eps)


def lamb(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float = 0.0, bias_correction: bool = True,
    eps_inside_sqrt: bool = False,
) -> Settings:  # fmt: skip
    """LAMB (You et al. 2020, algorithm 2): the weight decay is part of the direction."""
    flags = (Flag.EPS_INSIDE if eps_inside_sqrt else Flag.NONE) | (Flag.COUPLED if weight_decay else Flag.NONE)
    return Settings(
        rule=Rule.LAMB, flags=flags, lr=lr, coupled=weight_decay, beta1=beta1, beta2=beta2, eps=eps,
        corrected=bias_correction,
    )  # fmt: skip
