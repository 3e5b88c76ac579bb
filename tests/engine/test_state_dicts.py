"""Whole state_dicts: a user's own function that loads them, what the engine returns, and what it takes back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_engine import net, stage, start
from tests.engine.test_partial_loads import States, differs, states
from torch import nn

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.engine import initialize

HALF = {"bf16": {"enabled": True}}


def make(number: int, half: bool, noise: float = 1e-30, **options: Any) -> Any:
    section = {**stage(number)["zero_optimization"], **options}
    return start(
        {"zero_optimization": section, "scheduler": None, "train_batch_size": 24, **(HALF if half else {})}, noise
    )


def steps(engine: Any, count: int, half: bool) -> None:
    dice = torch.Generator().manual_seed(engine.batch_rank)
    for _ in range(count):
        x = torch.randn(4, 5, generator=dice).to(torch.bfloat16 if half else torch.float32)
        engine.backward(engine(x, x.sum(1, keepdim=True)))
        engine.step()


def whole(engine: Any, role: str = "parameter") -> dict[str, torch.Tensor]:
    """A state in fp32, whole on every rank."""
    shapes = {s.name: s.shape for s in engine.optimizer.state_slices()}
    mine = [(s.name, s.start, s.tensor.clone()) for s in engine.optimizer.state_slices() if s.role == role]
    parts = engine.comm.all_gather_object((shapes, mine))
    found = {name: torch.zeros(shape).flatten() for known, _ in parts for name, shape in known.items()}
    for _, pieces in parts:
        for name, begin, values in pieces:
            found[name][begin : begin + len(values)] = values.float()
    every = {name: shape for known, _ in parts for name, shape in known.items()}
    return {name: values.view(every[name]) for name, values in found.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


placements = st.tuples(st.integers(1, 3), st.integers(0, 3))


@given(placements, placements, st.booleans())
def test_a_function_that_loads_everything_is_loading(first: Any, second: Any, half: bool) -> None:
    (world, number), (other, another) = first, second
    with tempfile.TemporaryDirectory() as folder:

        def save(rank: int) -> None:
            engine = make(number, half)
            steps(engine, 2, half)
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()

        sim.run(world, save)

        def job(rank: int) -> None:
            plain, custom = make(another, half), make(another, half)
            calls = []

            def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
                calls.append(sorted(src))
                dst.load_state_dict(src)

            steps(custom, 1, half)
            plain.load_checkpoint(folder)
            custom.load_checkpoint(folder, custom_load_fn=load)
            assert calls == [sorted(net().state_dict())]
            assert not differs(states(custom), states(plain), parameters=True)
            assert not differs(states(custom), states(plain), parameters=False)
            assert custom.optimizer.state_scalars() == plain.optimizer.state_scalars()
            for name, buffer in plain.module.named_buffers():  # of each rank its own, at the same world size
                assert torch.equal(custom.module.get_buffer(name), buffer)
            assert custom.global_steps == 2
            steps(plain, 2, half)
            steps(custom, 2, half)
            assert not differs(states(custom), states(plain), parameters=True)

        sim.run(other, job)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("only", [False, True])
def test_what_the_function_writes_is_what_counts(tmp_path: Path, number: int, half: bool, only: bool) -> None:
    def load(src: dict[str, torch.Tensor], dst: Any) -> None:
        dst.second.weight.copy_(src["second.weight"] * 2)
        dst.first.load_state_dict({k.removeprefix("first."): v for k, v in src.items() if k.startswith("first.")})

    def job(rank: int) -> None:
        saved = make(number, half)
        steps(saved, 2, half)
        saved.save_checkpoint(tmp_path)
        masters, moments = whole(saved), whole(saved, "exp_avg")
        engine = make(number, half)
        steps(engine, 5, half)
        mine, own = whole(engine), whole(engine, "exp_avg")
        engine.load_checkpoint(tmp_path, custom_load_fn=load, load_module_only=only)
        now = whole(engine)
        dtype = torch.bfloat16 if half else torch.float32
        assert torch.equal(now["second.weight"], (masters["second.weight"] * 2).to(dtype).float())
        assert torch.equal(now["first.weight"], masters["first.weight"])  # the master, not what it rounds to
        assert torch.equal(now["second.bias"], mine["second.bias"]) or half  # not written
        assert torch.equal(now["second.bias"].to(dtype), mine["second.bias"].to(dtype))
        assert same(whole(engine, "exp_avg"), own if only else moments)
        assert engine.global_steps == (5 if only else 2)
        steps(engine, 2, half)

    sim.run(2, job)


@pytest.mark.parametrize("number", [1, 3])
def test_a_model_of_other_names_and_shapes(tmp_path: Path, number: int) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def load(src: dict[str, torch.Tensor], dst: Any) -> None:
        dst.first.weight.copy_(src["first.weight"])
        dst.first.bias.copy_(src["first.bias"])
        dst.head.weight[0].copy_(src["second.weight"][0])

    def job(rank: int) -> None:
        saved = make(number, False)
        steps(saved, 2, False)
        saved.save_checkpoint(tmp_path)
        torch.manual_seed(7)
        engine = initialize({"train_batch_size": 2, "optimizer": {"type": "AdamW"}, **stage(number)}, Renamed())[0]
        before, moments = whole(engine), whole(saved, "exp_avg")
        with pytest.raises(CheckpointError, match="'head"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, custom_load_fn=load, load_lr_scheduler_states=False)
        now, masters = whole(engine), whole(saved)
        assert torch.equal(now["first.weight"], masters["first.weight"])
        assert torch.equal(now["head.weight"][0], masters["second.weight"][0])
        assert torch.equal(now["head.weight"][1:], before["head.weight"][1:])
        assert torch.equal(whole(engine, "exp_avg")["first.weight"], moments["first.weight"])
        assert not whole(engine, "exp_avg")["head.weight"].any()

    sim.run(2, job)


@pytest.mark.parametrize("number", [0, 3])
def test_an_exception_in_the_function_changes_no_parameter(tmp_path: Path, number: int) -> None:
    def job(rank: int) -> None:
        engine = make(number, False)
        steps(engine, 1, False)
        engine.save_checkpoint(tmp_path)
        steps(engine, 2, False)
        before = states(engine)

        def load(src: dict[str, torch.Tensor], dst: Any) -> None:
            dst.first.weight.copy_(src["first.weight"])
            if rank == 1:
                raise KeyError("no such head")

        with pytest.raises((KeyError, RuntimeError), match="no such head"):
            engine.load_checkpoint(tmp_path, custom_load_fn=load)
        now = states(engine)
        assert all(torch.equal(now[place], before[place]) for place in before)
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 1
        with pytest.raises(ValueError, match=r"custom_load_fn is a str; it is called as custom_load_fn\(src="):
            engine.load_checkpoint(tmp_path, custom_load_fn="load" if rank else load)  # type: ignore[arg-type]

    sim.run(2, job)


def test_an_engine_that_evaluates_takes_a_function_too(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        saved = make(3, False)
        steps(saved, 2, False)
        saved.save_checkpoint(tmp_path)
        engine = initialize({"train_batch_size": 2, **stage(3)}, net())[0]
        engine.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: dst.load_state_dict(src))
        found = engine.module_state_dict()
        assert all(torch.equal(found[name], value) for name, value in whole(saved).items())
        assert int(found["norm.num_batches_tracked"]) == 2

    sim.run(2, job)


# -- masters out of 16-bit weights ------------------------------------------------------------------------------------


@given(placements, placements, st.booleans())
def test_masters_of_16_bit_weights_are_these_weights(first: Any, second: Any, states_too: bool) -> None:
    (world, number), (other, another) = first, second
    with tempfile.TemporaryDirectory() as folder:

        def save(rank: int) -> dict[str, torch.Tensor]:
            engine = make(number, True)
            steps(engine, 2, True)
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
            return whole(engine)

        masters = sim.run(world, save)[0]

        def job(rank: int) -> None:
            exact, coarse = make(another, True), make(another, True, load_from_fp32_weights=False)
            for engine in (exact, coarse):
                engine.load_checkpoint(folder, load_optimizer_states=states_too)
            assert same(whole(exact), masters)
            assert same(whole(coarse), {name: value.bfloat16().float() for name, value in masters.items()})
            assert not same(whole(coarse), masters)
            assert same(whole(coarse, "exp_avg"), whole(exact, "exp_avg"))
            for name, weight in exact.module_state_dict().items():
                assert torch.equal(coarse.module_state_dict()[name], weight)
                assert weight.dtype is torch.bfloat16 or name.startswith("norm")

        sim.run(other, job)


# -- what the engine returns, and takes back --------------------------------------------------------------------------


@given(placements, st.booleans(), st.booleans())
def test_a_state_dict_goes_out_and_comes_back(placement: tuple[int, int], half: bool, frozen: bool) -> None:
    world, number = placement

    def job(rank: int) -> None:
        torch.manual_seed(0)
        model = net(0.5)
        model.first.bias.requires_grad_(not frozen)
        config = {"train_batch_size": 4 * world, "optimizer": {"type": "AdamW"}, **(HALF if half else {})}
        engine = initialize({**config, **stage(number)}, model)[0]
        steps(engine, 2, half)
        found, masters = engine.module_state_dict(), whole(engine)
        assert list(found) == list(net().state_dict())
        assert all(found[name].dtype is (torch.bfloat16 if half else torch.float32) for name in masters)
        assert all(
            torch.equal(found[name].float(), value.to(found[name].dtype).float()) for name, value in masters.items()
        )
        kept = engine.module_state_dict(exclude_frozen_parameters=True)
        assert set(found) - set(kept) == ({"first.bias"} if frozen else set())
        alone = net(0.5)
        alone.load_state_dict(found)  # an ordinary model's
        moments = whole(engine, "exp_avg")
        engine.load_module_state_dict(found)
        assert same(whole(engine), masters)  # what came from here changes nothing
        steps(engine, 2, half)
        assert not same(whole(engine), masters)
        engine.load_module_state_dict({"module": {**found, **masters}}, fetch_z3_params=True)
        assert same(whole(engine), masters)
        assert not same(whole(engine, "exp_avg"), moments)
        assert engine.global_steps == 4
        assert torch.equal(engine.module.norm.running_mean.float(), found["norm.running_mean"].float())
        changed = {name: value + 1 for name, value in found.items() if name in masters}
        engine.load_module_state_dict(found, custom_load_fn=lambda src, dst: dst.load_state_dict(changed, strict=False))
        assert same(whole(engine), {name: changed[name].float() for name in masters})

    sim.run(world, job)


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        engine = make(3, False)
        found = engine.module_state_dict()
        before: States = states(engine)
        with pytest.raises(CheckpointError, match=r"the state_dict has head, which the model lacks; strict=False"):
            engine.load_module_state_dict({**found, "head": torch.ones(2)})
        with pytest.raises(CheckpointError, match=r"'first\.weight' has shape \(7, 5\); .* no such tensor"):
            engine.load_module_state_dict({k: v for k, v in found.items() if k != "first.weight"})
        with pytest.raises(CheckpointError, match=r"a int under 'first\.bias', where a tensor must be"):
            engine.load_module_state_dict({**found, "first.bias": 3} if rank else found)
        with pytest.raises(CheckpointError, match="it takes a state_dict, the path of a checkpoint, or None"):
            engine.load_module_state_dict([1])  # type: ignore[arg-type]
        now = states(engine)
        assert all(torch.equal(now[place], before[place]) for place in before)
        engine.load_module_state_dict({"first.bias": torch.ones(7), "head": torch.ones(2)}, strict=False)
        assert whole(engine)["first.bias"].tolist() == [1.0] * 7
        assert torch.equal(whole(engine)["first.weight"], found["first.weight"])
        with pytest.raises(ValueError, match="neither saved nor loaded a checkpoint"):
            engine.load_module_state_dict(None)
        path = engine.save_checkpoint(tmp_path)
        for place in (None, path):
            engine.load_module_state_dict(found)
            engine.load_module_state_dict(place)
            assert whole(engine)["first.bias"].tolist() == [1.0] * 7

    sim.run(2, job)


def test_a_tied_parameter_is_there_under_all_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    def job(rank: int) -> None:
        engine = initialize({"train_batch_size": 2, "optimizer": {"type": "AdamW"}, **stage(3)}, Tied())[0]
        found = engine.module_state_dict()
        assert list(found) == ["a.weight", "a.bias", "b.weight", "b.bias"]
        assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()
        del found["a.weight"]
        engine.load_module_state_dict({**found, "b.weight": torch.ones(3, 3)})
        assert bool((whole(engine)["a.weight"] == 1).all())

    sim.run(2, job)


@pytest.mark.parametrize("stage", [0, 3])
def test_complex_numbers_do_not_become_their_real_parts(stage: int) -> None:
    engine = start({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
    state = engine.module_state_dict()
    name = next(iter(state))
    wrong = {**state, name: torch.complex(state[name].float(), torch.ones_like(state[name].float()))}
    with pytest.raises(ValueError, match=rf"{name}.*complex numbers there"):
        engine.load_module_state_dict(wrong)
    assert all(torch.equal(value, state[key]) for key, value in engine.module_state_dict().items())
