"""Norms over the parameters of all ranks, of any order, with and without clipping."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.zero.late import Late
from torch import nn

from zoo import sim
from zoo.optim import SGD as ZooSGD
from zoo.zero import LossScaler, NonFiniteGradientsError, Precision, ZeroOptimizer, safe_get_full_grad

STAGES = (0, 1, 2, 3)
ORDERS = (0.5, 1.0, 2.0, 3.0, math.inf)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def build(
    stage: int, made: nn.Module | None = None, make: type[ZeroOptimizer] = ZeroOptimizer, **options: Any
) -> tuple[nn.Module, ZeroOptimizer]:  # fmt: skip
    made = model() if made is None else made
    options = {"reduce_bucket_size": 1, "param_persistence_threshold": 3, "optimizer": torch.optim.SGD, **options}
    return made, make(made, stage=stage, lr=0.5, **options)


def loss(made: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    found: torch.Tensor = made(x).square().mean()
    return found


def mean_backward(made: nn.Module, world: int, step: int = 0) -> None:
    sum((loss(made, r, step) for r in range(world)), torch.zeros((), dtype=torch.float64)).div(world).backward()


@examples(times=2)
@given(
    stage=st.sampled_from(STAGES), world=st.integers(1, 3), order=st.sampled_from(ORDERS),
    max_norm=st.sampled_from([0.0, 0.01, 0.3, 1e9, math.inf]), nvme=st.booleans(), scaled=st.booleans(),
)  # fmt: skip
def test_it_clips_as_torch_does_in_one_process(
    stage: int, world: int, order: float, max_norm: float, nvme: bool, scaled: bool, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("nvme")

    def fn(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        options: dict[str, Any] = {"loss_scale": 64.0} if scaled else {}
        if nvme and stage:
            options["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
        made, optimizer = build(stage, **options)
        norms = []
        for step in range(2):
            with optimizer.no_sync():
                optimizer.backward(loss(made, rank, step) * 0.25)
            optimizer.backward(loss(made, rank, step) * 0.75)
            norms += [optimizer.global_norm(order), optimizer.clip_grad_norm_(max_norm, order)]
            optimizer.step()
            optimizer.zero_grad()
        return norms, optimizer.consolidated_parameters()

    one = model()
    single = torch.optim.SGD(one.parameters(), lr=0.5)
    expected = []
    for step in range(2):
        mean_backward(one, world, step)
        grads = [p.grad for p in one.parameters() if p.grad is not None]
        before = float(nn.utils.get_total_norm(grads, order))
        assert float(nn.utils.clip_grad_norm_(one.parameters(), max_norm, order)) == pytest.approx(before, rel=1e-12)
        expected += [before, before]
        single.step()
        single.zero_grad()
    for norms, found in sim.run(world, fn):
        assert norms == pytest.approx(expected, rel=1e-9)
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_known_without_clipping(stage: int) -> None:
    def fn(rank: int) -> tuple[float | None, dict[str, torch.Tensor]]:
        made, optimizer = build(stage, clip_norm=math.inf)
        assert optimizer.grad_norm is None
        assert optimizer.global_norm() == 0.0  # there was no backward
        loss(made, rank).backward()
        optimizer.step()
        return optimizer.grad_norm, optimizer.consolidated_parameters()

    one = model()
    mean_backward(one, 2)
    grads = [p.grad for p in one.parameters() if p.grad is not None]
    for norm, found in sim.run(2, fn):
        assert norm == pytest.approx(float(nn.utils.get_total_norm(grads)), rel=1e-9)
        for name, parameter in one.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.detach() - 0.5 * parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("policy", ["skip", "error"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(stage: int, policy: str, number: float) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        made, optimizer = build(stage, nonfinite_gradients=policy)
        before = optimizer.consolidated_parameters()
        for raises in (True, False):
            (loss(made, rank) * (number if rank == 1 else 1.0)).backward()
            if raises:  # an error at once
                with pytest.raises(NonFiniteGradientsError, match=r"order inf.*zero_grad\(\)") as caught:
                    optimizer.clip_grad_norm_(1.0, math.inf, error_if_nonfinite=True)
                assert isinstance(caught.value, RuntimeError)
                optimizer.zero_grad()
                continue
            assert not math.isfinite(optimizer.clip_grad_norm_(1.0))  # the step finds it
            if policy == "skip":
                optimizer.step()
                assert (optimizer.skipped, optimizer.num_skipped) == (True, 1)
            else:
                with pytest.raises(NonFiniteGradientsError, match="norm of the gradients is"):
                    optimizer.step()
            optimizer.zero_grad()
        after = optimizer.consolidated_parameters()
        assert all(torch.equal(before[n], after[n]) for n in before)
        loss(made, rank).backward()
        optimizer.step()
        assert not optimizer.skipped
        return optimizer.consolidated_parameters()

    one = model()
    mean_backward(one, 2)
    for found in sim.run(2, fn):
        for name, parameter in one.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.detach() - 0.5 * parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip_norm", [0.0, math.inf, 0.01])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1.0])
def test_gradients_that_are_not_finite_are_used_where_that_is_asked_for(
    stage: int, clip_norm: float, number: float
) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        made, optimizer = build(stage, clip_norm=clip_norm, nonfinite_gradients="use")
        (loss(made, rank) * (number if rank == 1 else 1.0)).backward()
        optimizer.step()
        assert (optimizer.skipped, optimizer.num_skipped) == (False, 0)
        return optimizer.consolidated_parameters()

    one = model()
    sum(loss(one, rank) * (number if rank == 1 else 1.0) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
    if 0.0 < clip_norm < math.inf:
        nn.utils.clip_grad_norm_(one.parameters(), clip_norm)
    for found in sim.run(2, fn):
        for name, parameter in one.named_parameters():
            assert parameter.grad is not None
            wanted = parameter.detach() - 0.5 * parameter.grad
            torch.testing.assert_close(found[name], wanted, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_a_loss_scale_is_found_by_steps_that_are_skipped() -> None:
    with pytest.raises(ValueError, match="nonfinite_gradients='use' with a loss scale"):
        build(1, loss_scale="dynamic", nonfinite_gradients="use")


def test_what_is_dropped_is_not_held_against_the_next_gradients() -> None:
    def fn(rank: int) -> bool:
        made, optimizer = build(2)
        (loss(made, rank) * math.nan).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad()
        loss(made, rank).backward()
        optimizer.step()
        assert optimizer.grad_norm is not None
        return math.isnan(optimizer.grad_norm)  # of the clipping: this step has computed none

    assert sim.run(2, fn) == [True, True]


@pytest.mark.parametrize("order", [0.0, -1.0, math.nan, -math.inf])
def test_orders_that_are_none(order: float) -> None:
    made, optimizer = build(1)
    loss(made, 0).backward()
    with pytest.raises(ValueError, match=r"norm_type=.*a number > 0, or math\.inf"):
        optimizer.clip_grad_norm_(1.0, order)
    with pytest.raises(ValueError, match=r"clip_grad_norm_\(max_norm=-1.0\)"):
        optimizer.clip_grad_norm_(-1.0)
    optimizer.step()


def test_updates_in_backward_leave_nothing_to_measure() -> None:
    _, optimizer = build(2, update_in_backward=True)
    for call in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.global_norm):
        with pytest.raises(ValueError, match=r"\(\) with update_in_backward=True"):
            call()
    with pytest.raises(ValueError, match="update_in_backward=True with clip_norm=inf"):
        build(2, update_in_backward=True, clip_norm=math.inf)


class Weighed(nn.Module):
    """Σ p f: the gradient of p is f."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, f: torch.Tensor) -> torch.Tensor:
        return (self.p * f).sum()


class Held(nn.Module):
    def __init__(self, sizes: list[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Weighed(size, dtype) for size in sizes)

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([part(f) for part, f in zip(self.parts, factors, strict=True)]).sum()


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=6), world=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), order=st.sampled_from([1.0, 2.0, 3.0]),
)  # fmt: skip
def test_the_norm_has_the_same_bits_at_every_bucket_size_and_stage(
    sizes: list[int], world: int, seed: int, dtype: torch.dtype, order: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    factors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    # All ranks have the same gradients, of which the mean is exact: what differs is who adds which squares.
    exact = math.fsum(abs(x) ** order for f in factors for x in f.double().tolist()) ** (1 / order)

    def fn(rank: int) -> list[float]:
        found = []
        for stage, bucket_size in ((0, 1), (1, 10**7), (2, 2000), (3, 1), (3, 500)):
            made = Held(sizes, dtype)
            optimizer = ZeroOptimizer(
                made, optimizer=torch.optim.SGD, lr=0.0, stage=stage, reduce_bucket_size=bucket_size,
                param_persistence_threshold=0,
            )  # fmt: skip
            made(factors).backward()
            found.append(optimizer.global_norm(order))
        return found

    for norms in sim.run(world, fn):
        assert set(norms) == {float(torch.tensor(exact, dtype=torch.float32))}


class Clipped:
    """Plain torch: each step clips before it updates."""

    def __init__(self, made: nn.Module) -> None:
        self.parameters, self.inner = list(made.parameters()), torch.optim.SGD(made.parameters(), lr=0.5)
        self.param_groups = self.inner.param_groups

    def clip_grad_norm_(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters, max_norm)

    def step(self) -> None:
        self.clip_grad_norm_(0.01)
        self.inner.step()


KINDS: dict[str, dict[str, Any]] = {
    "torch": {},
    "zoo": {"optimizer": ZooSGD},
    "zoo, all at once": {"optimizer": ZooSGD, "sub_group_size": 10**9},
    "masters": {"precision": Precision(param=torch.bfloat16, accumulate=torch.float32)},
    "masters of 16-bit gradients": {"precision": Precision(param=torch.bfloat16)},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
    "scaled": {"loss_scale": 8.0},
    "not waited for": {"optimizer": ZooSGD, "capturable": True},
    "fused, not waited for": {"optimizer": torch.optim.SGD, "fused": True},
    "zoo, scaled": {"optimizer": ZooSGD, "loss_scale": LossScaler(scale=8.0, dynamic=True, window=1)},
}


def _add_once_more(made: nn.Module, optimizer: Any, back: Any) -> None:
    for step in range(3):
        back(step)
        optimizer.step()


def _step_again(made: nn.Module, optimizer: Any, back: Any) -> None:
    back(0)
    optimizer.step()
    optimizer.step()
    back(1)
    optimizer.step()


def _fail_in_between(made: nn.Module, optimizer: Any, back: Any) -> None:
    back(0)
    group = optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], "none"
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    group["lr"] = rate
    back(1)
    optimizer.step()


def _measure(made: nn.Module, optimizer: Any, back: Any) -> None:
    back(0)
    optimizer.step()
    optimizer.clip_grad_norm_(0.004)
    back(1)
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "stage"), [(k, s) for k in KINDS for s in STAGES if s or "offload" not in str(KINDS[k])]
)
@pytest.mark.parametrize("run", [_add_once_more, _step_again, _measure, _fail_in_between])
def test_a_further_backward_adds_to_the_clipped_gradient(stage: int, kind: str, run: Any, tmp_path: Path) -> None:
    options = copy.deepcopy(KINDS[kind])
    if kind == "nvme":
        if run is _fail_in_between:  # refused by name: states of two steps are in the files
            return
        options["offload_optimizer"]["nvme_path"] = str(tmp_path)
    low = "precision" in options

    def fn(rank: int) -> None:
        make = Late if "not waited for" in kind else ZeroOptimizer
        given = copy.deepcopy(options)
        made, optimizer = build(stage, model().float() if low else None, make, clip_norm=0.01, **given)
        run(made, optimizer, lambda step: optimizer.backward(loss(made, rank, step)))
        if low:
            return
        for name, parameter in made.named_parameters():
            gradient = safe_get_full_grad(parameter)
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-6, atol=1e-12)
        for name, value in optimizer.consolidated_parameters().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-9)

    plain = model()
    inner = Clipped(plain)
    run(plain, inner, lambda step: mean_backward(plain, 2, step))
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    gradients = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
    sim.run(2, fn)
