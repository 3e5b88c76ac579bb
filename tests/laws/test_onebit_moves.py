"""Optimizers that compress, saved on one mesh and loaded on another: laws 3 and 7 with experts, tensor-parallel parts,
stages of a pipeline and tied layers.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.laws.test_families import pick, states, whole
from tests.laws.test_three_axes import Case, Pipeline
from tests.profiles import deep_example, examples

from zoo import sim
from zoo.optim import DiLoCo, LocalSGD, OnebitAdam, OnebitLamb, ZeroOneAdam

GROUP = {"type": "onebit", "params": {"group_size": 64}}
ADAM = {"optimizer": OnebitAdam, "lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "freeze_step": 2, "compressor": GROUP}
LAMB = {**ADAM, "optimizer": OnebitLamb, "coeff_beta": 0.5}
ZERO_ONE = {
    "optimizer": ZeroOneAdam, "lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "compressor": GROUP, "var_freeze_step": 2,
    "local_step_scaler": 2, "local_step_clipper": 2,
}  # fmt: skip
DILOCO = {"optimizer": DiLoCo, "lr": 0.02, "sync_every": 3, "compressor": GROUP}
LOCAL = {"optimizer": LocalSGD, "lr": 0.1, "sync_every": 3, "outer_momentum": 0.4, "outer_nesterov": True}
WAYS = {"Adam": ADAM, "Lamb": LAMB, "ZeroOne": ZERO_ONE, "DiLoCo": DILOCO, "LocalSGD": LOCAL}
OTHERS = [name for name in WAYS if name != "ZeroOne"]
SLOW = [pytest.param(WAYS[name], marks=pytest.mark.slow) for name in OTHERS]
STEPS = 5
"""After which some have made local steps since they met."""

# (pipe, expert, data, tensor, experts on a rank): four experts in all
MESHES = [(1, 2, 2, 1, 2), (1, 1, 4, 1, 4), (2, 2, 1, 1, 2), (2, 1, 2, 1, 4), (1, 4, 1, 1, 1), (2, 2, 2, 1, 2),
          (1, 1, 2, 2, 4), (1, 1, 1, 1, 4), (1, 2, 1, 2, 2), (2, 1, 1, 2, 4)]  # fmt: skip


def case_of(mesh: tuple[int, ...], stage: int = 0) -> Case:
    pipe, expert, data, tensor, per_rank = mesh
    return Case(
        pipe=pipe, expert=expert, data=data, tensor=tensor, per_rank=per_rank, stage=stage, experts_at=2, pair_at=1,
        tied=(0, 3), num_micro=1, bucket_size=10**6,
    )  # fmt: skip


def save(case: Case, way: dict[str, Any], errors: Any = "ranks") -> Any:
    def fn(rank: int) -> Any:
        pipeline = Pipeline(case, rank, torch.float32, **way)
        for step in range(STEPS):
            pipeline.step(step)
        optimizer = pipeline.optimizer
        found = states(optimizer, errors), optimizer.state_scalars(), dict(optimizer.param_groups[0])
        own = {name: value.clone() for name, value in optimizer.whole_parameters()}
        for step in range(STEPS, STEPS + 3):
            pipeline.step(step)
        return *found, own, {name: value.clone() for name, value in optimizer.whole_parameters()}

    ranks = sim.run(case.world, fn)
    scalars = {key: value for _, found, *_ in ranks for key, value in found.items()}
    return whole([found for found, *_ in ranks]), scalars, ranks[0][2], [(own, after) for *_, own, after in ranks]


def load(case: Case, way: dict[str, Any], saved: Any) -> Any:
    kept, scalars, options, _ = saved

    def read(name: str, role: str, start: Any, length: int) -> torch.Tensor:
        return pick(kept[name, role], start, length)

    def fn(rank: int) -> Any:
        pipeline = Pipeline(case, rank, torch.float32, **way)
        optimizer = pipeline.optimizer
        optimizer.param_groups[0].update({k: v for k, v in options.items() if k not in ("params", "param_names")})
        optimizer.load_state(read, scalars)
        found = states(optimizer), optimizer.state_scalars()
        own = {name: value.clone() for name, value in optimizer.whole_parameters()}
        for step in range(STEPS, STEPS + 3):
            pipeline.step(step)
        return *found, own, {name: value.clone() for name, value in optimizer.whole_parameters()}

    ranks = sim.run(case.world, fn)
    scalars = {key: value for _, found, *_ in ranks for key, value in found.items()}
    return whole([found for found, *_ in ranks]), scalars, [(own, after) for *_, own, after in ranks]


def owed(state: Any, name: str, scalars: dict[str, float]) -> torch.Tensor:
    """s + 1/R Σ_r e_r of a tensor, in the unit of a momentum."""
    errors = [value for (n, role), value in state.items() if n == name and role.startswith("feedback.")]
    unit = scalars.get(f"zero/feedback_unit/{name}", scalars.get("zero/feedback_unit", 1.0))
    found = state.get((name, "owed"), torch.zeros_like(state[name, "parameter"]))
    return unit * (found + (torch.stack(errors).mean(0) if errors else 0.0))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def check(before: Case, after: Case, way: dict[str, Any]) -> None:
    saved = save(before, way)
    kept, (again, scalars, ranks) = saved[0], load(after, way, saved)
    if before == after:
        for (own, later), (mine, mine_later) in zip(saved[3], ranks, strict=True):
            assert same(own, mine)
            assert same(later, mine_later)
    names = {name for name, role in kept if role == "parameter"}
    assert names == {name for name, role in again if role == "parameter"}
    for name in sorted(names):
        torch.testing.assert_close(value_of(again, name), value_of(kept, name), msg=lambda m, n=name: f"{n}: {m}")
        if any(role == "owed" or role.startswith("feedback.") for n, role in again if n == name):
            want = owed(kept, name, saved[1])
            torch.testing.assert_close(
                owed(again, name, scalars), want, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:  # nobody makes its mean
            alone = after.data == 1 if "experts" in name else after.replicas == 1
            assert alone or name in ("table", "shift") or not owed(kept, name, saved[1]).any()
    for _, later in ranks:
        for name, value in later.items():
            assert bool(value.isfinite().all())
            alike = way in (ADAM, LAMB) and not any(part in name for part in ("experts", "columns", "turned", "rows"))
            if alike or (name in ("table", "shift") and after.pipe > 1):
                of_ranks = [of_rank[name] for _, of_rank in ranks if name in of_rank]
                assert all(torch.equal(value, other) for other in of_ranks), name


def value_of(state: Any, name: str) -> torch.Tensor:
    """A parameter; the mean of all ranks where they have different ones."""
    apart = [value for (n, role), value in state.items() if n == name and role.endswith(".parameter")]
    return torch.stack(apart).mean(0) if apart else state[name, "parameter"]


@pytest.mark.dear
@pytest.mark.parametrize("way", [WAYS["ZeroOne"], *SLOW], ids=["ZeroOne", *OTHERS])
@examples(times=0.34)
@given(before=st.sampled_from(MESHES), after=st.sampled_from(MESHES))
@example(before=MESHES[0], after=MESHES[1])
@deep_example(before=MESHES[1], after=MESHES[0])
@example(before=MESHES[1], after=MESHES[3])
@deep_example(before=MESHES[2], after=MESHES[3])
@example(before=MESHES[0], after=MESHES[6])  # parts of tensors there
def test_a_state_moves_to_another_mesh(way: dict[str, Any], before: tuple[int, ...], after: tuple[int, ...]) -> None:
    check(case_of(before), case_of(after), way)


@pytest.mark.dear
@pytest.mark.parametrize(("before", "after", "lost"), [(1, 7, "18 of"), (1, 3, "2 of")])
def test_what_nobody_is_owed_any_more_is_told(
    before: int, after: int, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="zoo.zero"):
        load(case_of(MESHES[after]), ADAM, save(case_of(MESHES[before]), ADAM))
    told = [r.getMessage() for r in caplog.records if "still owed" in r.getMessage()]
    assert told
    assert all(f"still owed to {lost} the parameters" in text for text in told)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_split_states_move_too(stage: int) -> None:
    """Gradients are compressed on their way to the owners there: with the same sums, also from and to stage 0."""
    for before, after in ((stage, stage), (stage, 0), (0, stage)):
        check(case_of(MESHES[0], before), case_of(MESHES[5 if before == 0 else 0], after), ADAM)
    check(case_of(MESHES[1], stage), case_of(MESHES[0], stage), ADAM)


@pytest.mark.dear
def test_folded_errors_move_too() -> None:
    apiece, folded = save(case_of(MESHES[0]), ADAM), save(case_of(MESHES[0]), ADAM, "folded")
    for name in {name for name, _ in apiece[0]}:
        torch.testing.assert_close(
            owed(folded[0], name, folded[1]), owed(apiece[0], name, apiece[1]), rtol=1e-5, atol=1e-7
        )
    again, scalars, _ = load(case_of(MESHES[1]), ADAM, folded)
    for name in {name for name, role in again if role == "owed"}:
        want = owed(apiece[0], name, apiece[1])
        torch.testing.assert_close(owed(again, name, scalars), want, rtol=1e-5, atol=1e-7)


def test_a_state_dict_that_does_not_fit_one_stage_is_refused_on_all() -> None:
    """All ranks of the model load together: none waits for one that has refused."""
    case = case_of(MESHES[3])

    def fn(rank: int) -> None:
        pipeline = Pipeline(case, rank, torch.float32, **ADAM)
        for step in range(4):
            pipeline.step(step)
        state = pipeline.optimizer.state_dict()
        for step in range(4, 6):
            pipeline.step(step)
        want = {name: value.clone() for name, value in pipeline.optimizer.whole_parameters()}
        wrong = {**state, "world_size": 9} if pipeline.stage == 1 else state
        with pytest.raises(ValueError, match=r"this state_dict is of rank . of 9"):
            pipeline.optimizer.load_state_dict(wrong)
        with pytest.raises(ValueError, match="were given states by parameter"):
            pipeline.optimizer.load_state_dict({"state": {}, "param_groups": []} if pipeline.stage == 1 else state)
        assert same({name: value.clone() for name, value in pipeline.optimizer.whole_parameters()}, want)
        pipeline.optimizer.load_state_dict(state)
        for step in range(4, 6):
            pipeline.step(step)
        assert same({name: value.clone() for name, value in pipeline.optimizer.whole_parameters()}, want)

    sim.run(case.world, fn)
