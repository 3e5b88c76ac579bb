"""Matrix products by shape and dtype, bandwidth of the device's memory, what a call costs, copies to and from a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from zoo.cli.bench.fitting import Line, fit
from zoo.cli.bench.timing import Timing, time_call

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int, int]
"""(m, n, k): (m, k) @ (k, n), 2·m·n·k floating-point operations."""
Clock = Callable[[], float]

_ROWS = (1, 16, 128, 512, 2048, 8192)
_WEIGHTS = (
    (768, 768),
    (1024, 1024),
    (4096, 1024),
    (1024, 4096),
    (4096, 4096),
    (11008, 4096),
    (4096, 11008),
    (8192, 8192),
)
SHAPES: tuple[Shape, ...] = tuple(
    sorted(((m, n, k) for m in _ROWS for n, k in _WEIGHTS), key=lambda shape: (shape[0] * shape[1] * shape[2], shape))
)
"""Rows are tokens, (n, k) the weights of layers of models from 100 million to 70 billion parameters."""
_LARGE = 1e7
STREAM_BYTES = 256 << 20
COPIES = ("to_device", "to_host")
COPY_SIZES = tuple(1 << k for k in range(12, 29, 2))


def products(
    device: torch.device, dtype: torch.dtype, seconds: float, *, shapes: Sequence[Shape] = SHAPES,
    clock: Clock = time.perf_counter,
) -> Iterator[tuple[Shape, Timing]]:  # fmt: skip
    """The time of each product, smallest first, for about so many seconds in all.

    A shape that would take more than what is left, by the best rate so far, is left out, and so are larger ones.
    """
    import torch

    begun = clock()
    best = 0.0
    ordered = sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2])
    for number, (m, n, k) in enumerate(ordered):
        left = seconds - (clock() - begun)
        flops = 2.0 * m * n * k
        if left <= 0 or (best and 4 * flops / best > left):
            return
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(n, k, device=device).to(dtype)  # a weight: its transpose is what is multiplied by
        out = torch.empty(m, n, device=device, dtype=dtype)
        timing = time_call(_multiplying(a, b, out), device, left / (len(ordered) - number), clock)
        if flops >= _LARGE:  # of smaller ones the call itself is most
            best = max(best, flops / timing.median_s)
        yield (m, n, k), timing


def _multiplying(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    import torch

    return lambda: torch.mm(a, b.t(), out=out)


def memory_bandwidth(
    device: torch.device, seconds: float, *, num_bytes: int = STREAM_BYTES, clock: Clock = time.perf_counter
) -> tuple[float, Timing]:
    """(bytes/s, time) of a copy within the device's memory: bytes read and bytes written, as the program counts them.

    A processor that reads what it writes over moves more than these; the caches hold none of a copy of this size.
    """
    import torch

    given = torch.ones(num_bytes // 4, device=device)
    out = torch.empty_like(given)
    timing = time_call(lambda: out.copy_(given), device, seconds, clock)
    return 2 * given.nbytes / timing.median_s, timing


def call_cost(device: torch.device, seconds: float, *, clock: Clock = time.perf_counter) -> Timing:
    """What the host pays for one operation on one element; on CUDA without waiting for the device: the launch."""
    import torch

    a, out = torch.ones(1, device=device), torch.empty(1, device=device)
    if device.type != "cuda":
        return time_call(lambda: torch.add(a, a, out=out), device, seconds, clock)
    found: list[float] = []
    end = clock() + seconds
    while clock() < end or len(found) < 3:
        torch.cuda.synchronize(device)
        begun = clock()
        for _ in range(100):  # fewer than the driver's queue holds
            torch.add(a, a, out=out)
        found.append(clock() - begun)
    from zoo.cli.bench.timing import summary

    return summary(found[1:] or found, 100)


def copies(
    device: torch.device, seconds: float, *, sizes: Sequence[int] = COPY_SIZES, clock: Clock = time.perf_counter
) -> dict[str, Line]:
    """Lines of the copies between page-locked host memory and a GPU, by the names of :data:`COPIES`.

    Raises:
        ValueError: the device is the host itself.
    """
    import torch

    if device.type != "cuda":
        raise ValueError(f"copies to {device}: that is the host's own memory; give a GPU, such as cuda:0.")
    found = {}
    for name in COPIES:
        times = []
        for size in sizes:
            host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(size, dtype=torch.uint8, device=device)
            pair = (there, host) if name == COPIES[0] else (host, there)
            call = _copying(*pair)
            times.append(time_call(call, device, seconds / 2 / len(sizes), clock).median_s)
        found[name] = fit(list(sizes), times)
    return found


def _copying(out: torch.Tensor, given: torch.Tensor) -> Callable[[], object]:
    return lambda: out.copy_(given, non_blocking=True)
