"""Law 2 for sequences: attention over a sequence split over ranks is attention over the sequence."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.nn import SequenceParallelAttention, dot_product_attention
from zoo.zero import ZeroOptimizer


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention by its definition; (B, S, H, D) with K key and value heads."""
    k, v = (tensor.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for tensor in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


@given(
    world=st.integers(1, 4),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 4),
    groups=st.integers(1, 2),
    group_size=st.integers(1, 3),
    dim=st.integers(1, 5),
    value_dim=st.integers(1, 5),
    causal=st.booleans(),
    check=st.booleans(),
)
def test_split_attention_is_attention(
    world: int, batch: int, tokens: int, groups: int, group_size: int, dim: int, value_dim: int, causal: bool,
    check: bool,
) -> None:  # fmt: skip
    kv_heads = groups * world
    heads = kv_heads * group_size
    torch.manual_seed(0)
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    whole = [torch.randn(batch, tokens * world, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    upstream = torch.randn(batch, tokens * world, heads, value_dim, dtype=torch.float64)
    expected = reference(*whole, causal)
    grads = torch.autograd.grad(expected, whole, upstream)

    def fn(rank: int) -> None:
        mine = slice(rank * tokens, (rank + 1) * tokens)
        attention = SequenceParallelAttention(check=check)
        parts = [tensor.detach()[:, mine].clone().requires_grad_() for tensor in whole]
        out = attention(*parts, causal=causal)
        out.backward(upstream[:, mine])
        torch.testing.assert_close(out, expected[:, mine], rtol=1e-12, atol=1e-12)
        for part, grad in zip(parts, grads, strict=True):
            torch.testing.assert_close(part.grad, grad[:, mine], rtol=1e-12, atol=1e-12)
        log = attention.comm.log.ops
        if world > 1:
            assert log["all_to_all"].count == 4
            elements = sum(part.numel() for part in parts) + out.numel()
            assert log["all_to_all"].wire_bytes == pytest.approx(2 * elements * 8 * (world - 1) / world, abs=4)

    sim.run(world, fn)


class Layer(nn.Module):
    """Attention with a feed-forward part and learned positions; ``first`` is the position of its first token."""

    def __init__(self, attention: nn.Module | None) -> None:
        super().__init__()
        self.attention = attention
        self.positions = nn.Parameter(torch.randn(8, 12))
        self.qkv, self.out = nn.Linear(12, 24), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        x = x + self.positions[first : first + x.shape[1]]
        q, k, v = self.qkv(x).split([12, 6, 6], dim=-1)
        q, k, v = q.unflatten(-1, (4, 3)), k.unflatten(-1, (2, 3)), v.unflatten(-1, (2, 3))
        attention = self.attention or dot_product_attention
        out: torch.Tensor = x + self.out(attention(q, k, v, causal=True).flatten(2))
        return out


class Stack(nn.Module):
    def __init__(self, attention: nn.Module | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(attention), Layer(attention)]).double()

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, first)
        return x


def sample(replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(2, 8, 12, generator=generator, dtype=torch.float64)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
def test_training_over_data_times_sequence_ranks_equals_one_process(stage: int) -> None:
    options = {"lr": 0.1, "momentum": 0.9}

    def fn(rank: int) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
        replica, piece = divmod(rank, 2)
        model = Stack(SequenceParallelAttention(group=mesh["sequence"], check=True))
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, param_persistence_threshold=0, reduce_bucket_size=1,
            clip_norm=0.5, **options,
        )  # fmt: skip
        for step in range(3):
            x = sample(replica, step)[:, 4 * piece : 4 * piece + 4]
            model(x, 4 * piece).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    model = Stack(None)
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(3):
        model(torch.cat([sample(replica, step) for replica in range(2)]), 0).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters())
    for got in sim.run(4, fn):
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-10, atol=1e-10)


def test_unequal_pieces_are_weighted_by_their_tokens() -> None:
    """Rank r's loss times n_r P / Σ n: what the module's docstring says of ignored tokens."""
    counts = [1, 4]

    def fn(rank: int) -> dict[str, torch.Tensor]:
        model = Stack(SequenceParallelAttention())
        optimizer = ZeroOptimizer(model, stage=2, optimizer=torch.optim.SGD, lr=0.1)
        out = model(sample(0, 0)[:, 4 * rank : 4 * rank + 4], 4 * rank)[:, : counts[rank]]
        (out.square().mean() * counts[rank] * 2 / sum(counts)).backward()
        optimizer.step()
        return optimizer.consolidated_parameters()

    model = Stack(None)
    out = model(sample(0, 0), 0)
    torch.cat([out[:, :1], out[:, 4:8]], dim=1).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = dict(model.named_parameters())
    for name, value in sim.run(2, fn)[0].items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-12, atol=1e-12)


def test_a_copied_model_talks_over_the_same_group() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
        model = Stack(SequenceParallelAttention(group=mesh["sequence"]))
        x = sample(rank // 2, 0)[:, 4 * (rank % 2) :][:, :4]
        assert torch.equal(copy.deepcopy(model)(x, 0), model(x, 0))

    sim.run(4, fn)


def test_heads_that_do_not_divide_are_named() -> None:
    def fn(rank: int) -> None:
        attention = SequenceParallelAttention()

        def call(heads: int, groups: int, tokens: int = 2) -> None:
            k = torch.zeros(1, tokens, groups, 4)
            attention(torch.zeros(1, 2, heads, 4), k, k)

        with pytest.raises(ValueError, match="3 query heads and 3 key and value heads over 2 sequence-parallel ranks"):
            call(3, 3)
        with pytest.raises(ValueError, match="4 query heads and 1 key and value heads over 2"):
            call(4, 1)
        with pytest.raises(ValueError, match="6 query heads on 4 key"):
            call(6, 4)
        with pytest.raises(ValueError, match="one piece of the sequence"):
            call(4, 4, 3)
        q = torch.zeros(1, 2, 2, 4)
        with pytest.raises(ValueError, match="the first three must stay"):
            SequenceParallelAttention(lambda q, k, v: q.flatten(2))(q, q, q)

    sim.run(2, fn)


def test_ranks_with_other_lengths_are_told() -> None:
    def fn(rank: int) -> None:
        q = torch.zeros(1, 2 + rank, 2, 4)
        SequenceParallelAttention(check=True)(q, q, q)

    with pytest.raises(sim.RankError, match=r"all_to_all of 72 float32 \(queries, keys and values by head\)"):
        sim.run(2, fn)
