"""Numbers that a script gives an engine: taken as what they are, or refused with a sentence."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

MOST = 2**63 - 1
"""The largest whole number that is taken."""


def whole(what: str, value: Any, *, least: int = 1) -> int:
    """``value`` as an int; ``what``, the call or the argument, begins the sentence of the error.

    Raises:
        ValueError: it is no whole number, or none from ``least`` to 2^63 - 1.
    """
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # of torch or NumPy
    real = isinstance(number, Real) and not isinstance(number, bool)
    if not real or (isinstance(number, float) and not number.is_integer()):
        raise ValueError(f"{what} got {shown(value)}; it takes a whole number of at least {least}.")
    found = int(number)
    if not least <= found <= MOST:
        raise ValueError(f"{what} got {shown(found)}; it takes a whole number from {least} to {MOST}.")
    return found


def real(what: str, value: Any) -> float:
    """``value``, a number or a tensor of one element, as a float.

    Raises:
        ValueError: it is something else, or larger than any float.
    """
    number: Any = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    number = number.item() if getattr(number, "ndim", None) == 0 else number
    if not isinstance(number, Real):
        raise ValueError(f"{what} got {shown(value)}; it takes a number, or a tensor of one element.")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{what} got {shown(value)}; it takes a number that a float can hold.") from None


def flag(what: str, value: Any) -> bool:
    """``value`` as a bool.

    Raises:
        ValueError: it is neither true nor false, nor 1 nor 0.
    """
    found = value.item() if getattr(value, "ndim", None) == 0 else value  # of torch or NumPy
    if not isinstance(found, (bool, int)) or found not in (0, 1):
        raise ValueError(f"{what} got {shown(value)}; it takes True or False.")
    return bool(found)


def shown(value: Any) -> str:
    """For a sentence: what was given, and what it is; a number too long to be read by its digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of about {round(value.bit_length() * math.log10(2))} digits"
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def kind_of(value: Any) -> str:
    """What it is, for a sentence."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
