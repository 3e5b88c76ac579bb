"""Checks of optimizer options, with one wording for all."""

from __future__ import annotations

from typing import Any


def at_least_zero(**options: float) -> None:
    """Raise ValueError unless each is a number >= 0."""
    for name, value in options.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}; it must be a number >= 0.")


def betas_in_range(betas: tuple[float, float]) -> None:
    """Raise ValueError unless both lie in [0, 1)."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas}; it must be two numbers, each in [0, 1).")


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
    at_least_zero(lr=float(defaults["lr"]), eps=defaults["eps"], weight_decay=defaults["weight_decay"])
    betas_in_range(defaults["betas"])
    if amsgrad := defaults.pop("amsgrad"):
        raise ValueError(
            f"amsgrad={amsgrad}: {name} keeps its variance as it is for most steps, and has no maximum of it. Leave it "
            "False, or use Adam."
        )


def coefficients_in_order(min_coeff: float | None, max_coeff: float | None) -> None:
    """Raise ValueError unless limits of a trust ratio leave something between them."""
    if min_coeff is not None and max_coeff is not None and not 0 <= min_coeff <= max_coeff:
        raise ValueError(f"min_coeff={min_coeff}, max_coeff={max_coeff}; needed is 0 <= min_coeff <= max_coeff.")


def nesterov_possible(momentum: float, dampening: float, *, nesterov: bool) -> None:
    """Raise ValueError for Nesterov's momentum without momentum, or dampened."""
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"nesterov=True with momentum={momentum} and dampening={dampening}; it needs a momentum > 0 and "
            "dampening=0."
        )
