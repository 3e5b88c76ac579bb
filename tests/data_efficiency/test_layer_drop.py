"""Progressive layer dropping: which blocks run, what they are multiplied by, what it costs at stage 3."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data_efficiency.tiny import Tiny, data, stage, start, weights
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.config import ConfigError
from zoo.data_efficiency.layer_drop import ProgressiveLayerDrop, keep_probability, theta
from zoo.parts import Clock

PLD: dict[str, Any] = {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 0.5}}


@examples(times=5)
@given(st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 10_000), st.integers(1, 48))
def test_theta_and_keep_probabilities_are_the_paper_s(limit: float, gamma: float, step: int, count: int) -> None:
    value = theta(step, limit=limit, gamma=gamma)
    assert value == pytest.approx((1 - limit) * math.exp(-gamma * step) + limit)
    assert limit <= value <= 1
    kept = [keep_probability(number, count, value) for number in range(count)]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == pytest.approx(value)
    assert sum(kept) == pytest.approx(count - (count + 1) / 2 * (1 - value))


def test_blocks_run_as_often_as_the_probabilities_say() -> None:
    engine = start(PLD)
    part: ProgressiveLayerDrop = engine.parts["progressive_layer_drop"]
    trials = 4000
    for number in range(4):
        kept = sum(part.keeps(number, Clock(step=50, micro_batch=k)) for k in range(trials)) / trials
        expected = keep_probability(number, 4, 0.3)
        assert kept == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / trials) + 1e-9)


def test_the_blocks_that_run_are_those_that_were_drawn() -> None:
    engine = start({**PLD, "gradient_accumulation_steps": 2})
    part: ProgressiveLayerDrop = engine.parts["progressive_layer_drop"]
    skipped = 0
    for step in range(8):
        for block in engine.module.blocks:
            block.seen.clear()
        engine.train_batch()
        drawn = [[n for n in range(4) if part.keeps(n, Clock(step=step, micro_batch=k))] for k in range(2)]
        assert part.executed == drawn
        assert [len(seen) for seen in engine.module.seen()] == [sum(n in ran for ran in drawn) for n in range(4)]
        assert engine.record is not None
        assert engine.record.metrics["progressive_layer_drop/theta"] == theta(step, limit=0.3, gamma=0.5)
        assert engine.record.metrics["progressive_layer_drop/layers"] == sum(map(len, drawn)) / 2
        skipped += 8 - sum(map(len, drawn))
        if step == 0:
            assert skipped == 0
    assert skipped > 10


def test_evaluation_runs_all_blocks_and_so_does_a_forward_that_the_engine_does_not_see() -> None:
    engine, plain = start(PLD), start({})
    for _ in range(6):
        engine.train_batch()
    with torch.no_grad():
        for parameter, other in zip(plain.module.parameters(), engine.module.parameters(), strict=True):
            parameter.copy_(other)
    batch = data()[:4]
    assert torch.equal(engine.eval_batch(batch), plain.eval_batch(batch))
    assert torch.equal(engine.module.train()(*batch), plain.module.train()(*batch))


def test_the_mean_output_and_gradient_are_those_of_the_whole_model() -> None:
    # One block: y = x + G (F(x) - x) / p, so both are linear in G.
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scale * x.sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Linear(), Linear()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.blocks[1](x)
            return h.mean()

    x = torch.linspace(0.1, 2.0, 5, requires_grad=True)
    section = {"enabled": True, "theta": 0.4, "gamma": 100.0}
    model = Model()
    engine = start({"progressive_layer_drop": section, "train_batch_size": 1}, model=model, training_data=None)
    part = engine.parts["progressive_layer_drop"]
    part.load_state_dict({"forms": {"0": None, "1": None}})
    outputs, gradients = [], []
    trials = 600
    for trial in range(trials):
        part.on_batch((x,), {}, Clock(step=1, micro_batch=trial))
        out = model(x)
        (gradient,) = torch.autograd.grad(out, model.blocks[1].scale, allow_unused=True)
        outputs.append(out.item())
        gradients.append(0.0 if gradient is None else float(gradient))
    probability = 0.4  # of the last block, theta having reached its limit
    kept = (x + 0.7 * x.sin() / probability).mean()
    assert {round(v, 4) for v in outputs} == {round(kept.item(), 4), round(x.mean().item(), 4)}
    whole, slope = (x + 0.7 * x.sin()).mean().item(), x.sin().mean().item()
    spread = math.sqrt((1 - probability) / probability / trials)
    assert sum(outputs) / trials == pytest.approx(whole, abs=4 * spread * 0.7 * slope)
    assert sum(gradients) / trials == pytest.approx(slope, abs=4 * spread * slope)


@pytest.mark.parametrize("number", [0, 3])
def test_ranks_and_resuming(number: int, tmp_path: Path) -> None:
    changes = {**PLD, **stage(number)}

    def job(rank: int) -> tuple[list[list[list[int]]], list[float], list[float], bool]:
        engine = start(changes)
        losses, ran = [], []
        for step in range(7):
            losses.append(float(engine.train_batch()))
            ran.append(engine.parts["progressive_layer_drop"].executed)
            if step == 2:
                engine.save_checkpoint(tmp_path)
        again = start(changes)
        again.load_checkpoint(tmp_path)
        more = [float(again.train_batch()) for _ in range(4)]
        one, other = weights(engine), weights(again)
        return ran, losses[3:], more, all(torch.equal(one[n], other[n]) for n in one)

    first, second = sim.run(2, job)
    assert first[0] == second[0]  # all ranks skip the same blocks
    assert any(len(forward) < 4 for step in first[0] for forward in step)
    for _, losses, more, same in (first, second):
        assert losses == more
        assert same


def test_all_stages_compute_the_same() -> None:
    def job(rank: int, number: int) -> dict[str, torch.Tensor]:
        engine = start({**PLD, **stage(number)})
        for _ in range(5):
            engine.train_batch()
        return weights(engine)

    def of(number: int) -> dict[str, torch.Tensor]:
        return sim.run(2, lambda rank: job(rank, number))[0]

    whole, split = of(0), of(3)
    assert all(torch.equal(whole[name], split[name]) for name in whole)


def test_a_block_that_is_left_out_is_not_gathered() -> None:
    early = {"stage3_prefetch_bucket_size": 0}  # a wrong guess of what comes next is a gather too
    section = {"zero_optimization": {**stage(3)["zero_optimization"], **early}}

    def job(rank: int, changes: dict[str, Any]) -> list[tuple[int, int]]:
        engine = start({**section, **changes})
        found = []
        for _ in range(6):
            before = engine.comm.log.ops["all_gather"].count if "all_gather" in engine.comm.log.ops else 0
            engine.train_batch()
            part = engine.parts.get("progressive_layer_drop")
            ran = len(part.executed[0]) if part is not None else 4
            found.append((ran, engine.comm.log.ops["all_gather"].count - before))
        return found

    whole = {gathers for _, gathers in sim.run(2, lambda rank: job(rank, {}))[0][1:]}
    (every_step,) = whole
    for ran, gathers in sim.run(2, lambda rank: job(rank, PLD))[0][1:]:
        assert gathers == every_step - (4 - ran)


def test_theta_one_changes_nothing() -> None:
    def run(changes: dict[str, Any]) -> dict[str, torch.Tensor]:
        engine = start(changes)
        for _ in range(3):
            engine.train_batch()
        return weights(engine)

    plain, changed = run({}), run({"progressive_layer_drop": {"enabled": True, "theta": 1.0}})
    assert all(torch.equal(plain[name], changed[name]) for name in plain)


def test_activation_checkpointing_recomputes_what_ran() -> None:
    class Checkpointed(Tiny):
        reentrant: bool | None = None

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.token(x)
            for block in self.blocks:
                if self.reentrant is None:
                    h = block(h)
                else:
                    h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=self.reentrant)
            return torch.nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    def run(reentrant: bool | None) -> dict[str, torch.Tensor]:
        model = Checkpointed()
        model.reentrant = reentrant
        engine = start(PLD, model=model)
        for _ in range(5):
            batch = next(iter(engine.dataloader))
            loss = engine(*batch)
            with torch.no_grad():  # a look in between is no forward of training: all blocks
                ran = [len(seen) for seen in model.seen()]
                engine(*batch)
                assert [len(seen) for seen in model.seen()] == [count + 1 for count in ran]
            engine.backward(loss)
            engine.step()
        return weights(engine)

    plain = run(None)
    for reentrant in (True, False):
        other = run(reentrant)
        assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_a_model_may_skip_itself() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Tiny(1)
            self.told: list[Any] = []

        def forward(
            self, x: torch.Tensor, y: torch.Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0
        ) -> torch.Tensor:
            self.told.append((progressive_layer_drop, pld_theta))
            loss: torch.Tensor = self.model(x, y)
            return loss

    engine = start(PLD, model=Own())
    for _ in range(3):
        engine.train_batch()
    assert engine.module.told == [(True, theta(step, limit=0.3, gamma=0.5)) for step in range(3)]


def test_blocks_that_return_tuples_and_blocks_by_name() -> None:
    class Tupled(nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.inner, self.extra = nn.Linear(8, 8), extra

        def forward(self, hidden_states: torch.Tensor) -> tuple[Any, ...]:
            return hidden_states + self.inner(hidden_states), self.extra

    class Model(nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.a, self.b = Tupled(extra), Tupled(extra)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (self.a, self.b):
                x, _ = block(hidden_states=x)
            return x.square().mean()

    section = {"progressive_layer_drop": {**PLD["progressive_layer_drop"], "blocks": ["a", "b"]}}
    engine = start(section, model=Model(None), training_data=None)
    for _ in range(6):
        engine.train_batch(iter([torch.ones(4, 8)]))
    assert engine.parts["progressive_layer_drop"]._forms == {0: 2, 1: 2}
    broken = start(section, model=Model(torch.ones(1)), training_data=None)
    with pytest.raises(ValueError, match="returned more"):
        broken.train_batch(iter([torch.ones(4, 8)]))
    with pytest.raises(ValueError, match="no module 'c'"):
        start({"progressive_layer_drop": {**section["progressive_layer_drop"], "blocks": ["c"]}})
    with pytest.raises(ValueError, match="found no repeated blocks"):
        start(PLD, model=Model(None), training_data=None)


def test_copies_and_closed_engines_have_plain_blocks() -> None:
    engine = start(PLD)
    for _ in range(4):
        engine.train_batch()
    batch = data()[:4]
    expected = engine.eval_batch(batch)
    original, pickled = engine.module, None
    copied = copy.deepcopy(original)
    pickled = pickle.loads(pickle.dumps(original))
    for other in (copied, pickled):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.train()
        calls = len(original.blocks[0].seen)
        other(*batch)
        assert len(original.blocks[0].seen) == calls  # the copy runs its own blocks
    assert torch.equal(engine.eval_batch(batch), expected)
    engine.destroy()
    assert all("_call_impl" not in block.__dict__ for block in original.blocks)


def test_one_module_that_is_several_layers_is_refused() -> None:
    model = Tiny()
    first: Any = model.blocks[0]
    model.blocks = nn.ModuleList([first] * 4)
    for names in (None, ["blocks"]):
        changes = {"progressive_layer_drop": {**PLD["progressive_layer_drop"], "blocks": names}}
        with pytest.raises(ValueError, match="progressive_layer_drop: blocks holds one module several times"):
            start(changes, model=model)
    model = Tiny()
    model.activations = nn.Sequential(*[nn.GELU()] * 6)  # no blocks
    start(PLD, model=model)


def test_blocks_that_nobody_calls_are_told() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.used = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out.square().mean()

    engine = start(PLD, model=Aside(), training_data=None)
    with pytest.raises(ValueError, match="none of the 3 blocks was called"):
        engine.train_batch(iter([torch.ones(4, 8)]))


def test_unused_parameters_must_be_allowed() -> None:
    section = {"zero_optimization": {"stage": 1, "ignore_unused_parameters": False}}
    with pytest.raises(ConfigError, match="a block that is skipped has no gradient"):
        start({**PLD, **section})


class Refuses:
    """A part that raises while a batch goes in."""

    after = ("progressive_layer_drop", "data_efficiency")

    def __init__(self) -> None:
        self.now = False

    def on_batch(self, args: Any, kwargs: Any, clock: Any) -> Any:
        if self.now:
            raise ValueError("not this batch")
        return args, kwargs


@pytest.mark.parametrize("method", ["layer_drop", "random_ltd"])
def test_an_evaluation_after_a_forward_that_did_not_come_sees_everything(method: str) -> None:
    routing = {"min_value": 2, "max_value": 8, "schedule_config": {"require_steps": 1000, "seq_per_step": 1}}
    changes: dict[str, Any] = {
        "layer_drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.01, "gamma": 10.0}},
        "random_ltd": {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": True, "random_ltd_schedule": routing}},
            }
        },
    }[method]
    part = Refuses()
    engine = start(changes, parts={"refuses": part})
    engine.train_batch()
    batch = tuple(data()[:4])
    expected = engine.eval_batch(batch)
    for evaluate in (engine.eval_batch, torch.no_grad()(lambda batch: engine(*batch))):
        part.now = True
        with pytest.raises(ValueError, match="not this batch"):
            engine(*batch)
        part.now = False
        assert torch.equal(evaluate(batch), expected)
