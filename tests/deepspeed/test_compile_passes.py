"""Contracts and schedules of compiler passes under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.accelerator import get_accelerator
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
def _same_contracts() -> Any:
    before = dict(contract._pass_contracts)
    yield
    contract._pass_contracts.clear()
    contract._pass_contracts.update(before)


@pytest.fixture
def no_contracts() -> None:
    contract._pass_contracts.clear()


def _nothing(graph: Any, plan: Any) -> Any:
    return graph


def _start(stage: int, **section: Any) -> Any:
    torch.manual_seed(0)
    document = {
        "train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage}, "compile": {"deepcompile": True, **section},
    }  # fmt: skip
    return deepspeed.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), config=document)[0]


@pytest.mark.usefixtures("no_contracts")
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
    def mine(graph: Any, plan: Any) -> Any:
        return graph

    register_compile_pass("mine_of_theirs", mine)
    schedule = [(0, ["zero3_compile"]), (5, ["zero3_compile", "prefetch", "selective_gather", mine])]
    default = ["downcast", "keep", "place"]
    assert translated(schedule, 3) == [(0, default), (5, [*default, "mine_of_theirs"])]
    assert translated([(0, ["zero1_compile"]), (9, ["zero2_compile"])], 1) == [(0, default), (9, default)]
    assert translated([(0, default)], 0) == [(0, default)]
    for given in (["zero3_compile", "offload_parameters"], ["zero3_compile", "offload_activation"]):
        with pytest.raises(NotImplementedError, match="offload_optimizer and offload_param"):
            translated([(0, given)], 3)
    with pytest.raises(ValueError, match=r"a schedule of passes is a list such as .* and no int"):
        translated(5, 3)


def test_a_pass_of_ones_own_may_have_any_name_and_stands_in_the_place_of_theirs() -> None:
    for name in ("offload_mine", "prefetch_mine"):
        register_compile_pass(name, lambda graph, plan: graph)
    found = translated([(0, ["zero3_compile", "offload_mine", "prefetch_mine"])], 3)
    assert found == [(0, ["downcast", "keep", "place", "offload_mine", "prefetch_mine"])]


REQUIRES = PassContract(requires=frozenset({CAP_Z3_GATHER_RELEASE}))
LISTS: dict[str, tuple[PassContract, int, list[str], str]] = {
    "required": (REQUIRES, 3, ["zero3_compile", "own"], ""),
    "required of zoo": (REQUIRES, 3, ["downcast", "keep", "place", "own"], ""),
    "too early": (REQUIRES, 3, ["own", "zero3_compile"], "'own' of update 0 requires z3_gather_release"),
    "never gathered": (REQUIRES, 1, ["zero1_compile", "own"], "'own' of update 0 requires z3_gather_release"),
    "zoo gathers nothing": (REQUIRES, 2, ["keep", "place", "own"], "'own' of update 0 requires z3_gather_release"),
    "conflict": (
        PassContract(conflicts_with=frozenset({"zero3_compile"})), 3, ["zero3_compile", "own"],
        "'own' of update 0 conflicts with zero3_compile",
    ),
    "conflict before": (
        PassContract(conflicts_with=frozenset({"prefetch"})), 3, ["own", "zero3_compile", "prefetch"],
        "'prefetch' of update 0 conflicts with own",
    ),
    "conflict with zoo's": (
        PassContract(conflicts_with=frozenset({"zero3_compile"})), 3, ["keep", "place", "own"],
        "'own' of update 0 conflicts with zero3_compile",
    ),
    "conflict of another stage": (
        PassContract(conflicts_with=frozenset({"zero3_compile"})), 2, ["zero2_compile", "own"], "",
    ),
    "theirs": (PassContract(), 3, ["zero3_compile", "zero1_compile", "own"], "conflicts with zero3_compile"),
    "twice": (PassContract(), 3, ["zero3_compile", "own", "own"], "'own' of update 0 comes twice"),
    "theirs twice": (PassContract(), 3, ["zero3_compile", "zero3_compile"], "'zero3_compile' of update 0 comes twice"),
    "without effect twice": (
        PassContract(), 3, ["zero3_compile", "prefetch", "prefetch"], "'prefetch' of update 0 comes twice",
    ),
    "zoo's twice": (
        PassContract(), 3, ["keep", "zero3_compile"],
        "'keep' of update 0 comes twice: 'zero3_compile' stands for .*keep",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LISTS)
def test_contracts_hold_in_the_schedules_of_an_engine(what: str) -> None:
    its, stage, passes, said = LISTS[what]
    engine = _start(stage)
    engine.register_compile_pass("own", _nothing, its)
    assert get_pass_contract("own") is its
    for given in (passes, [_nothing if name == "own" else name for name in passes]):
        if said:
            with pytest.raises(PassContractError, match=said):
                engine.compile(backend="aot_eager", schedule=[(0, given)])
            assert not engine.is_compiled
        else:
            engine.compile(backend="aot_eager", schedule=[(0, given)])
            assert engine.is_compiled
    engine.destroy()


def test_contracts_hold_in_what_is_said_by_a_configuration() -> None:
    engine = _start(3, passes=["own"])
    engine.register_compile_pass("own", _nothing, PassContract(conflicts_with=frozenset({"zero3_compile"})))
    with pytest.raises(PassContractError, match="'own' of update 0 conflicts with zero3_compile"):
        engine.compile(backend="aot_eager")
    engine.register_compile_pass("own", _nothing, REQUIRES)
    engine.compile(backend="aot_eager")
    engine.engine.compile("aot_eager")  # zoo's own has the same contract
    engine.destroy()
    register_compile_pass("own", _nothing, PassContract(conflicts_with=frozenset({"zero3_compile"})))
    with pytest.raises(PassContractError, match="'own' of update 0 conflicts with zero3_compile"):
        _start(3, passes=["own"], enabled=True, backend="aot_eager")
    register_compile_pass("own", _nothing, REQUIRES)
    engine = _start(3, schedule=[[0, ["own", "zero3_compile"]]])
    with pytest.raises(PassContractError, match="'own' of update 0 requires z3_gather_release"):
        engine.compile(backend="aot_eager")
    engine.destroy()


def test_contracts_of_registered_passes_are_known_and_go_with_the_next_of_that_name() -> None:
    register_compile_pass("own", _nothing, REQUIRES)
    validate_schedule([(0, ["zero3_compile", "own"])])
    validate_schedule([(0, [_nothing])], {"nothing": _nothing})
    with pytest.raises(PassContractError, match="'own' of update 3 requires z3_gather_release"):
        validate_schedule([(0, ["zero3_compile", "own"]), (3, [_nothing])], {"own": _nothing})
    with pytest.raises(PassContractError, match="'prefetch' of update 0 requires z3_gather_release"):
        validate_schedule([(0, ["prefetch"])])
    register_compile_pass("own", _nothing)
    assert get_pass_contract("own") is None
    validate_schedule([(0, ["own"])])


def test_what_is_compiled_is_said() -> None:
    engine = _start(3)
    assert (engine.is_deepcompile_enabled(), engine.is_deepcompile_active(), engine.is_compiled) == (True, False, False)
    engine.compile(backend="aot_eager")
    assert (engine.is_deepcompile_enabled(), engine.is_deepcompile_active(), engine.is_compiled) == (True, True, True)
    engine.destroy()
    assert (engine.is_deepcompile_active(), engine.is_compiled) == (False, False)
    for section in ({"deepcompile": False}, {"deepcompile": False, "enabled": True, "backend": "eager"}):
        engine = _start(0, **section)
        assert engine.is_compiled == ("enabled" in section)
        engine.compile(backend="eager")
        assert (engine.is_deepcompile_enabled(), engine.is_deepcompile_active()) == (False, False)
        assert engine.is_compiled
        engine.destroy()
    engine = _start(0, enabled=True, backend="aot_eager")
    assert (engine.is_deepcompile_active(), engine.is_compiled) == (True, True)
    engine.destroy()


def test_blocks_that_are_compiled_are_said() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    document = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "compile": {"enabled": True, "backend": "eager"}}
    engine, *_ = deepspeed.initialize(model=nn.Sequential(*blocks), config=document)
    assert engine.is_compiled
    engine.destroy()


@pytest.mark.parametrize("deepcompile", [True, False])
def test_the_backend_is_what_was_said_last_and_nearest(deepcompile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(backend: Any = None, **section: Any) -> Any:
        seen: list[Any] = []
        engine = _start(0, deepcompile=deepcompile, **section)
        monkeypatch.setattr(engine.engine, "compile", lambda backend=None, **more: seen.append(backend))
        engine.compile(*(() if backend is None else (backend,)), compile_kwargs={"dynamic": True})
        engine.destroy()
        return seen[0]

    here = get_accelerator()
    before = here.get_compile_backend()
    try:
        assert asked() == "inductor"
        assert asked(backend="aot_eager") == "aot_eager"
        for name in ("eager", "aot_eager"):
            here.set_compile_backend(name)
            assert here.get_compile_backend() == name
            assert asked() == name
        here.set_compile_backend("eager")
    finally:
        here.set_compile_backend(before)


def test_the_backend_of_a_configuration_is_nearer_than_that_of_the_accelerator() -> None:
    here = get_accelerator()
    before = here.get_compile_backend()
    here.set_compile_backend("eager")
    try:
        engine = _start(0, backend="aot_eager")
        engine.compile()
        assert engine.is_deepcompile_active()
        engine.destroy()
        engine = _start(0)
        with pytest.raises(ValueError, match=r"a whole graph has the backend .* not 'eager'"):
            engine.compile()
        engine.destroy()
    finally:
        here.set_compile_backend(before)


def test_a_backend_among_the_arguments_is_not_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = _start(0)
    with caplog.at_level("WARNING", "zoo.deepspeed"):
        engine.compile(backend="aot_eager", compile_kwargs={"backend": "nothing", "dynamic": False})
    assert engine.is_deepcompile_active()
    assert "compile_kwargs has backend='nothing'" in caplog.text
    engine.destroy()


@pytest.mark.parametrize("deepcompile", [True, False])
@pytest.mark.parametrize("given", [{"whole": True}, {"schedule": []}, {"nothing": 1}])
def test_arguments_that_torch_does_not_take_are_refused(given: dict[str, Any], deepcompile: bool) -> None:
    engine = _start(0, deepcompile=deepcompile)
    with pytest.raises(ValueError, match=r"compile_kwargs has \w+, which torch.compile does not take: allowed are "):
        engine.compile(backend="aot_eager", compile_kwargs=given)
    assert not engine.is_compiled
    engine.destroy()


def test_what_is_no_schedule_or_contract_is_refused() -> None:
    for given in (5, [5], [(0, "zero3_compile")]):
        with pytest.raises(ValueError, match="a schedule of passes is a list such as"):
            validate_schedule(given)
    with pytest.raises(TypeError, match=r"PassContract\(requires='x'\): give a set of names, such as \{'x'\}"):
        PassContract(requires="x")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_without_gathers_are_graphs_too(stage: int) -> None:
    """DeepSpeed's own schedule of a stage, with the losses of a run that is not compiled."""
    found = []
    for compiles in (True, False):
        engine = _start(stage)
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

    engine = _start(3)
    engine.register_compile_pass("counts", counts, PassContract(conflicts_with=frozenset({"nothing"})))
    engine.compile(backend="aot_eager", schedule=[(0, ["zero3_compile", "counts"])])
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    assert seen
    with pytest.raises(NotImplementedError, match="called with a graph and a plan"):
        register_compile_pass("theirs", lambda gm, graph_id, order, results, create, budget, manager, bwd: gm)
    engine.destroy()
