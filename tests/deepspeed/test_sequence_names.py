"""Functions of long sequences, tile by tile: the values and gradients of the whole, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from zoo.deepspeed.sequence.layer import apply_rotary_pos_emb

import zoo.deepspeed as deepspeed
from zoo import sim

WORDS = 11


def grads(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return [*torch.autograd.grad(loss, of)]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()


@given(tokens=st.integers(1, 9), shards=st.integers(1, 12), ranked=st.integers(2, 3))
def test_a_tiled_mlp_is_the_mlp(tokens: int, shards: int, ranked: int) -> None:
    net = mlp()
    x = torch.randn((2, tokens, 4)[3 - ranked :], dtype=torch.double, requires_grad=True)
    tiled, whole = TiledMLP.apply(lambda self, x: self(x), net, x, shards, list(net.parameters())), net(x)
    torch.testing.assert_close(tiled, whole)
    wanted = grads(whole.square().sum(), x, *net.parameters())
    torch.testing.assert_close(grads(tiled.square().sum(), x, *net.parameters()), wanted)


@given(shards=st.integers(1, 9), reduction=st.sampled_from([None, "mean", "sum"]))
def test_a_tiled_function_takes_what_is_cut_and_what_is_whole(shards: int, reduction: Any) -> None:
    net = mlp()
    hidden = torch.randn(2, 7, 4, dtype=torch.double, requires_grad=True)
    other = torch.randn(2, 7, 1, dtype=torch.double, requires_grad=True)

    def fn(hidden: torch.Tensor, other: torch.Tensor, scale: float, nothing: None) -> torch.Tensor:
        assert nothing is None
        return net(hidden) * other * scale

    cut = {"hidden": hidden, "other": other, "nothing": None}
    tiled = sequence_tiled_compute(fn, 7, shards, cut, {"scale": 2.0}, "hidden", output_reduction=reduction)
    whole = fn(hidden, other, 2.0, None)
    whole = whole if reduction is None else getattr(whole, reduction)()
    torch.testing.assert_close(tiled, whole)
    of = (hidden, other, *net.parameters())
    torch.testing.assert_close(grads(tiled.square().sum(), *of), grads(whole.square().sum(), *of))
    keys = ["hidden", "other", "nothing"]
    again = SequenceTiledCompute.apply(
        fn, 7, shards, keys, ["scale"], "hidden", None, 1, reduction, hidden, other, None, 2.0
    )
    assert torch.equal(again, tiled)


@given(shards=st.integers(1, 16), weight=st.floats(0.5, 3.0))
def test_a_loss_of_tiles_adds_up_to_that_of_the_whole(shards: int, weight: float) -> None:
    torch.manual_seed(1)
    head = nn.Linear(4, WORDS).double()
    x = torch.randn(2, 7, 4, dtype=torch.double, requires_grad=True)
    y, mask = torch.randint(0, WORDS, (2, 7)), (torch.rand(2, 7) > 0.3).double()

    def added(self: nn.Linear, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        each = F.cross_entropy(self(x).view(-1, WORDS), y.view(-1), reduction="none")
        return (each if mask is None else each * mask.view(-1)).sum()

    for of in (None, mask):
        tiled = TiledFusedLogitsLoss.apply(added, head, x, y, of, shards, None, "sum") * weight
        whole = added(head, x, y, of) * weight
        torch.testing.assert_close(tiled, whole)
        torch.testing.assert_close(grads(tiled, x, *head.parameters()), grads(whole, x, *head.parameters()))
    mean = TiledFusedLogitsLoss.apply(added, head, x, y, None, shards, None, "mean")
    torch.testing.assert_close(mean * len(x.view(-1, 4).chunk(shards)), added(head, x, y))


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tiles_inside_of_a_model_train_as_the_whole_at_every_stage(stage: int) -> None:
    class Block(nn.Module):
        def __init__(self, tiles: int) -> None:
            super().__init__()
            self.tiles, self.net = tiles, mlp().float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.tiles:
                return self.net(x)
            return TiledMLP.apply(lambda self, x: self.net(x), self, x, self.tiles, list(self.parameters()))

    def weights(rank: int, tiles: int) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=nn.Sequential(Block(tiles), Block(tiles)), config=config)
        for step in range(2):
            torch.manual_seed(10 * rank + step)
            x = torch.randn(2, 7, 4)
            engine.backward((engine(x) - x.flip(1)).square().mean())
            engine.step()
        return [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]

    tiled = sim.run(2, lambda rank: weights(rank, 3))
    whole = sim.run(2, lambda rank: weights(rank, 0))
    torch.testing.assert_close(tiled, whole)


def test_what_is_no_tile_is_refused() -> None:
    x = torch.randn(2, 7, 4)

    def call(**more: Any) -> torch.Tensor:
        given = {"seqlen": 7, "shards": 2, "kwargs_to_shard": {"x": x}, "grad_requiring_tensor_key": "x", **more}
        return sequence_tiled_compute(lambda x: x, kwargs_to_pass={}, **given)

    for more, says in (
        ({"output_reduction": "max"}, "allowed are None, 'mean', 'sum'"), ({"shards": 0}, "needed is 1 or more"),
        ({"seqlen": 8}, r"has shape \(2, 7, 4\); dimension 1 must be seqlen=8"),
        ({"grad_requiring_tensor_key": "y"}, "not in kwargs_to_shard, which has x"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            call(**more)
    with pytest.raises(ValueError, match="allowed are 'mean', 'sum'"):
        TiledFusedLogitsLoss.apply(len, None, x, x[..., 0], None, 2, None, None)
    with pytest.raises(ValueError, match=r"y has shape \(2, 6\), and the tokens of x \(2, 7\)"):
        TiledFusedLogitsLoss.apply(len, None, x, x[:, :6, 0], None, 2, None, "sum")
    with pytest.raises(ValueError, match="got 1 values for 1 keys to shard and 1 to pass"):
        SequenceTiledCompute.apply(len, 7, 2, ["x"], ["scale"], "x", None, 1, None, x)


def test_rotary_positions_turn_pairs_of_features_by_their_angles() -> None:
    t = torch.randn(5, 2, 3, 10, dtype=torch.double)
    angles = torch.randn(5, 1, 1, 3, dtype=torch.double)
    both = torch.cat((angles, angles), dim=-1)
    turned = apply_rotary_pos_emb(t, both.cos(), both.sin())
    pairs = torch.complex(t[..., :3], t[..., 3:6]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag, t[..., 6:]), dim=-1))
