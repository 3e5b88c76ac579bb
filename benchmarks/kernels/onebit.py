"""1-bit compression and decompression of 25 M fp32 elements on one thread."""

from __future__ import annotations

import time

import torch

from zoo.kernels.onebit import compress_, decompress_, owed_, wire_bytes

NUMEL = 25_000_000


def measure(rounds: int) -> dict[str, list[float] | float]:
    """Seconds of each round, and the ratio of fp32 to the bytes on the wire."""
    torch.set_num_threads(1)
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    error, out = torch.zeros(NUMEL), torch.empty(NUMEL)
    compress_s, owed_s, decompress_s = [], [], []
    decompress_(out, *compress_(x, error))
    for _ in range(rounds):
        began = time.perf_counter()
        bits, scales = compress_(x, error)
        compressed = time.perf_counter()
        owed_(error, x, bits, scales)
        between = time.perf_counter()
        decompress_(out, bits, scales)
        decompress_s.append(time.perf_counter() - between)
        owed_s.append(between - compressed)
        compress_s.append(compressed - began)
    ratio = x.nbytes / wire_bytes(NUMEL)
    return {"compress_s": compress_s, "owed_s": owed_s, "decompress_s": decompress_s, "ratio": ratio}
