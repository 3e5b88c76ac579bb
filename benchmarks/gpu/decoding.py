"""What a token goes through when it is generated: its checks, and what is timed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.cases import DTYPES, Case

from zoo.kernels.cached_attention import cached_attention
from zoo.kernels.cached_attention.reference import cached_attention as attention_reference
from zoo.kernels.decoder_layer import Product, RmsNorm, after_cache, attention, before_cache, feed_forward
from zoo.kernels.decoder_layer import reference as layer_reference
from zoo.kernels.rms_norm import add_rms_norm, rms_norm
from zoo.kernels.rms_norm import reference as rms_norm_reference
from zoo.kernels.rotary_cache import rotary_cache_
from zoo.kernels.rotary_cache.reference import rotary_cache_ as rotary_reference
from zoo.kernels.thin_linear import thin_linear, thin_linears
from zoo.kernels.thin_linear.reference import thin_linear as reference
from zoo.kernels.uniform import reference as uniform_reference
from zoo.kernels.uniform import uniform

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


def rms_norm_cases(large: bool) -> Iterator[Case]:
    """Rows of whole lanes and not, longer ones than the shared memory; weights of the dtype of x and of fp32."""
    for dtype in DTYPES:
        for rows, dim in ((0, 8), (3, 1), (5, 576), (2, 1027), (1, 12000), *([(1031, 4096)] if large else [])):
            g = torch.Generator().manual_seed(dim)
            x, r = (torch.randn(rows, dim, generator=g).to(dtype) for _ in range(2))
            for weight in {dtype, torch.float32}:
                w = torch.randn(dim, generator=g).to(weight)

                def operation(x: Any, r: Any, w: Any) -> Any:
                    return rms_norm(x, w), rms_norm(x, w, plus_one=True), add_rms_norm(x, r, w, eps=1e-5)

                def expected(x: Any, r: Any, w: Any) -> Any:
                    of = rms_norm_reference
                    added = of.add_rms_norm(x, r, w, 1e-5, False)
                    return of.rms_norm(x, w, 1e-6, False), of.rms_norm(x, w, 1e-6, True), added

                what = f"{dtype}, weight {weight}, {rows} x {dim}"
                yield Case(what=what, args=(x, r, w), operation=operation, reference=expected)


def layer_cases(large: bool) -> Iterator[Case]:
    """A decoder layer in two calls, of one token and of several, with norms of heads."""
    heads, groups, dim, width, wide = 4, 2, 16, 48, 80
    for dtype in DTYPES:
        for batch, tokens in ((1, 1), (2, 3), *([(3, 5)] if large else [])):
            g = torch.Generator().manual_seed(tokens)
            shapes = [
                (batch, tokens, width), (width,), (heads * dim, width), (groups * dim, width), (groups * dim, width),
                (dim,), (width, heads * dim), (wide, width), (wide, width), (width, wide),
            ]  # fmt: skip
            args = [(torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(dtype) for shape in shapes]
            angles = torch.rand(batch, tokens, dim, generator=g) * 6

            def run(
                before: Any, after: Any, x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, head: Tensor,
                out: Tensor, gate: Tensor, up: Tensor, down: Tensor, angles: Tensor,
            ) -> list[Tensor]:  # fmt: skip
                cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
                made = before(x, RmsNorm(norm, 1e-5, False), Product([wq, wk, wv], [], []), cos, sin, head)
                q, k, v = torch.split(made.unflatten(2, (-1, dim)).transpose(1, 2), [heads, groups, groups], 1)
                rest = Product([out], [], []), Product([gate, up], [], []), Product([down], [], [])
                return [made, after(x, q, k, v, RmsNorm(norm, 1e-5, True), *rest)]

            def before(x: Tensor, norm: RmsNorm, qkv: Product, cos: Tensor, sin: Tensor, head: Tensor) -> Tensor:
                norms = [RmsNorm(head, 1e-6, False)] * 2
                return before_cache(x, norm, qkv, cos, sin, heads=heads, groups=groups, head_norms=norms)

            def after(x: Tensor, q: Tensor, k: Tensor, v: Tensor, norm: RmsNorm, *rest: Product) -> Tensor:
                out, gate_up, down = rest
                how: Any = {"gate_up": gate_up, "down": down, "activation": "silu"}
                if x.shape[1] > 1:  # as a layer that is split over ranks
                    made, y = feed_forward(attention(q, k, v, None, scale=0.3, out=out), x, norm, **how)
                    return y + made
                return after_cache(x, q, k, v, None, norm, scale=0.3, out=out, **how)

            def before_reference(
                x: Tensor, norm: RmsNorm, qkv: Product, cos: Tensor, sin: Tensor, head: Tensor
            ) -> Tensor:  # fmt: skip
                return layer_reference.before_cache(
                    x, *norm, *qkv, [head, head], [1e-6, 1e-6], False, cos, sin, None, None, None, heads, groups
                )

            def after_reference(x: Tensor, q: Tensor, k: Tensor, v: Tensor, norm: RmsNorm, *rest: Product) -> Tensor:
                out, gate_up, down = rest
                return layer_reference.after_cache(x, q, k, v, None, 0.3, *out, *norm, *gate_up, "silu", *down)

            yield Case(
                what=f"{batch} rows of {tokens} tokens, {dtype}", args=(*args, angles),
                operation=partial(run, before, after), reference=partial(run, before_reference, after_reference),
            )  # fmt: skip


def uniform_cases(large: bool) -> Iterator[Case]:
    """Rows and lengths that end within a counter's words, and places and seeds of all 64 bits."""
    for rows, count in [(1, 1), (3, 7), (2, 66), (5, 4097), *([(64, 50_001)] if large else [])]:
        for seed in (0, 7, 2**62 + 3):
            places = torch.arange(rows) * (2**33 + 1) - 2
            yield Case(
                what=f"{rows} rows of {count}, seed {seed}", args=(places,),
                operation=partial(uniform, seed=seed, count=count),
                reference=partial(uniform_reference.uniform, seed=seed, count=count),
            )  # fmt: skip


def rotary_cases(large: bool) -> Iterator[Case]:
    """With a cache and without; heads that turn in part; pairs of both kinds; one table for all rows and one each."""
    shapes = [
        (2, 3, 4, 2, 8, 8),
        (1, 5, 3, 3, 6, 2),
        (3, 1, 9, 3, 64, 64),
        *([(4, 300, 32, 8, 128, 128)] if large else []),
    ]
    for dtype in DTYPES:
        for batch, tokens, heads, groups, dim, rotary in shapes:
            for interleaved in (False, True):
                for rows in {1, batch}:
                    g = torch.Generator().manual_seed(tokens)
                    qkv = torch.randn(batch, tokens, (heads + 2 * groups) * dim, generator=g).to(dtype)
                    angles = torch.rand(rows, tokens, rotary, generator=g) * 6
                    keys, values = (
                        torch.randn(batch, groups, tokens + 2, dim, generator=g).to(dtype) for _ in range(2)
                    )
                    places = torch.arange(tokens).expand(rows, -1).contiguous() + 1
                    places[0, 0] = -1

                    def run(fn: Any, qkv: Any, angles: Any, *cache: Any, named: bool, how: Any) -> Any:
                        found = []
                        for given in (cache, (None, None, None)):
                            copies = [t if t is None or t.dtype is torch.int64 else t.clone() for t in (qkv, *given)]
                            tables = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
                            if named:
                                names = dict(zip(("keys", "values", "places"), copies[1:], strict=True))
                                fn(copies[0], *tables, q_heads=how[0], kv_heads=how[1], interleaved=how[2], **names)
                            else:
                                fn(copies[0], *tables, *copies[1:], *how)
                            found += [t for t in copies if t is not None]
                        return found

                    how = (heads, groups, interleaved)
                    what = f"{dtype}, {tuple(qkv.shape)}, R = {rotary}, interleaved={interleaved}, {rows} tables"
                    yield Case(
                        what=what, args=(qkv, angles, keys, values, places),
                        operation=partial(run, rotary_cache_, named=True, how=how),
                        reference=partial(run, rotary_reference, named=False, how=how),
                    )  # fmt: skip


def attention_cases(large: bool) -> Iterator[Case]:
    """Heads that share keys and not; one query and several; causal, masked in part and wholly; more keys than a warp
    has threads, and than a block; odd sizes."""
    shapes = [
        (2, 4, 2, 3, 9, 8),
        (1, 2, 1, 3, 150, 16),
        (1, 9, 3, 1, 70, 64),
        (2, 3, 3, 2, 2, 17),
        *([(2, 32, 8, 4, 3000, 128)] if large else []),
    ]
    for dtype in DTYPES:
        for batch, heads, groups, tokens, length, dim in shapes:
            g = torch.Generator().manual_seed(length)
            q = torch.randn(batch, tokens, heads, dim, generator=g).to(dtype)
            k, v = (torch.randn(batch, groups, length, dim, generator=g).to(dtype) for _ in range(2))
            mask = torch.rand(batch, tokens, length, generator=g) < 0.6
            mask[0, 0] = False

            def operation(q: Any, k: Any, v: Any, mask: Any) -> Any:
                q = q.transpose(1, 2)
                return cached_attention(q, k, v, scale=0.3), cached_attention(q, k, v, mask, scale=0.3)

            def expected(q: Any, k: Any, v: Any, mask: Any) -> Any:
                q = q.transpose(1, 2)
                return attention_reference(q, k, v, None, 0.3), attention_reference(q, k, v, mask, 0.3)

            what = f"{dtype}, {heads} heads over {groups}, {tokens} of {length} tokens, D = {dim}"
            yield Case(what=what, args=(q, k, v, mask), operation=operation, reference=expected)


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
