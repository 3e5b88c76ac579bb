"""What a careless user does with states: loads those of other options, pieces of them, those of other optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zero.blocks import STAGES, Blocks, build, check, data, one_step, twin

from zoo import sim
from zoo.zero import ZeroOptimizer


def adamw_twin(world: int, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    model = Blocks().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for step in range(steps):
        for rank in range(world):
            (model(data(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def snapshot(optimizer: ZeroOptimizer) -> tuple[dict[str, torch.Tensor], dict[str, float], list[dict[str, Any]]]:
    state = optimizer.state_dict()
    return state["slices"], state["scalars"], [dict(group) for group in state["param_groups"]]


def refused(optimizer: ZeroOptimizer, state: Any, match: str) -> None:
    """Refused on this rank as on all, and nothing is changed."""
    slices, scalars, groups = snapshot(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(state)
    after, numbers, options = snapshot(optimizer)
    assert slices.keys() == after.keys()
    assert all(torch.equal(slices[key], after[key]) for key in slices)
    assert (scalars, groups) == (numbers, options)


# Options that are saved with the state -------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_the_saved_options_say_which_states_are_loaded(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, momentum=0.9)
        one_step(model, optimizer, rank)
        model, again = build(stage)  # without momentum
        again.load_state_dict(optimizer.state_dict())
        one_step(model, again, rank, 1)
        check(again, twin(2, 2, momentum=0.9))

        model, optimizer = build(stage, optimizer=torch.optim.AdamW, amsgrad=True)
        one_step(model, optimizer, rank)
        model, again = build(stage, optimizer=torch.optim.AdamW)
        again.load_state_dict(optimizer.state_dict())
        one_step(model, again, rank, 1)
        check(again, adamw_twin(2, 2, amsgrad=True))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_without_what_other_options_keep_brings_its_options(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, optimizer=torch.optim.AdamW)
        one_step(model, optimizer, rank)
        model, again = build(stage, optimizer=torch.optim.AdamW, amsgrad=True)
        one_step(model, again, rank, 5)
        again.load_state_dict(optimizer.state_dict())
        one_step(model, again, rank, 1)
        check(again, adamw_twin(2, 2))

    sim.run(2, fn)


def test_states_on_nvme_have_places_for_the_options_of_construction(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
        model, optimizer = build(1, optimizer=torch.optim.AdamW, amsgrad=True, **nvme)
        one_step(model, optimizer, rank)
        model, again = build(1, optimizer=torch.optim.AdamW, **nvme)
        one_step(model, again, rank, 5)
        refused(again, optimizer.state_dict(), "files on NVMe were made for others.*Construct")
        again.load_state_dict(again.state_dict())

    sim.run(2, fn)


def test_options_that_are_tensors_are_copied() -> None:
    def fn(rank: int) -> None:
        _, optimizer = build(2, lr=torch.tensor(0.1))
        _, again = build(2)
        saved = optimizer.state_dict()
        again.load_state_dict(saved)
        saved["param_groups"][0]["lr"].mul_(0)
        assert again.param_groups[0]["lr"] == pytest.approx(0.1)

    sim.run(2, fn)


# States that lack something, or are of something else ----------------------------------------------------------------


def _no_scalars(state: dict[str, Any]) -> None:
    del state["scalars"]


def _no_step(state: dict[str, Any]) -> None:
    state["scalars"] = {key: value for key, value in state["scalars"].items() if key != "step/first.weight"}


def _no_moment(state: dict[str, Any]) -> None:
    state["slices"] = {key: value for key, value in state["slices"].items() if not key.startswith("exp_avg_sq|")}


def _no_state_of_a_block(state: dict[str, Any]) -> None:
    for part in ("slices", "scalars"):
        state[part] = {k: v for k, v in state[part].items() if "blocks.1." not in k or k.startswith("parameter")}


def _no_groups(state: dict[str, Any]) -> None:
    state["param_groups"] = []


LACKING: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_no_scalars, "no 'scalars' of the right kind"),
    (_no_step, "lacks 'step' of 'first.weight', which AdamW keeps"),
    (_no_moment, "lacks 'exp_avg_sq' of "),
    (_no_state_of_a_block, r"has states of 'first\.\w+', and none of 'blocks\.1\.\w+'"),
    (_no_groups, "has 0 parameter groups; this optimizer has 1"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("take", "match"), LACKING)
def test_a_state_that_lacks_something_is_refused_on_all_ranks(
    stage: int, take: Callable[[dict[str, Any]], None], match: str
) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, optimizer=torch.optim.AdamW)
        one_step(model, optimizer, rank)
        state = optimizer.state_dict()
        one_step(model, optimizer, rank, 1)
        if rank == 1 or stage == 3 or take is _no_state_of_a_block:
            take(state)
        refused(optimizer, state, match)

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_of_another_optimizer_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, optimizer=torch.optim.AdamW)
        one_step(model, optimizer, rank)
        for options in ({}, {"momentum": 0.9}):
            other_model, other = build(stage, **options)
            one_step(other_model, other, rank)
            refused(optimizer, other.state_dict(), "of another optimizer.*momentum.*and not.*betas.*which AdamW has")
        plain = torch.optim.SGD(Blocks().parameters(), lr=0.1)
        refused(optimizer, plain.state_dict(), "of another optimizer.*momentum.*and not.*betas.*which AdamW has")
        refused(optimizer, {"param_groups": []}, "no 'slices', 'scalars'.*as torch's optimizers have it")
        refused(optimizer, None, "got a NoneType")

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_an_optimizer_without_a_step_is_whole(stage: int) -> None:
    def fn(rank: int) -> None:
        _, fresh = build(stage, optimizer=torch.optim.AdamW)
        model, optimizer = build(stage, optimizer=torch.optim.AdamW)
        one_step(model, optimizer, rank, 3)
        optimizer.load_state_dict(fresh.state_dict())
        one_step(model, optimizer, rank)
        check(optimizer, adamw_twin(2, 1))

    sim.run(2, fn)


# Hooks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_states_run_as_with_torch(stage: int) -> None:
    def fn(rank: int) -> None:
        _, optimizer = build(stage)
        seen: list[str] = []

        def saved(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            seen.append("saved")
            return {**state, "note": 7}

        def load(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            seen.append(f"load {state.pop('note')}")
            return {**state, "param_groups": [{**g, "lr": 0.5} for g in state["param_groups"]]}

        optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(load)
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert state["note"] == 7
        assert seen == ["save", "saved", "load 7", "loaded"]
        assert optimizer.param_groups[0]["lr"] == 0.5

    sim.run(2, fn)


# States and groups that somebody edits --------------------------------------------------------------------------------


def _assign(optimizer: Any, weight: Any) -> None:
    optimizer.state = defaultdict(dict)


def _assign_one(optimizer: Any, weight: Any) -> None:
    optimizer.state[weight] = {}


STATE_USES: list[Callable[[Any, Any], Any]] = [
    _assign,
    _assign_one,
    lambda optimizer, weight: optimizer.state.pop(weight, None),
    lambda optimizer, weight: optimizer.state.clear(),
    lambda optimizer, weight: optimizer.state[weight]["momentum_buffer"],
    lambda optimizer, weight: dict(optimizer.state[weight]),
    lambda optimizer, weight: optimizer.state.setdefault(torch.ones(1), {}),
    lambda optimizer, weight: optimizer.state.update({weight: {}}),
    lambda optimizer, weight: optimizer.state.popitem(),
    lambda optimizer, weight: optimizer.state[weight].__setitem__("momentum_buffer", torch.zeros(1)),
    lambda optimizer, weight: optimizer.state[weight].update(step=torch.tensor(0.0)),
    lambda optimizer, weight: optimizer.state[weight].setdefault("ema", weight),
    lambda optimizer, weight: optimizer.state[weight].__delitem__("momentum_buffer"),
    lambda optimizer, weight: optimizer.state[weight].clear(),
]


@pytest.mark.parametrize("stage", STAGES)
def test_states_are_not_replaced_from_outside(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, momentum=0.9)
        one_step(model, optimizer, rank)
        for use in STATE_USES:
            with pytest.raises(ValueError, match=r"optimizer\.state.*safe_get_full_.*safe_set_full_optimizer_state"):
                use(optimizer, model.last.weight)
        assert list(optimizer.state) == list(model.parameters())
        assert model.last.weight in optimizer.state
        assert all(list(state) == ["momentum_buffer"] for state in optimizer.state.values())
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2, momentum=0.9))

    sim.run(2, fn)


def test_a_profiler_reads_the_states() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(1, momentum=0.9)
        with torch.profiler.profile(profile_memory=True, with_stack=True, record_shapes=True):
            for step in range(2):
                one_step(model, optimizer, rank, step)
        check(optimizer, twin(1, 2, momentum=0.9))

    sim.run(1, fn)


def _take_out(groups: list[dict[str, Any]], model: Any) -> None:
    groups[0]["params"] = list(model.last.parameters())


def _take_out_in_place(groups: list[dict[str, Any]], model: Any) -> None:
    del groups[0]["params"][2:]


def _add(groups: list[dict[str, Any]], model: Any) -> None:
    groups[0]["params"].append(torch.nn.Parameter(torch.ones(1)))


def _no_list(groups: list[dict[str, Any]], model: Any) -> None:
    del groups[0]["params"]


def _append(groups: list[dict[str, Any]], model: Any) -> None:
    groups.append({"params": [], "lr": 0.1})


def _remove(groups: list[dict[str, Any]], model: Any) -> None:
    groups.clear()


GROUP_EDITS: list[tuple[Callable[[list[dict[str, Any]], Any], None], str]] = [
    (_take_out, r"param_groups\[0\]\['params'\] was changed \('first\.weight'.* taken out\)"),
    (_take_out_in_place, r"'blocks\.0\.weight'.* taken out"),
    (_add, "'a Parameter' added"),
    (_no_list, "'first.weight'.* taken out"),
    (_append, "param_groups has 2 groups, and had 1"),
    (_remove, "param_groups has 0 groups, and had 1"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("edit", "match"), GROUP_EDITS)
def test_groups_are_those_of_construction(
    stage: int, edit: Callable[[list[dict[str, Any]], Any], None], match: str
) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        groups, members = list(optimizer.param_groups), list(optimizer.param_groups[0]["params"])
        edit(optimizer.param_groups, model)
        saved = build(stage)[1].state_dict()
        optimizer.backward(model(data(rank)).square().mean())
        with pytest.raises(ValueError, match=match):
            optimizer.step()
        if len(optimizer.param_groups) == 1:
            with pytest.raises(ValueError, match=match):
                optimizer.load_state_dict(saved)
        optimizer.param_groups[:] = [{**groups[0], "params": members}]
        optimizer.step()
        check(optimizer, twin(2))

    sim.run(2, fn)


def test_states_that_go_away_in_two_calls_are_all_away() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3, optimizer=torch.optim.AdamW)
        one_step(model, optimizer, rank)
        moments = optimizer.offload_states(["optim_states"])
        both = optimizer.offload_states(["optim_states", "lp_params"])
        assert both > moments > 0
        assert optimizer.offload_states(["lp_params"]) == both
        for include, match in (
            (["nonsense"], "include has 'nonsense'; allowed are 'optim_states'"),
            ("lp_params", "include='lp_params' is a str; allowed are 'optim_states'.*in a list"),
            (3, "include=3 is a int"),
        ):
            with pytest.raises(ValueError, match=match):
                optimizer.offload_states(include)  # type: ignore[arg-type]
        assert optimizer.offload_states() == both  # a step leaves no gradients
        optimizer.reload_states()
        with pytest.raises(ValueError, match="is a str"):
            optimizer.offload_states("lp_params")
        one_step(model, optimizer, rank, 1)
        check(optimizer, adamw_twin(2, 2))

    sim.run(2, fn)


def test_what_to_do_instead_names_a_state_that_there_is() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = ZeroOptimizer(model, stage=1, optimizer=torch.optim.Adam, lr=0.1)
    for use in (
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.pop(model.weight),
        lambda: optimizer.state[model.weight]["exp_avg_sq"],
    ):
        with pytest.raises(ValueError, match=r"safe_get_full_optimizer_state\(p, 'exp_avg"):
            use()
