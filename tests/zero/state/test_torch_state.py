"""torch.distributed.checkpoint.state_dict with ZeRO optimizers: what is got from one goes into any other."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.zero.blocks import STAGES, Blocks, data, one_step
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import zoo.optim
from zoo import sim
from zoo.zero import Precision, ZeroOptimizer

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": torch.optim.AdamW, "weight_decay": 0.1},
    "momentum": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "SGD": {"optimizer": torch.optim.SGD},
    "masters": {"optimizer": torch.optim.AdamW, "precision": Precision(param=torch.bfloat16)},
    "own masters": {"optimizer": zoo.optim.AdamW, "precision": Precision(param=torch.bfloat16)},
    "NAdam": {"optimizer": torch.optim.NAdam},
    "whole": {"optimizer": zoo.optim.Lamb},
}
FULL = StateDictOptions(full_state_dict=True)


def make(stage: int, kind: str, *, seed: int = 0, **options: Any) -> tuple[Blocks, ZeroOptimizer]:
    model = Blocks()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(seed)
    groups = [{"params": list(model.blocks.parameters())}, {"params": [*model.first.parameters()], "lr": 0.02}]
    groups += [{"params": list(model.last.parameters())}]
    size = 1 if stage % 2 else 60
    given_ = {"lr": 0.05, "param_persistence_threshold": 0, "reduce_bucket_size": size, **OPTIMIZERS[kind], **options}
    return model, ZeroOptimizer(model, stage=stage, params=groups, **given_)


def step(model: Any, optimizer: ZeroOptimizer, rank: int, number: int) -> None:
    optimizer.backward(model(data(rank, number).float()).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def slices(optimizer: ZeroOptimizer) -> dict[Any, torch.Tensor]:
    return {(s.role, s.name, s.start, s.length): s.tensor.clone() for s in optimizer.held_slices(owned=True)}


def same(a: ZeroOptimizer, b: ZeroOptimizer) -> None:
    """Parameters, masters, states and numbers, bit by bit, of two optimizers with one layout."""
    left, right = slices(a), slices(b)
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key
    assert a.state_scalars() == b.state_scalars()


def whole(optimizer: ZeroOptimizer, rank: int) -> dict[Any, torch.Tensor]:
    """All elements by role and name, of any layout, on every rank."""
    found: dict[Any, torch.Tensor] = {}
    for theirs in optimizer.comm.all_gather_object(
        [(s.role, s.name, s.start, s.shape, s.tensor.clone()) for s in optimizer.held_slices(owned=True)]
    ):
        for role, name, start, shape, tensor in theirs:
            out = found.setdefault(
                (role, name), torch.full((torch.Size(shape).numel(),), float("nan"), dtype=tensor.dtype)
            )
            out[start : start + tensor.numel()] = tensor
    return found


def plain(value: Any) -> Any:
    """What ranks of another job can read: copies."""
    return copy.deepcopy(value)


@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)), first=st.sampled_from(STAGES), second=st.sampled_from(STAGES),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)), steps=st.integers(0, 2),
    full=st.booleans(), offload=st.booleans(), flat=st.booleans(),
)  # fmt: skip
def test_what_is_got_from_one_goes_into_any_other(
    kind: str, first: int, second: int, worlds: tuple[int, int], steps: int, full: bool, offload: bool, flat: bool
) -> None:
    # torch itself cannot set full states that have no tensor ("Expected device to be set"), nor full flat ones.
    whole_set = kind != "SGD" and not flat
    options = StateDictOptions(full_state_dict=True, cpu_offload=full, flatten_optimizer_state_dict=flat)
    offloaded = {"offload_optimizer": {"device": "cpu"}} if offload and second else {}

    def save(rank: int) -> Any:
        model, optimizer = make(first, kind)
        for number in range(steps):
            step(model, optimizer, rank, number)
        state, states = get_state_dict(model, optimizer, options=options)
        got = plain((state, states)), whole(optimizer, rank), optimizer.state_scalars()
        assert (not state) == (full and rank > 0)
        return got

    saved = sim.run(worlds[0], save)
    (state, states), expected, _ = saved[0]

    def load(rank: int) -> None:
        model, optimizer = make(second, kind, seed=1, **offloaded)
        step(model, optimizer, rank, 9) if steps != 1 else None  # states are there, or not
        set_state_dict(
            model, optimizer, model_state_dict=plain(state), optim_state_dict=plain(states),
            options=StateDictOptions(full_state_dict=whole_set, flatten_optimizer_state_dict=flat),
        )  # fmt: skip
        found = whole(optimizer, rank)
        assert found.keys() == expected.keys()  # before the first step there are no states, here neither
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        # Beside one that zoo's own way has brought to the same state.
        other_model, other = make(second, kind, seed=2, **offloaded)
        scalars = {k: v for _, _, theirs in saved for k, v in theirs.items()}
        other.load_state(lambda name, role, start, n: expected[role, name][start : start + n], scalars)
        for number in range(3, 5):
            step(model, optimizer, rank, number)
            step(other_model, other, rank, number)
        same(optimizer, other)

    sim.run(worlds[1], load)


# What the functions of torch touch ------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "masters"])
def test_states_that_are_looked_for_before_the_first_step_change_nothing(stage: int, kind: str) -> None:
    """Torch makes a step of zero gradients where ``optimizer.state`` is empty."""

    def fn(rank: int) -> None:
        model, optimizer = make(stage, kind)
        memory = optimizer.memory()["optimizer"]
        assert optimizer.state
        for parameter, states in optimizer.state.items():
            assert all(states[role] == 0 for role in states if role == "step")
            assert ("exp_avg" in states) == (kind != "SGD")
            assert parameter in optimizer.state
        before = slices(optimizer)
        got = get_optimizer_state_dict(model, optimizer)
        assert all(entry["step"] == 0 and not entry["exp_avg"].any() for entry in got["state"].values() if entry)
        get_model_state_dict(model)
        after = slices(optimizer)
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in before.items())
        assert not optimizer.inner.state or "master" in next(iter(optimizer.inner.state.values()))
        assert optimizer.memory()["optimizer"] == memory
        other_model, other = make(stage, kind)
        for number in range(2):
            step(model, optimizer, rank, number)
            step(other_model, other, rank, number)
        same(optimizer, other)

    sim.run(2, fn)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_states_that_are_split_are_rows_of_dtensors(stage: int) -> None:
    def fn(rank: int) -> None:
        from torch.distributed.tensor import DTensor, Shard

        model, optimizer = make(stage, "AdamW")
        step(model, optimizer, rank, 0)
        state, states = get_state_dict(model, optimizer)
        full_state, full_states = get_state_dict(model, optimizer, options=FULL)
        assert list(state) == list(full_state) == [name for name, _ in model.named_parameters()]
        for name, value in state.items():
            assert isinstance(value, DTensor) == (stage == 3)
            moment, whole_moment = states["state"][name]["exp_avg"], full_states["state"][name]["exp_avg"]
            assert isinstance(moment, DTensor) == (stage > 0)
            if isinstance(moment, DTensor):
                rows = whole_moment.shape[0]
                assert moment.placements == (Shard(0),)
                assert torch.equal(moment.to_local(), whole_moment.chunk(3)[rank] if rank < rows else whole_moment[:0])
            assert not isinstance(full_state[name], DTensor)
        # As they are they go into another one, of another stage.
        for other_stage in (0, 1, 3):
            again, other = make(other_stage, "AdamW", seed=1)
            set_state_dict(again, other, model_state_dict=dict(state), optim_state_dict=states)
            step(again, other, rank, 1)
            if other_stage == 3:
                step(model, optimizer, rank, 1)
                for key, value in whole(optimizer, rank).items():
                    assert torch.equal(value, whole(other, rank)[key])

    sim.run(3, fn)


def test_what_rank_0_has_is_broadcast() -> None:
    def fn(rank: int) -> None:
        model, optimizer = make(2, "AdamW")
        step(model, optimizer, rank, 0)
        state, states = get_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        assert bool(state) == bool(states) == (rank == 0)
        again, other = make(3, "AdamW", seed=1)
        everyone = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(again, state, options=everyone)
        set_optimizer_state_dict(again, other, states, options=everyone)
        expected = whole(optimizer, rank)
        assert all(torch.equal(value, expected[key]) for key, value in whole(other, rank).items())

    sim.run(2, fn)


def test_strict_is_torchs() -> None:
    def fn(rank: int) -> None:
        model, _kept = make(3, "AdamW")
        state = dict(get_model_state_dict(model, options=FULL))
        value = state.pop("last.bias")
        again, other = make(3, "AdamW", seed=1)
        with pytest.raises(RuntimeError, match=r"Missing key.*last\.bias"):
            set_model_state_dict(again, dict(state), options=StateDictOptions(strict=True))
        found = set_model_state_dict(again, dict(state), options=StateDictOptions(strict=False))
        assert found.missing_keys == ["last.bias"]
        parameters = other.consolidated_parameters()
        assert torch.equal(parameters["last.bias"], value + 1)
        assert torch.equal(parameters["first.weight"], state["first.weight"])

    sim.run(2, fn)


def test_a_plain_optimizer_and_a_zero_one_exchange_states() -> None:
    def fn(rank: int) -> None:
        plain_model = Blocks().double()
        plain_one = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
        for number in range(2):
            for other in range(2):
                (plain_model(data(other, number)).square().mean() / 2).backward()
            plain_one.step()
            plain_one.zero_grad()
        model = Blocks().double()
        optimizer = ZeroOptimizer(model, stage=3, optimizer=torch.optim.AdamW, lr=0.2, param_persistence_threshold=0)
        set_model_state_dict(model, plain_model.state_dict())
        optimizer.load_state_dict(plain_one.state_dict())  # by position, as torch's own are
        assert optimizer.param_groups[0]["lr"] == 0.1
        for key, value in whole(optimizer, rank).items():
            role, name = key
            parameter = dict(plain_model.named_parameters())[name]
            assert torch.equal(
                value, (parameter if role == "parameter" else plain_one.state[parameter][role]).reshape(-1)
            )
        one_step(model, optimizer, rank, 2)
        state, states = get_state_dict(model, optimizer, options=FULL)
        set_state_dict(plain_model, plain_one, model_state_dict=state, optim_state_dict=states)
        assert plain_one.state[plain_model.last.weight]["step"] == 3

    sim.run(2, fn)


# What is refused ------------------------------------------------------------------------------------------------------


def _lacks(states: dict[str, Any]) -> None:
    del states["state"]["last.bias"]["exp_avg_sq"]


def _has_more(states: dict[str, Any]) -> None:
    states["state"]["last.bias"]["momentum_buffer"] = torch.zeros(2)


def _other_shape(states: dict[str, Any]) -> None:
    states["state"]["last.bias"]["exp_avg"] = torch.zeros(3)


def _no_number(states: dict[str, Any]) -> None:
    states["state"]["last.bias"]["step"] = torch.zeros(2)


def _none_of_one(states: dict[str, Any]) -> None:
    states["state"]["last.bias"] = {}


def _unknown(states: dict[str, Any]) -> None:
    states["state"]["lost"] = {}


def _other_group(states: dict[str, Any]) -> None:
    states["param_groups"][0]["params"].append("lost")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_lacks, "lacks 'exp_avg_sq' of 'last.bias', which AdamW keeps"),
        (_has_more, "has 'momentum_buffer' of 'last.bias', which AdamW does not keep"),
        (_other_shape, r"'exp_avg' of 'last.bias' as \(3,\), and the parameter has the shape \(2,\)"),
        (_no_number, "'step' of 'last.bias', and it is no number"),
        (_none_of_one, "has states of 'blocks.0.weight', and none of 'last.bias'"),
        (_unknown, "has states of 'lost', which is in none of its groups"),
        (_other_group, r"has 7 parameters in param_groups\[0\]; this optimizer has 6"),
    ],
)
def test_states_that_do_not_fit_are_refused_on_all_ranks(change: Any, match: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = make(2, "AdamW")
        step(model, optimizer, rank, 0)
        states = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
        if rank == 1:
            change(states)
        step(model, optimizer, rank, 1)
        before = slices(optimizer)
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict(states)
        assert all(torch.equal(value, before[key]) for key, value in slices(optimizer).items())
        step(model, optimizer, rank, 2)

    sim.run(2, fn)


def test_ranks_that_give_states_of_other_forms_are_told() -> None:
    def fn(rank: int) -> None:
        model, optimizer = make(2, "AdamW")
        step(model, optimizer, rank, 0)
        split, full = (
            get_optimizer_state_dict(model, optimizer),
            get_optimizer_state_dict(model, optimizer, options=FULL),
        )
        with pytest.raises(ValueError, match=r"ranks \[1\] were given other tensors.*broadcast_from_rank0=True"):
            optimizer.load_state_dict(split if rank else full)
        with pytest.raises(ValueError, match=r"ranks \[0\] were given states by parameter"):
            optimizer.load_state_dict(optimizer.state_dict() if rank else full)

    sim.run(2, fn)


def test_states_by_parameter_are_those_of_the_moment() -> None:
    def fn(rank: int) -> None:
        model, optimizer = make(1, "AdamW")
        step(model, optimizer, rank, 0)
        early = optimizer.state_dict()
        assert "state" not in early
        step(model, optimizer, rank, 1)
        with pytest.raises(ValueError, match="parameters have changed since state_dict"):
            early["state"]
        with pytest.raises(KeyError, match="nothing"):
            early["nothing"]
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        optimizer.load_state_dict(torch.load(buffer, weights_only=True))

    sim.run(2, fn)


def test_errors_that_are_fed_back_have_no_place_there() -> None:
    def fn(rank: int) -> None:
        options = {"zero_quantized_gradients": True, "quantized_gradients_feedback": True, "ranks_per_node": 1}
        model, optimizer = make(3, "AdamW", **options)
        with pytest.raises(NotImplementedError, match=r"quantized_gradients_feedback=True.*state_slices\(\)"):
            get_optimizer_state_dict(model, optimizer)

    sim.run(2, fn)


def test_a_rank_alone_is_refused_the_model_at_stage_3() -> None:
    def fn(rank: int) -> None:
        model, optimizer = make(3, "AdamW")
        if rank == 0:
            with pytest.raises(ValueError, match=r"get_model_state_dict.*which all ranks call"):
                model.state_dict()
        with optimizer.gathered():
            assert type(model.state_dict()["last.weight"]) is torch.Tensor
            assert type(get_model_state_dict(model)["last.weight"]) is torch.Tensor
        step(model, optimizer, rank, 0)

    sim.run(2, fn)


def test_states_on_nvme(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
        on_nvme = {"offload_optimizer": nvme, "offload_param": nvme, "optimizer": zoo.optim.AdamW}
        model, optimizer = make(3, "AdamW", **on_nvme)
        step(model, optimizer, rank, 0)
        state, states = get_state_dict(model, optimizer, options=FULL)
        again, other = make(3, "AdamW", seed=1, **on_nvme)
        assert next(iter(other.state.values()))["step"] == 0
        set_state_dict(again, other, model_state_dict=state, optim_state_dict=states, options=FULL)
        for number in range(1, 3):
            step(model, optimizer, rank, number)
            step(again, other, rank, number)
        same(optimizer, other)

    sim.run(2, fn)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda step: step.add_(1),
    "through data": lambda step: step.data.zero_(),
    "through detach": lambda step: step.detach().fill_(3),
    "an index": lambda step: step.__setitem__((), 3),
    "out": lambda step: torch.add(step, 1, out=step),
    "foreach": lambda step: torch._foreach_add_([step], 1),
    "data": lambda step: setattr(step, "data", torch.zeros(())),
    "a view": lambda step: step.view(1).fill_(3),
    "a view of a view": lambda step: step[None].unsqueeze(0).zero_(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_number_of_a_state_is_refused_and_it_is_a_plain_tensor_to_read(write: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = ZeroOptimizer(model, stage=2, optimizer=torch.optim.AdamW)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    step = optimizer.state[model.weight]["step"]
    with pytest.raises(ValueError, match=r"a write to optimizer\.state\[p\]\['step'\] of 'weight'"):
        WRITES[write](step)
    read = optimizer.state[model.weight]["step"]
    assert float(read) == 1.0
    assert type(read + 1) is type(copy.deepcopy(read)) is torch.Tensor


def test_a_number_of_a_state_is_read_under_inference_mode_where_writes_are_refused_too() -> None:
    model = nn.Linear(3, 2)
    optimizer = ZeroOptimizer(model, stage=2, optimizer=torch.optim.AdamW)
    with torch.inference_mode():
        step = optimizer.state[model.weight]["step"]
        assert float(step + 1) == 1.0
        assert repr(step) == "tensor(0.)"
        with pytest.raises(ValueError, match=r"a write to optimizer\.state\[p\]\['step'\] of 'weight'"):
            step.add_(1)
    assert float(torch.detach(input=step)) == 1.0  # what was written is lost, and this object with it
    read = optimizer.state[model.weight]["step"]
    assert torch.equal(torch.vmap(lambda x: x + read)(torch.ones(3)), torch.ones(3))
