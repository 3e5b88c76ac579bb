"""Batch-invariant linear layers: their checks, and what is timed of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.cases import DTYPES, Case

from zoo.kernels.thin_linear import thin_linear, thin_linears
from zoo.kernels.thin_linear.reference import thin_linear as reference

Tensor = torch.Tensor
COLUMNS = 4096


def thin_cases(large: bool) -> Iterator[Case]:
    """Few tokens and many; rows of whole lanes and not; what is no multiple of anything; bits, not tolerances."""
    shapes = [(70, 48), (65, 33), (5, 144), (3, 1), *([(1031, 1024)] if large else [])]
    for dtype in DTYPES:
        for rows, columns in shapes:
            for tokens in (0, 1, 2, 3, 9, 17):
                g = torch.Generator().manual_seed(tokens)
                x, w = (torch.randn(n, columns, generator=g).to(dtype) for n in (tokens, rows))
                bias = torch.randn(rows, generator=g).to(dtype)

                def operation(x: Any, w: Any, bias: Any) -> Any:
                    return thin_linear(x, w, bias), thin_linear(x, w), thin_linears(x, [w, w[:1]])

                def expected(x: Any, w: Any, bias: Any) -> Any:
                    return reference(x, [w], [bias]), reference(x, [w], []), reference(x, [w, w[:1]], [])

                what = f"{dtype}, W {rows} x {columns}, {tokens} tokens"
                yield Case(what=what, args=(x, w, bias), operation=operation, reference=expected)


def decode(tokens: int = 4) -> Callable[[str, int], tuple[dict[str, Callable[[], Any]], int]]:
    """W of rows of 4,096 and few tokens, bf16."""

    def make(device: str, elements: int) -> tuple[dict[str, Callable[[], Any]], int]:
        g = torch.Generator(device).manual_seed(0)
        w = torch.randn(max(1, elements // COLUMNS), COLUMNS, generator=g, device=device).bfloat16()
        x = torch.randn(tokens, COLUMNS, generator=g, device=device).bfloat16()
        return {
            "zoo": lambda: thin_linear(x, w),
            "torch": lambda: F.linear(x, w),
        }, w.nbytes + x.nbytes + 2 * tokens * len(w)

    return make
