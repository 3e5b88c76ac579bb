"""How much longer an operator takes while it is watched, beside what watching it measures itself: the way from torch to
Python and back. Measured once a process, in milliseconds, and left out of the seconds that are told."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import nn

from zoo.profiling.counter import OperatorCounter

__all__ = ["detour_of_operators"]

_TIMES, _TRIES = 20, 10


@functools.cache
def detour_of_operators() -> float:
    """Seconds an operator."""
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    counter = OperatorCounter(lambda *_: None, lambda: None)

    def linear() -> None:
        nn.functional.linear(x, weight)  # two operators: a view and a product

    def left() -> float:
        before, counter.overhead_s = counter.overhead_s, 0.0
        return before

    plain = _seconds(linear, lambda: 0.0)
    with counter:
        watched = _seconds(linear, left)
    return max(watched - plain, 0.0) / 2


def _seconds(call: Callable[[], None], left_out: Callable[[], float]) -> float:
    """The least of some tries, without what ``left_out`` says."""
    tries = []
    for _ in range(_TRIES):
        left_out()
        begun = time.perf_counter()
        for _ in range(_TIMES):
            call()
        tries.append(time.perf_counter() - begun - left_out())
    return min(tries) / _TIMES
