"""Law 2: any placement computes what one process computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from zoo import sim
from zoo.zero import Precision, ZeroOptimizer

from .cases import Case, accumulate, cases, loss_of, make_model, train_reference, train_zero


@pytest.mark.dear
@given(case=cases(), seeds=st.integers(0, 100))
@example(case=Case(recompute="reentrant"), seeds=0)
@example(case=Case(recompute="non_reentrant", shared_block=True, tied=True), seeds=1)
@example(case=Case(world=3, silent_ranks=(0, 2), output="dict", accumulation="forwards_first"), seeds=2)
def test_stages_compute_the_same_bits(case: Case, seeds: int) -> None:
    check_same_bits(case, seeds)


def check_same_bits(case: Case, seeds: int) -> None:
    runs = [sim.run(case.world, lambda rank, s=stage: train_zero(case, s, rank), seed=seeds) for stage in range(4)]
    for stage, run in enumerate(runs):
        for rank, (parameters, history) in enumerate(run):
            assert history == runs[0][rank][1], f"stage {stage} rank {rank}: losses or norms differ from stage 0"
            for name, value in parameters.items():
                assert torch.equal(value, runs[0][0][0][name]), f"stage {stage} rank {rank}: {name} differs"


@pytest.mark.dear
@given(case=cases(), stage=st.integers(0, 3), sub_group=st.sampled_from([1, 40, 10**6]), seed=st.integers(0, 50))
def test_updates_in_backward_have_the_same_bits(case: Case, stage: int, sub_group: int, seed: int) -> None:
    accumulation = "no_sync" if case.accumulation == "backwards" else case.accumulation
    case = replace(case, clip_norm=0.0, accumulation=accumulation)

    def fn(rank: int, early: bool) -> tuple[dict[str, torch.Tensor], list[object]]:
        return train_zero(case, stage, rank, update_in_backward=early, sub_group_size=sub_group)

    expected = sim.run(case.world, lambda rank: fn(rank, False))
    for rank, (parameters, history) in enumerate(sim.run(case.world, lambda rank: fn(rank, True), seed=seed)):
        assert history == expected[rank][1]
        for name, value in parameters.items():
            assert torch.equal(value, expected[rank][0][name]), f"rank {rank}: {name}"


@given(case=cases(dtype=torch.float64), stage=st.integers(0, 3))
def test_every_stage_equals_one_process(case: Case, stage: int) -> None:
    check_one_process(case, stage)


def check_one_process(case: Case, stage: int) -> None:
    # fp64, where only the order of additions separates the two: relative 2^-53 a rounding, a few thousand roundings,
    # and up to 1/eps = 100 by which the optimizers amplify them.
    expected = train_reference(case)
    run = sim.run(case.world, lambda rank: train_zero(case, stage, rank))
    for parameters, _ in run:
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@given(case=cases(max_world=6), stage=st.integers(0, 3))
def test_low_precision_stays_within_the_rounding_of_the_sum(
    dtype: torch.dtype, reduce_dtype: torch.dtype | None, case: Case, stage: int
) -> None:
    """One SGD step: |p - p0 + lr g| <= lr (γ_N + u') Σ|g_r| / N + 2 ulp of fp32, where g is the exact mean.

    A sum of N terms in an arithmetic with unit roundoff u is off by at most γ_N = Nu/(1-Nu) times the sum of the
    absolute values (Higham 2002, section 3.1); the division by N rounds once more, and so does storing the mean. fp16
    adds half its smallest subnormal for each of these operations.
    """
    case = replace(case, dtype=dtype, num_steps=1, accumulation="one", clip_norm=0.0, optimizer="SGD", two_groups=False)
    rate = 0.1
    model_parameters, gradients = local_gradients(case)
    options = {"momentum": 0.0, "weight_decay": 0.0, "lr": rate, "precision": Precision(reduce=reduce_dtype)}

    def fn(rank: int) -> dict[str, torch.Tensor]:
        return masters(case, stage, rank, options)

    got: dict[str, torch.Tensor] = {}
    for part in sim.run(case.world, fn):
        got.update(part)
    u = torch.finfo(dtype).eps / 2
    carrier = u if reduce_dtype is None else torch.finfo(reduce_dtype).eps / 2
    n = case.world
    gamma = n * carrier / (1 - n * carrier)
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for key, value in got.items():
        name, start = key.rsplit("|", 1)
        part = slice(int(start), int(start) + value.numel())
        stacked = torch.stack([g[name].double().flatten()[part] for g in gradients])
        before = model_parameters[name].double().flatten()[part]
        exact = before - rate * stacked.mean(0)
        size = stacked.abs().sum(0) / n
        bound = rate * ((gamma + 2 * u) * 1.01 * size + (n + 2) * tiny) + 2**-22 * (before.abs() + rate * size)
        assert bool(((value.double() - exact).abs() <= bound).all()), f"{name}: {(value.double() - exact).abs().max()}"


def local_gradients(case: Case) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    found = []
    for rank in range(case.world):
        model = make_model(case)
        loss_of(model, case, rank, 0, 0).backward()
        found.append(
            {
                n: torch.zeros_like(p) if p.grad is None else p.grad
                for n, p in model.named_parameters()
                if p.requires_grad
            }
        )
    return {n: p.detach() for n, p in model.named_parameters()}, found


def masters(case: Case, stage: int, rank: int, options: dict[str, object]) -> dict[str, torch.Tensor]:
    model = make_model(case)
    optimizer = ZeroOptimizer(
        model, stage=stage, optimizer=torch.optim.SGD, reduce_bucket_size=case.bucket_size,
        param_persistence_threshold=case.threshold, overlap_comm=case.overlap, **options,
    )  # fmt: skip
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    accumulate(model, optimizer, case, rank, 0)
    optimizer.step()
    return {f"{s.name}|{s.start}": s.tensor.clone() for s in optimizer.state_slices() if s.name not in frozen}
