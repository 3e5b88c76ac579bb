"""The batch-size triangle.

    T = M · G · W

T ``train_batch_size``, M ``train_micro_batch_size_per_gpu``, G ``gradient_accumulation_steps``, W the number of
data-parallel ranks. Any two of T, M, G give the third; T alone means G = 1; M alone means G = 1; G alone says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BATCH_KEYS", "BatchSizeError", "solve"]

T, M, G = BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
RULE = f"{T} = {M} × {G} × world_size"


class BatchSizeError(ValueError):
    """Sizes that do not fit together; shows each one's value and source."""


def solve(given: Mapping[str, int], sources: Mapping[str, str], world_size: int) -> dict[str, int]:
    """The sizes that were not given.

    Args:
        given: those of T, M, G that were given, positive.
        sources: where each of them and ``world_size`` came from, for the error.
        world_size: data-parallel ranks.

    Raises:
        BatchSizeError: neither T nor M was given, a division has a rest, or all three disagree.
    """

    def refuse(why: str) -> BatchSizeError:
        values = {**given, "world_size": world_size}
        shown = "; ".join(f"{key} = {value} ({sources.get(key, 'given')})" for key, value in values.items())
        return BatchSizeError(f"{RULE}: {why}; given: {shown}")

    def divide(divisor: int, what: str) -> int:
        quotient, rest = divmod(given[T], divisor)
        if rest:
            low = given[T] - rest
            near = f"{low} or {low + divisor}" if low else str(divisor)
            raise refuse(f"{T} = {given[T]} is not a multiple of {what} = {divisor} (the nearest are {near})")
        return quotient

    if T not in given and M not in given:
        raise refuse(f"one of {T} and {M} must be given")
    if T not in given:
        steps = given.get(G, 1)
        derived = {T: given[M] * steps * world_size, G: steps}
    elif M in given and G in given:
        product = given[M] * given[G] * world_size
        if product != given[T]:
            raise refuse(f"the product is {product}, not {given[T]}; change one of them or leave one out")
        derived = {}
    elif M in given:
        derived = {G: divide(given[M] * world_size, f"{M} × world_size")}
    else:
        steps = given.get(G, 1)
        derived = {M: divide(steps * world_size, f"{G} × world_size"), G: steps}
    return {key: value for key, value in derived.items() if key not in given}
