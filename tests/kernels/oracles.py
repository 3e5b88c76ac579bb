"""How tests of operations on single tensors compare: on every instruction set, with several numbers of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zoo.kernels import loading

from .cases import placed, same_bits, values

THREADS = (1, 2, 3, 7)


def tensor(
    shape: Sequence[int], dtype: torch.dtype, seed: int, *, offset: int = 0, special: bool = False
) -> torch.Tensor:
    """Many magnitudes, at ``offset`` elements after the beginning of the memory."""
    n = 1
    for size in shape:
        n *= size
    return placed(values(n, seed, special=special), dtype, offset).view(*shape)


def assert_all_same(run: Callable[[], Sequence[Any]], expected: Sequence[Any], what: object = "") -> None:
    """``run`` gives ``expected`` bit for bit on every instruction set."""
    for isa in loading.isas():
        with loading.use_isa(isa):
            got = run()
        assert len(got) == len(expected)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert (a is None and b is None) or same_bits(a, b), (isa, i, what)


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
