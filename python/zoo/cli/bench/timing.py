"""Seconds of a call: the median of many, on the clock of the device that computes it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FEWEST, MOST = 3, 1000
_SHORT_S = 2e-5
"""Calls shorter than this are timed several at a time: the clock itself takes some of it."""
_BETWEEN_S = 4e-4
_AHEAD = 200  # calls and events in the driver's queue, which holds about a thousand
_WAIT_CYCLES = 40_000  # some 20 µs a call


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a call took."""

    median_s: float
    lowest_s: float
    highest_s: float
    repetitions: int


def summary(seconds: list[float], calls: int = 1) -> Timing:
    """Of times of so many calls each."""
    return Timing(
        median_s=statistics.median(seconds) / calls, lowest_s=min(seconds) / calls, highest_s=max(seconds) / calls,
        repetitions=len(seconds) * calls,
    )  # fmt: skip


def time_call(
    call: Callable[[], object], device: torch.device, share_s: float, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Call it for about ``share_s`` seconds, at least :data:`FEWEST` times; a call before that does not count.

    On CUDA the time is that between events of the stream, so that the host's part hides as it does in training.
    """
    call()
    if device.type == "cuda":
        return _on_cuda(call, device, share_s)
    begun = clock()
    call()
    guess = max(clock() - begun, 1e-8)
    calls = max(1, int(_BETWEEN_S / guess)) if guess < _SHORT_S else 1
    found: list[float] = []
    end = clock() + share_s
    while len(found) < FEWEST or (len(found) < MOST and clock() < end):
        begun = clock()
        for _ in range(calls):
            call()
        found.append(clock() - begun)
    return summary(found, calls)


def _count(share_s: float, guess_s: float) -> int:
    return max(FEWEST, min(int(share_s / guess_s), MOST))


def _on_cuda(call: Callable[[], object], device: torch.device, share_s: float) -> Timing:
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        found = _between(call, FEWEST)
        each = max((time.perf_counter() - begun) / FEWEST, 1e-6)
        wanted = max(FEWEST, min(int(share_s / each), MOST))
        while len(found) < wanted:
            found += _between(call, min(wanted - len(found), _AHEAD))
    return summary(found)


def _between(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each call, between events. The device waits first, until the host has told it all that is to come:
    else a short kernel would take as long as the host needs to begin it."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_WAIT_CYCLES * count)  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [max(a.elapsed_time(b) / 1e3, 1e-9) for a, b in itertools.pairwise(events)]
