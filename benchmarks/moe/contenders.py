"""The same layer by zoo, by its peers and by hand, on the same weights; and the bare matrix products."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.moe.shapes import Shape, Weights, choices
from torch import nn

Tensor = torch.Tensor
Layer = Callable[[Tensor], Tensor]
Build = Callable[[Shape, Weights], tuple[Layer, list[nn.Parameter]]]

MOST_BYTES = 4 * 2**30
"""A contender that would need more than this for its activations alone is left out."""


class NotMeasuredError(Exception):
    """Why a contender is left out."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of them."""

    build: Build
    peer: bool = True
    rows: Callable[[Shape, str], int] | None = None
    """How many rows it computes for a routing, where these are not T·k."""
    bytes: Callable[[Shape], int] | None = None
    """What it allocates, where that is not a few activations for each row."""
    same: Callable[[Shape], bool] = lambda shape: True
    """Whether it has to give the same numbers as the others."""

    def refuse(self, shape: Shape, routing: str) -> str:
        """Why it cannot be measured; empty if it can."""
        rows = shape.rows if self.rows is None else self.rows(shape, routing)
        each = (4 * shape.width + 9 * shape.hidden) * shape.itemsize
        need = rows * each if self.bytes is None else self.bytes(shape)
        if need <= MOST_BYTES:
            return ""
        return f"would compute {rows:,} rows for {shape.rows:,} and need {need / 2**30:.0f} GiB"


def _zoo(shape: Shape, weights: Weights) -> tuple[Layer, list[nn.Parameter]]:
    layer = zoo_layer(shape, weights)
    return lambda x: layer(x).output, list(layer.parameters())


def zoo_layer(shape: Shape, weights: Weights, *, ep_size: int = 1, ep_rank: int = 0, **options: Any) -> Any:
    """``MixtureOfExperts`` without a capacity, of grouped experts."""
    from zoo.moe import GroupedExperts, MixtureOfExperts, TopKGate

    experts = GroupedExperts(
        shape.experts, shape.width, shape.hidden, activation="silu", gated=True, ep_size=ep_size, ep_rank=ep_rank
    )
    layer = MixtureOfExperts(TopKGate(shape.width, shape.experts, k=shape.k), experts, **options)
    mine = slice(experts.first, experts.first + experts.num_local)
    with torch.no_grad():
        layer.to(shape.torch_dtype)
        layer.gate.weight.copy_(weights.router)
        experts.up.copy_(weights.up[mine])
        experts.down.copy_(weights.down[mine])
    return layer


class SwiGLU(nn.Module):
    """One expert, as a module."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up.t().contiguous()), nn.Parameter(down.t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """(…, D)."""
        g, u = F.linear(x, self.up).chunk(2, -1)
        return F.linear(F.silu(g) * u, self.down)


class ByHand(nn.Module):
    """Sort, a loop over experts with parameters of their own, ``index_add``: what one writes in ten minutes."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        self.k = shape.k
        self.router = nn.Parameter(weights.router.clone())
        self.experts = nn.ModuleList([SwiGLU(u, d) for u, d in zip(weights.up, weights.down, strict=True)])

    def forward(self, x: Tensor) -> Tensor:
        """(T, D)."""
        p, chosen = torch.softmax(F.linear(x.float(), self.router.float()), -1).topk(self.k, -1)
        p = p / p.sum(-1, keepdim=True)
        order = chosen.reshape(-1).argsort(stable=True)
        token = order // self.k
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self.experts)).tolist()
        parts = [f(part) for f, part in zip(self.experts, x[token].split(counts), strict=True) if len(part)]
        y = torch.cat(parts) * p.reshape(-1)[order].unsqueeze(1).to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, y)


def _by_hand(shape: Shape, weights: Weights) -> tuple[Layer, list[nn.Parameter]]:
    layer = ByHand(shape, weights)
    return layer, list(layer.parameters())


def _transformers(implementation: str) -> Build:
    def build(shape: Shape, weights: Weights) -> tuple[Layer, list[nn.Parameter]]:
        try:
            from transformers import MixtralConfig
            from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
        except ImportError as error:
            raise NotMeasuredError("transformers is not installed") from error
        config = MixtralConfig(
            hidden_size=shape.width, intermediate_size=shape.hidden, num_local_experts=shape.experts,
            num_experts_per_tok=shape.k, experts_implementation=implementation,
        )  # fmt: skip
        block = MixtralSparseMoeBlock(config).to(shape.torch_dtype)
        with torch.no_grad():
            block.gate.weight.copy_(weights.router)
            block.experts.gate_up_proj.copy_(weights.up.transpose(1, 2))
            block.experts.down_proj.copy_(weights.down.transpose(1, 2))
        return lambda x: block(x.unsqueeze(0)).squeeze(0), list(block.parameters())

    return build


def deepspeed_layer(shape: Shape, weights: Weights, *, ep_size: int = 1, ep_rank: int = 0, **options: Any) -> Any:
    """DeepSpeed's MoE over the process group that exists. Its second expert is the second best one, not drawn."""
    try:
        from benchmarks.zero.contenders import import_deepspeed

        with contextlib.redirect_stdout(io.StringIO()):
            import_deepspeed()
            from deepspeed.moe.layer import MoE
    except ImportError as error:
        raise NotMeasuredError("DeepSpeed is not installed") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        layer = MoE(
            shape.width, SwiGLU(weights.up[0], weights.down[0]), shape.experts, ep_size=ep_size, k=shape.k,
            top2_2nd_expert_sampling=False, **options,
        )  # fmt: skip
        layer.set_deepspeed_parallelism()
    layer.to(shape.torch_dtype)
    first = ep_rank * (shape.experts // ep_size)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(weights.router)
        for e, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.up.copy_(weights.up[first + e].t())
            expert.down.copy_(weights.down[first + e].t())
    return layer


def _deepspeed(**options: Any) -> Build:
    def build(shape: Shape, weights: Weights) -> tuple[Layer, list[nn.Parameter]]:
        layer = deepspeed_layer(shape, weights, **options)
        return lambda x: layer(x.unsqueeze(0))[0].squeeze(0), list(layer.parameters())

    return build


def padded_rows(shape: Shape, routing: str) -> int:
    """E times the rows of the most loaded expert."""
    counts = torch.bincount(choices(shape, routing).reshape(-1), minlength=shape.experts)
    return shape.experts * int(counts.max())


CONTENDERS: dict[str, Contender] = {
    "zoo": Contender(build=_zoo, peer=False),
    "DeepSpeed": Contender(
        # With k = 1 it weighs by the probability as it is, where the others' weights sum to 1.
        build=_deepspeed(drop_tokens=False), rows=padded_rows, same=lambda shape: shape.k > 1,
    ),
    "DeepSpeed, capacity": Contender(build=_deepspeed(), same=lambda shape: False),
    "transformers eager": Contender(build=_transformers("eager")),
    "transformers grouped_mm": Contender(build=_transformers("grouped_mm")),
    "transformers batched_mm": Contender(
        # A copy of its expert's matrices for each row, and their gradients.
        build=_transformers("batched_mm"), bytes=lambda s: 6 * s.rows * s.width * s.hidden * s.itemsize,
    ),
    "by hand": Contender(build=_by_hand),
}  # fmt: skip

BARE, FRESH = "GEMMs", "GEMMs into new memory"


def yardsticks(shape: Shape, weights: Weights) -> dict[str, Callable[[], object]]:
    """The products of forward and backward with an even routing, the router's in fp32 included, and nothing else.

    ``BARE`` writes into memory that is kept, all products of an expert one after the other. ``FRESH`` allocates what
    any layer has to: activations and gradients; it computes each kind of product for all experts before the next kind.
    """
    up, down, dtype = weights.up, weights.down, shape.torch_dtype
    n, wide, hidden = shape.rows // shape.experts, shape.width, shape.hidden
    rows = n * shape.experts
    x, a = torch.randn(rows, wide).to(dtype), torch.randn(rows, hidden).to(dtype)
    dp = torch.randn(rows, 2 * hidden).to(dtype)
    router, x32 = weights.router.float(), torch.randn(shape.tokens, wide)
    logits = torch.randn(shape.tokens, shape.experts)
    parts = [slice(e * n, (e + 1) * n) for e in range(shape.experts)]

    def room() -> list[Tensor]:
        return [
            torch.empty(rows, 2 * hidden, dtype=dtype), torch.empty(rows, wide, dtype=dtype),
            torch.empty(rows, hidden, dtype=dtype), torch.empty(rows, wide, dtype=dtype),
            torch.empty_like(up), torch.empty_like(down),
        ]  # fmt: skip

    kept, router_kept = room(), [torch.empty_like(logits), torch.empty_like(x32), torch.empty_like(router)]

    def products(out: list[Tensor]) -> list[Callable[[int], object]]:
        p, y, da, dx, dup, ddown = out
        return [
            lambda e: torch.mm(x[parts[e]], up[e], out=p[parts[e]]),
            lambda e: torch.mm(a[parts[e]], down[e], out=y[parts[e]]),
            lambda e: torch.mm(x[parts[e]], down[e].t(), out=da[parts[e]]),
            lambda e: torch.mm(a[parts[e]].t(), x[parts[e]], out=ddown[e]),
            lambda e: torch.mm(dp[parts[e]], up[e].t(), out=dx[parts[e]]),
            lambda e: torch.mm(x[parts[e]].t(), dp[parts[e]], out=dup[e]),
        ]

    def of_router(out: list[Tensor]) -> None:
        v, dx, dw = out
        torch.mm(x32, router.t(), out=v)
        torch.mm(logits, router, out=dx)
        torch.mm(logits.t(), x32, out=dw)

    def bare() -> None:
        for e in range(shape.experts):
            for product in products(kept):
                product(e)
        of_router(router_kept)

    def fresh() -> list[Tensor]:
        out = room()
        for product in products(out):
            for e in range(shape.experts):
                product(e)
        of_router([torch.empty_like(t) for t in router_kept])
        return out

    return {BARE: bare, FRESH: fresh}
