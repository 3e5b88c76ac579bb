"""What is on at a step: pure functions, so that a run that is resumed goes on as if it had never stopped."""

from __future__ import annotations


def bits_at(step: int, *, offset: int, start_bits: int, target_bits: int, period: int) -> int:
    """b(t) = max(target, start - k), k the number of i >= 0 with period · 2^i <= t, for t = step - offset.

    So bits fall by one after ``period``, 2·period, 4·period, ... steps: the period doubles with each of them, as the
    quantisation schedule of MoQ does. With start = target nothing changes, whatever the period is.

    Raises:
        ValueError: a period below 1 where bits have to fall.
    """
    if start_bits == target_bits:
        return target_bits
    check_period(start_bits, target_bits, period)
    since = max(0, step - offset)
    return max(target_bits, start_bits - (since // period).bit_length())


def check_period(start_bits: int, target_bits: int, period: int) -> None:
    """Raise ValueError unless bits can get from one to the other."""
    if target_bits > start_bits:
        raise ValueError(f"target_bits = {target_bits} is more than start_bits = {start_bits}; bits only fall.")
    if target_bits < start_bits and period < 1:
        raise ValueError(
            f"quantization_period = {period} with start_bits = {start_bits} and target_bits = {target_bits}; it is the "
            "number of steps before bits fall for the first time, at least 1."
        )


def steps_at_bits(step: int, *, offset: int, start_bits: int, target_bits: int, period: int) -> int:
    """Steps since bits became what :func:`bits_at` says, 0 at the step where they do."""
    since = max(0, step - offset)
    if start_bits == target_bits or since < period:
        return since
    falls = min((since // period).bit_length(), start_bits - target_bits)
    return since - (period << (falls - 1))


def share_at(steps: int, change_ratio: float) -> float:
    """r = min(1, change_ratio · (1 + steps)): how much of a value is quantised while it is mixed with the exact one."""
    return min(1.0, change_ratio * (1 + steps))
