"""Random-LTD: how many tokens each block sees, which ones, and what becomes of the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.data_efficiency.tiny import WIDTH, Tiny, data, stage, start, weights
from torch import nn

from zoo import sim
from zoo.config import ConfigError
from zoo.data_efficiency.config import DataEfficiencyConfig
from zoo.data_efficiency.random_ltd import RandomLTD, gathered
from zoo.engine import Engine
from zoo.parts import Clock, Environment


def section(low: int = 2, high: int = 8, steps: int = 6, multiple: int = 2, **more: Any) -> dict[str, Any]:
    schedule = {
        "min_value": low, "max_value": high, "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": steps, "seq_per_step": multiple},
    }  # fmt: skip
    ltd = {"enabled": True, "random_ltd_schedule": schedule, **more}
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}}


def ltd_of(engine: Engine) -> RandomLTD:
    found = engine.parts["data_efficiency"].random_ltd
    assert isinstance(found, RandomLTD)
    return found


@given(st.data())
def test_each_block_sees_the_tokens_of_the_schedule(draw: st.DataObject) -> None:
    low = draw.draw(st.integers(1, 8))
    high = draw.draw(st.integers(low, 10))
    steps, multiple = draw.draw(st.integers(1, 5)), draw.draw(st.integers(1, 3))
    layers = draw.draw(st.integers(3, 5))
    ids = draw.draw(st.none() | st.lists(st.integers(0, layers - 1), min_size=1, unique=True).map(sorted))
    engine = start({**section(low, high, steps, multiple, random_ltd_layer_id=ids)}, layers=layers)
    dropping = ids if ids is not None else list(range(1, layers - 1))
    for step in range(steps + 1):
        for block in engine.module.blocks:
            block.seen.clear()
        engine.train_batch()
        exact = math.floor(step / steps * (high - low) + low)
        kept = min(8, high if step >= steps else max(low, exact - exact % multiple))
        for number, seen in enumerate(engine.module.seen()):
            assert seen == [(4, kept if number in dropping else 8, WIDTH)]
        assert engine.record is not None
        assert engine.record.metrics["data_efficiency/random_ltd_tokens"] == kept
    engine.eval_batch(data()[:4])
    assert all(block.seen[-1] == (4, 8, WIDTH) for block in engine.module.blocks)


def test_kept_tokens_go_through_the_block_and_others_around_it() -> None:
    class Adds(nn.Module):
        def __init__(self, amount: float) -> None:
            super().__init__()
            self.amount = nn.Parameter(torch.tensor(amount))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.amount

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(Adds(1.0), Adds(10.0), Adds(100.0))
            self.out: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.out.append(self.layers(x))
            return self.out[-1].sum()

    engine = start(section(3, 3, 1, 1), model=Model(), training_data=None)
    x = torch.zeros(4, 8, 2)
    engine.train_batch(iter([x]))
    where = ltd_of(engine).positions(0, Clock(), 4, 8, 3)
    expected = torch.full((4, 8, 2), 101.0)
    for sample in range(4):
        expected[sample, where[sample]] += 10.0
    assert torch.equal(engine.module.out[0], expected)
    assert where.tolist() == [sorted(set(row)) for row in where.tolist()]


def test_every_token_is_kept_as_often_and_samples_differ() -> None:
    part = ltd_of(start(section()))
    count = torch.zeros(10)
    rows = set()
    for step in range(200):
        where = part.positions(0, Clock(step=step), 5, 10, 3)
        rows |= {tuple(row) for row in where.tolist()}
        count += torch.bincount(where.flatten(), minlength=10)
    share = count / (200 * 5)
    assert (share - 0.3).abs().max() < 5 * math.sqrt(0.21 / 1000)
    assert len(rows) > 100
    shared = ltd_of(start(section(per_sample=False))).positions(0, Clock(), 5, 10, 3)
    assert (shared == shared[0]).all()


def test_ranks_along_other_axes_keep_the_same_tokens() -> None:
    options = DataEfficiencyConfig.model_validate(section()["data_efficiency"]).data_routing.random_ltd

    def part(rank: int, batch_rank: int) -> RandomLTD:
        told = Environment(config=None, rank=rank, world_size=4, batch_rank=batch_rank, batch_ranks=2)
        found = RandomLTD(options, told, seed=1)
        found.prepare(Tiny(4), None)
        return found

    where = [part(rank, rank // 2).positions(0, Clock(3, 1), 4, 20, 6) for rank in range(4)]
    assert torch.equal(where[0], where[1])
    assert torch.equal(where[2], where[3])
    assert not torch.equal(where[0], where[2])


def test_a_masked_and_a_causal_model_agree() -> None:
    # The mask that is cut to the kept tokens is the causal mask of the kept tokens.
    def run(masked: bool) -> dict[str, torch.Tensor]:
        engine = start(section(), model=Tiny(4, masked=masked))
        for _ in range(4):
            engine.train_batch()
        return weights(engine)

    one, other = run(False), run(True)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [0, 3])
def test_ranks_and_resuming(number: int, tmp_path: Path) -> None:
    changes = {**section(), **stage(number)}

    def job(rank: int) -> tuple[torch.Tensor, list[float], list[float], bool, dict[str, torch.Tensor]]:
        engine = start(changes)
        losses = []
        for step in range(6):
            losses.append(float(engine.train_batch()))
            if step == 2:
                engine.save_checkpoint(tmp_path)
        again = start(changes)
        again.load_checkpoint(tmp_path)
        more = [float(again.train_batch()) for _ in range(3)]
        one, other = weights(engine), weights(again)
        where = ltd_of(engine).positions(0, Clock(), 4, 100, 5)
        return where, losses[3:], more, all(torch.equal(one[n], other[n]) for n in one), one

    first, second = sim.run(2, job)
    assert not torch.equal(first[0], second[0])  # data-parallel ranks drop other tokens
    for _, losses, more, same, _ in (first, second):
        assert losses == more
        assert same


def test_all_stages_compute_the_same() -> None:
    def of(number: int) -> dict[str, torch.Tensor]:
        def job(rank: int) -> dict[str, torch.Tensor]:
            engine = start({**section(), **stage(number)})
            for _ in range(4):
                engine.train_batch()
            return weights(engine)

        return sim.run(2, job)[0]

    whole, split = of(0), of(3)
    assert all(torch.equal(whole[name], split[name]) for name in whole)


def test_all_tokens_kept_changes_nothing() -> None:
    def run(changes: dict[str, Any]) -> dict[str, torch.Tensor]:
        engine = start(changes)
        for _ in range(3):
            engine.train_batch()
        return weights(engine)

    plain, changed = run({}), run(section(8, 8))
    assert all(torch.equal(plain[name], changed[name]) for name in plain)


def test_with_layer_drop() -> None:
    pld = {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 1.0}}
    engine = start({**section(2, 2), **pld})
    for _ in range(6):
        engine.train_batch()
    part = engine.parts["progressive_layer_drop"]
    assert all(seen == (4, 2, WIDTH) for block in list(engine.module.blocks)[1:3] for seen in block.seen)
    assert part.executed[0] == [n for n in range(4) if part.keeps(n, Clock(step=5))]
    engine.destroy()
    assert all("_call_impl" not in block.__dict__ for block in engine.module.blocks)


# -- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_are_cut_by_their_shape() -> None:
    samples, tokens, kept = 2, 5, 3
    where = torch.tensor([[0, 2, 4], [1, 2, 3]])
    x = torch.arange(samples * tokens).reshape(samples, tokens)

    def of(tensor: torch.Tensor, **more: Any) -> torch.Tensor:
        return gathered(tensor, where, tokens, shared=False, **more)

    assert of(x).tolist() == [[0, 2, 4], [6, 7, 8]]
    assert of(x[:1]).tolist() == [[0, 2, 4], [1, 2, 3]]  # (1, T) positions
    assert of(x[:, None, None, :])[:, 0, 0].tolist() == [[0, 2, 4], [6, 7, 8]]
    assert of(x[:, :, None].expand(2, 5, 7)).shape == (samples, kept, 7)
    assert of(x[:, None, :, None].expand(2, 3, 5, 6))[1, 2, :, 4].tolist() == [6, 7, 8]
    square = torch.arange(25).reshape(1, 5, 5)
    expected = torch.stack([square[0][w][:, w] for w in where])
    assert torch.equal(of(square), expected)
    assert torch.equal(of(square[:, None])[:, 0], expected)
    heads = square.expand(6, 5, 5) + 100 * torch.arange(6).reshape(6, 1, 1)
    assert torch.equal(of(heads)[3:], torch.stack([heads[h][where[1]][:, where[1]] for h in (3, 4, 5)]))
    assert of(torch.ones(2, 9)).shape == (2, 9)
    for lost in (square[0], torch.arange(5), torch.ones(5, 7)):
        with pytest.raises(ValueError, match="per_sample to false"):
            of(lost)
    row = where[:1].expand(2, 3)
    assert torch.equal(gathered(square[0], row, tokens, shared=True), square[0][where[0]][:, where[0]])
    assert gathered(torch.arange(5), row, tokens, shared=True).tolist() == [0, 2, 4]
    assert gathered(x.t(), where, tokens, shared=False, batch_first=False).t().tolist() == [[0, 2, 4], [6, 7, 8]]
    both = torch.arange(25).reshape(5, 5)  # as many samples as tokens: the name says that it is a mask
    wide = torch.arange(3).expand(5, 3)
    assert gathered(both, wide, 5, shared=False, is_mask=True).tolist() == both[:, :3].tolist()


def test_layers_of_torch_with_sequences_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(3))
            self.seen: list[int] = []
            self.layers[1].linear1.register_forward_hook(lambda m, a, o: self.seen.append(a[0].shape[0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0])
            padding = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool)
            for layer in self.layers:
                x = layer(x, src_mask=mask, src_key_padding_mask=padding, is_causal=True)
            return F.mse_loss(x, torch.zeros_like(x))

    order = {"hidden_state_order": "seq_batch_dim", "per_sample": False}
    engine = start(section(4, 4, **order), model=Model(), training_data=None)
    for _ in range(2):
        engine.train_batch(iter([torch.randn(6, 4, 8)]))
    assert engine.module.seen == [4, 4]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"total_layer_num": 5}, "the model has 4 blocks"),
        ({"random_ltd_layer_num": 3}, "2 blocks drop tokens"),
        ({"random_ltd_layer_id": [1, 4]}, r"random_ltd_layer_id = \[1, 4\] of 4 blocks"),
        ({"random_ltd_layer_id": [2, 1]}, "in order, each once"),
        ({"random_ltd_layer_id": [1], "random_ltd_layer_num": 2}, "random_ltd_layer_id has 1 blocks"),
        ({"random_ltd_schedule": {"schedule_config": {"require_steps": 3}}}, "lacks 'seq_per_step'"),
        ({"layer_token_lr_schedule": {"enabled": True}}, "rates do not follow tokens"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=sentence):
        start(section(**changes))
