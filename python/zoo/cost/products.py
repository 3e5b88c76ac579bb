"""How long a product of matrices and a pass over memory take on a device."""

from __future__ import annotations

import math

from zoo.cost.hardware import Device, Measured

__all__ = ["pass_s", "product_s"]

_NEAREST = 4


def product_s(
    device: Device, m: int, n: int, k: int, *, batch: int = 1, dtype: str = "bf16", itemsize: int = 2
) -> float:
    """Seconds of ``batch`` products (m, k) · (k, n), the gap after it left out.

    With the device's tiles of r rows and c columns and its U units::

        waves   = ⌈ batch ⌈m / r⌉ ⌈n / c⌉ / U ⌉
        seconds = waves · 2 r c (k + fill) U / (peak · reached · reached of the tile)

    the least over the tiles; at least the time in which memory gives both operands and takes the result. A wave that is
    not full takes as long as one that is. Where products were measured, the rates of the nearest of them (in the
    logarithms of the sizes) are averaged instead.
    """
    moved = batch * itemsize * (m * k + k * n + m * n) / (device.bytes_per_s * device.memory_reached)
    measured = device.products.get(dtype)
    if measured:
        return max(2 * batch * m * n * k / _rate(measured, batch * m, n, k), moved)
    unit = device.peak(dtype) * device.reached / device.units
    best = math.inf
    for tile in device.tiles:
        waves = math.ceil(batch * math.ceil(m / tile.rows) * math.ceil(n / tile.columns) / device.units)
        best = min(best, waves * 2 * tile.rows * tile.columns * (k + device.fill) / (unit * tile.reached))
    return max(best, moved)


def pass_s(device: Device, num_bytes: float) -> float:
    """Seconds of reading and writing so many bytes."""
    return num_bytes / (device.bytes_per_s * device.memory_reached)


def _rate(measured: tuple[Measured, ...], m: int, n: int, k: int) -> float:
    """FLOP/s: of the nearest products, weighted by 1 / distance²."""

    def distance(known: Measured) -> float:
        pairs = ((known.m, m), (known.n, n), (known.k, k))
        return math.fsum(math.log2(a / b) ** 2 for a, b in pairs)

    nearest = sorted((distance(known), known.flops_per_s) for known in measured)[:_NEAREST]
    if nearest[0][0] == 0:
        return nearest[0][1]
    weights = [1 / d for d, _ in nearest]
    return math.fsum(w * rate for w, (_, rate) in zip(weights, nearest, strict=True)) / math.fsum(weights)
