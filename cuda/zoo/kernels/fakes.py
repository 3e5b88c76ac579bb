"""Fake (meta) kernels of the native operations: shapes and dtypes without data, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def register() -> None:
    """Give every native operation its fake kernel; called once, after the library is loaded."""
    torch.library.register_fake("zoo::update_", _nothing)
    torch.library.register_fake("zoo::activate_", _nothing)
    torch.library.register_fake("zoo::activate_backward_", _nothing)
    torch.library.register_fake("zoo::lamb_apply_", _nothing)
    torch.library.register_fake("zoo::lamb_direction_", _norms)
    torch.library.register_fake("zoo::sum_squares", _sums)
    torch.library.register_fake("zoo::scale_sum_squares_", _sums)
    torch.library.register_fake("zoo::quantise", _quantise)
    torch.library.register_fake("zoo::dequantise_", _nothing)
    torch.library.register_fake("zoo::onebit_compress_", _compress)
    torch.library.register_fake("zoo::onebit_decompress_", _nothing)


def _nothing(*args: Any) -> None:
    _one_device(args)


def _norms(flags: int, params: list[torch.Tensor], *rest: Any) -> torch.Tensor:
    _one_device((params, *rest))
    return params[0].new_empty((len(params), 2), dtype=torch.float64)


def _sums(tensors: list[torch.Tensor], *rest: Any) -> torch.Tensor:
    _one_device(tensors)
    return tensors[0].new_empty(len(tensors), dtype=torch.float64)


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _one_device(args: Any) -> None:
    # A meta tensor among real ones leads here instead of to the kernel that would refuse it.
    devices = {t.device for t in _tensors(args)}
    if len(devices) > 1:
        raise NotImplementedError(f"tensors on {', '.join(sorted(map(str, devices)))} in one call")


def _compress(x: torch.Tensor, error: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.numel()
    bits = x.new_empty((n + 7) // 8, dtype=torch.uint8)
    return bits, x.new_empty((n + group_size - 1) // group_size, dtype=torch.float32)


def _quantise(x: torch.Tensor, bits: int, group_size: int, *rest: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.numel()
    q = x.new_empty((n * bits + 7) // 8, dtype=torch.int8)
    return q, x.new_empty((n + group_size - 1) // group_size, dtype=torch.float32)
