"""Linear layers on packed weights: their checks, and what is timed of them.

Sums in another order have other bits, so the numbers of the checks are such that no sum is rounded: then every order
gives the product itself, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.cases import DTYPES, Case

from zoo.kernels.packed_linear import PackedWeight, pack, pack_weight, packed_linear
from zoo.kernels.packed_linear.ops import packed_linear_backward
from zoo.kernels.packed_linear.reference import packed_linear as linear_reference
from zoo.kernels.packed_linear.reference import packed_linear_backward as backward_reference

Tensor = torch.Tensor
COLUMNS = 4096


def exact_weight(rows: int, columns: int, group: int, *, bits: int, symmetric: bool, seed: int) -> PackedWeight:
    """W of numbers that bf16 has and so few bits that no sum over a row with small integers is rounded."""
    g = torch.Generator().manual_seed(seed)
    low, high = (1 - 2 ** (bits - 1), 2 ** (bits - 1)) if symmetric else (0, 2 ** min(bits, 7))
    codes = torch.randint(low, high, (rows * columns,), generator=g)
    if bits == 4:
        codes = (codes[::2] & 15) | ((codes[1::2] & 15) << 4)
    q = codes.to(torch.uint8).view(torch.int8 if symmetric else torch.uint8)
    scales = torch.exp2(torch.randint(-3, 1, (rows * columns // group,), generator=g).float())
    minima = None if symmetric else scales * torch.randint(-64, 65, scales.shape, generator=g)
    return pack(q, scales, minima, shape=(rows, columns), bits=bits, group_size=group)


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """From -4 to 4."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_cases(large: bool) -> Iterator[Case]:
    """Few tokens and many, whole blocks of rows and a rest; forward and backward."""
    shapes = [(70, 48, 16), (64, 256, 64), (5, 144, 144), *([(1031, 1024, 128)] if large else [])]
    for dtype in DTYPES:
        for bits in (8, 4):
            for symmetric in (True, False):
                for rows, columns, group in shapes:
                    for tokens in (0, 1, 2, 3, 9, 16, 17):
                        weight = exact_weight(rows, columns, group, bits=bits, symmetric=symmetric, seed=tokens)
                        of, how = weight[:3], weight[3:]

                        def operation(x: Any, dy: Any, b: Any, q: Any, *of: Any, how: Any = how) -> Any:
                            w = PackedWeight(q.clone(), of[0], of[1] if len(of) > 1 else None, *how)  # q is aligned
                            both = packed_linear(x, w, b) + 0.0, packed_linear(x, w) + 0.0
                            return *both, packed_linear_backward(dy, w)

                        def reference(x: Any, dy: Any, b: Any, q: Any, *of: Any, how: Any = how) -> Any:
                            parts, ((rows, columns), *rest) = (q, of[0], of[1] if len(of) > 1 else None), how
                            y, plain = (linear_reference(x, *parts, bias, rows, *rest) + 0.0 for bias in (b, None))
                            return y, plain, backward_reference(dy, *parts, columns, *rest)

                        x = integers(tokens, columns, seed=1, dtype=dtype)
                        dy = integers(tokens, rows, seed=2, dtype=dtype)
                        args = (x, dy, integers(rows, seed=3, dtype=dtype), *(t for t in of if t is not None))
                        what = f"{dtype}, {bits} bits, symmetric={symmetric}, W {rows} x {columns}, groups of {group}"
                        yield Case(what=f"{what}, {tokens} tokens", args=args, operation=operation, reference=reference)


def int8_cases(large: bool) -> Iterator[Case]:
    """The same with x in 8 bits: numbers of any kind, since the order of sums is given."""
    shapes = [(70, 48, 16), (64, 256, 64), (5, 144, 48), (33, 400, 80), *([(1031, 1024, 128)] if large else [])]
    for dtype in DTYPES:
        for bits in (8, 4):
            for symmetric in (True, False):
                for rows, columns, group in shapes:
                    for tokens in (0, 1, 5):
                        g = torch.Generator().manual_seed(tokens)
                        numbers = torch.randn(rows, columns, generator=g)
                        weight = pack_weight(numbers, bits=bits, group_size=group, symmetric=symmetric)
                        of, how = weight[:3], weight[3:]

                        def operation(x: Any, b: Any, q: Any, *of: Any, how: Any = how) -> Any:
                            w = PackedWeight(q.clone(), of[0], of[1] if len(of) > 1 else None, *how)  # q is aligned
                            return packed_linear(x, w, b, activations="int8"), packed_linear(x, w, activations="int8")

                        def reference(x: Any, b: Any, q: Any, *of: Any, how: Any = how) -> Any:
                            parts, ((rows, _), *rest) = (q, of[0], of[1] if len(of) > 1 else None), how
                            return tuple(linear_reference(x, *parts, bias, rows, *rest, True) for bias in (b, None))

                        x = torch.randn(tokens, columns, generator=g).to(dtype)
                        args = (x, torch.randn(rows, generator=g).to(dtype), *(t for t in of if t is not None))
                        what = f"{dtype}, {bits} bits, symmetric={symmetric}, W {rows} x {columns}, groups of {group}"
                        yield Case(what=f"{what}, {tokens} tokens", args=args, operation=operation, reference=reference)


def decode(bits: int, tokens: int = 4) -> Callable[[str, int], tuple[dict[str, Callable[[], Any]], int]]:
    """W of rows of 4,096 and few tokens, bf16, groups of 128; torch: W in bf16."""

    def make(device: str, elements: int) -> tuple[dict[str, Callable[[], Any]], int]:
        g = torch.Generator(device).manual_seed(0)
        w = torch.randn(max(1, elements // COLUMNS), COLUMNS, generator=g, device=device).bfloat16()
        x = torch.randn(tokens, COLUMNS, generator=g, device=device).bfloat16()
        packed = pack_weight(w, bits=bits, group_size=128)
        steps = {"zoo": lambda: packed_linear(x, packed), "torch": lambda: F.linear(x, w)}
        return steps, packed.num_bytes + x.nbytes + 2 * tokens * len(w)

    return make
