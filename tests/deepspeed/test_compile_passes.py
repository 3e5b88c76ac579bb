"""Contracts and schedules of compiler passes under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.compile.backend import register_compile_pass
from zoo.deepspeed.compile.passes import contract, offload_adam_states, prefetch, zero3_compile
from zoo.deepspeed.compile.passes.contract import (
    CAP_Z3_GATHER_RELEASE,
    PassContract,
    PassContractError,
    get_pass_contract,
    register_pass_contract,
    validate_schedule,
)

import zoo.deepspeed as deepspeed
from zoo.deepspeed.adapters.utilities.compile_passes import translated


@pytest.fixture(autouse=True)
def _no_contracts() -> Any:
    before = dict(contract._pass_contracts)
    contract._pass_contracts.clear()
    yield
    contract._pass_contracts.clear()
    contract._pass_contracts.update(before)


def test_what_a_pass_requires_comes_before_it_in_the_same_list() -> None:
    register_pass_contract(zero3_compile.NAME, zero3_compile.CONTRACT)
    register_pass_contract(prefetch.NAME, prefetch.CONTRACT)
    validate_schedule([(0, ["zero3_compile"]), (5, ["zero3_compile", "anything", "prefetch"])])
    for passes in (["prefetch"], ["prefetch", "zero3_compile"]):
        with pytest.raises(PassContractError, match=f"'prefetch' of update 5 requires {CAP_Z3_GATHER_RELEASE}"):
            validate_schedule([(0, ["zero3_compile"]), (5, passes)])
    register_pass_contract("prefetch", None)
    assert get_pass_contract("prefetch") is None
    validate_schedule([(0, ["prefetch"])])


def test_a_conflict_counts_in_both_orders_and_of_passes_without_a_contract() -> None:
    register_pass_contract("a", PassContract(conflicts_with=frozenset({"b"})))
    for passes in (["a", "b"], ["b", "a"]):
        with pytest.raises(PassContractError, match=r"conflicts with .* in the same list"):
            validate_schedule([(0, passes)])
    validate_schedule([(0, ["a"]), (1, ["b"])])
    register_pass_contract(offload_adam_states.NAME_SYNC, offload_adam_states.CONTRACT_SYNC)
    with pytest.raises(PassContractError, match="conflicts"):
        validate_schedule([(0, ["offload_adam_states_sync", "zero2_compile"])])


def test_functions_are_found_by_their_names() -> None:
    register_pass_contract("first", PassContract(provides=frozenset({"x"})))
    register_pass_contract("second", PassContract(requires=frozenset({"x"})))

    def one() -> None: ...

    def other() -> None: ...

    validate_schedule([(0, [one, other])], {"first": one, "second": other})
    with pytest.raises(PassContractError, match="requires x"):
        validate_schedule([(0, [other])], {"second": other})
    with pytest.raises(PassContractError, match="under multiple names, first, third"):
        validate_schedule([(0, [one])], {"first": one, "third": one})


def test_schedules_of_deepspeed_are_those_of_zoos_passes() -> None:
    schedule = [(0, ["zero3_compile"]), (5, ["zero3_compile", "prefetch", "selective_gather", "mine"])]
    default = ["downcast", "keep", "place"]
    assert translated(schedule) == [(0, default), (5, [*default, "mine"])]
    assert translated([(0, ["zero1_compile"]), (9, ["zero2_compile"])]) == [(0, default), (9, default)]
    assert translated(None) is None
    with pytest.raises(NotImplementedError, match="offload_optimizer and offload_param"):
        translated([(0, ["zero3_compile", "offload_parameters"])])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_without_gathers_are_graphs_too(stage: int) -> None:
    """DeepSpeed's own schedule of a stage, with the losses of a run that is not compiled."""
    document = {
        "train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage}, "compile": {"deepcompile": True},
    }  # fmt: skip
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        engine, *_ = deepspeed.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), config=document)
        if compiles:
            engine.compile(backend="aot_eager", schedule=[(0, [f"zero{stage}_compile"])])
        for _ in range(3):
            loss = engine(torch.ones(4, 4)).sum()
            engine.backward(loss)
            engine.step()
            found.append(float(loss))
        engine.destroy()
    assert found[:3] == found[3:]


@pytest.mark.slow
def test_an_engine_runs_a_registered_pass_of_the_schedule() -> None:
    seen = []

    def counts(graph: Any, plan: Any) -> Any:
        seen.append(plan.backward)
        return graph

    torch.manual_seed(0)
    document = {
        "train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3},
        "compile": {"deepcompile": True},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), config=document)
    engine.register_compile_pass("counts", counts, PassContract(conflicts_with=frozenset({"nothing"})))
    engine.compile(backend="aot_eager", schedule=[(0, ["zero3_compile", "counts"])])
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    assert seen
    with pytest.raises(NotImplementedError, match="called with a graph and a plan"):
        register_compile_pass("theirs", lambda gm, graph_id, order, results, create, budget, manager, bwd: gm)
    engine.destroy()
