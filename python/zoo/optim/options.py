"""Checks of optimizer options, with one wording for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any


def at_least_zero(**options: Any) -> None:
    """Raise ValueError unless each is a number >= 0, or a tensor of one."""
    for name, value in options.items():
        if not _number(value) >= 0:
            raise ValueError(f"{name}={_shown(value)}; it must be a number >= 0.")


def betas_in_range(betas: Any) -> None:
    """Raise ValueError unless these are two, and both lie in [0, 1)."""
    two = isinstance(betas, Sequence) and len(betas) == 2 and all(0 <= _number(beta) < 1 for beta in betas)
    if not two:
        raise ValueError(f"betas={_shown(betas)}; it must be two numbers, each in [0, 1).")


def _number(value: Any) -> float:
    """NaN for what is none, or more than a float can hold."""
    one = getattr(value, "numel", None)
    found = value.item() if getattr(value, "ndim", None) == 0 or (callable(one) and one() == 1) else value
    if not isinstance(found, Real):
        return math.nan
    try:
        return float(found)
    except OverflowError:
        return math.nan


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 75 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def not_supported(name: str, **options: bool) -> None:
    """Raise ValueError for options of torch that have no meaning here."""
    for option, value in options.items():
        if value:
            raise ValueError(
                f"{option}={value}: {name} updates in place in one kernel, outside autograd; leave it False, or use "
                f"torch.optim.{name}."
            )


def adam_compressed(name: str, defaults: dict[str, Any]) -> None:
    """Raise ValueError for options of Adam out of their range, and for those without a meaning where v is frozen."""
    at_least_zero(lr=defaults["lr"], eps=defaults["eps"], weight_decay=defaults["weight_decay"])
    betas_in_range(defaults["betas"])
    if amsgrad := defaults.pop("amsgrad"):
        raise ValueError(
            f"amsgrad={amsgrad}: {name} keeps its variance as it is for most steps, and has no maximum of it. Leave it "
            "False, or use Adam."
        )


def coefficients_in_order(min_coeff: float | None, max_coeff: float | None) -> None:
    """Raise ValueError unless limits of a trust ratio leave something between them."""
    limits = [_number(limit) for limit in (min_coeff, max_coeff) if limit is not None]
    if any(map(math.isnan, limits)):
        raise ValueError(f"min_coeff={_shown(min_coeff)}, max_coeff={_shown(max_coeff)}; each is a number, or None.")
    if len(limits) == 2 and not 0 <= limits[0] <= limits[1]:
        raise ValueError(f"min_coeff={min_coeff}, max_coeff={max_coeff}; needed is 0 <= min_coeff <= max_coeff.")


def nesterov_possible(momentum: float, dampening: float, *, nesterov: bool) -> None:
    """Raise ValueError for Nesterov's momentum without momentum, or dampened."""
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"nesterov=True with momentum={momentum} and dampening={dampening}; it needs a momentum > 0 and "
            "dampening=0."
        )
