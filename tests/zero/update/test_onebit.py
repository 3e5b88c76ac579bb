"""1-bit optimizers under ZeRO: each is its paper's algorithm, step by step, on simulated ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.optim import papers
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.optim import DiLoCo, LocalSGD, OnebitAdam, OnebitLamb, ZeroOneAdam
from zoo.zero import ZeroOptimizer

GROUP = {"type": "onebit", "params": {"group_size": 64, "factor": 1.0}}  # the scale of the papers


class Given(nn.Module):
    """A model whose gradient is what it is told."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(s, generator=generator) for s in shapes)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        parts = torch.split(gradient, [w.numel() for w in self.weights])
        return sum(((w.view(-1) * g).sum() for w, g in zip(self.weights, parts, strict=True)), torch.zeros(()))


def gradients(steps: int, ranks: int, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, ranks, n)).astype(np.float32)


def train(rank: int, grads: np.ndarray, shapes: list[tuple[int, ...]], **options: Any) -> Any:
    """The parameters after each step, flat: (steps, n)."""
    model = Given(*shapes)
    optimizer = ZeroOptimizer(model, **{"compressor": GROUP, **options})
    found = []
    for step in grads:
        model(torch.from_numpy(step[rank])).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.cat([w.detach().view(-1) for w in model.weights]).numpy().copy())
    return np.stack(found)


def chunks_of(size: int, ranks: int) -> list[slice]:
    """Chunks of whole units of 64 elements."""
    chunk = math.ceil(size / ranks / 64) * 64
    return [slice(min(r * chunk, size), min((r + 1) * chunk, size)) for r in range(ranks)]


@pytest.mark.parametrize("other", ["fp8", {"type": "onebit", "params": {"group_size": 128}}])
def test_ranks_with_other_compressors_are_told_before_anything_travels(other: Any) -> None:
    """Their messages would have other sizes, after the warm-up: by default of 100,000 steps."""

    def job(rank: int) -> None:
        words = "construct a ZeRO optimizer in different ways: compressor: .* on rank 0, .* on rank 1"
        with pytest.raises(ValueError, match=words):
            ZeroOptimizer(Given((5,)), optimizer=OnebitAdam, lr=0.1, stage=1, compressor=other if rank else GROUP)

    sim.run(2, job)


SHAPES = st.lists(st.sampled_from([(1,), (7,), (33, 3), (64,), (5, 5, 5)]), min_size=1, max_size=3)


@examples(times=2)
@given(
    SHAPES, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.1]),
    st.integers(0, 99),
)  # fmt: skip
def test_onebit_adam_is_its_paper(
    shapes: list[tuple[int, ...]], ranks: int, freeze: int, corrected: bool, inside: bool, decay: float, seed: int
) -> None:
    n = sum(int(np.prod(s)) for s in shapes)
    grads = gradients(7, ranks, n, seed)
    grads[:, :, : n // 3] *= 1e-3
    grads[:freeze, :, -1] = 0
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": decay, "bias_correction": corrected,
               "eps_inside_sqrt": inside, "freeze_step": freeze}  # fmt: skip
    got = sim.run(ranks, lambda r: train(r, grads, shapes, stage=0, optimizer=OnebitAdam, **options))
    x = torch.cat([w.detach().view(-1) for w in Given(*shapes).weights]).numpy()
    reduce: Any = papers.OnebitAllReduce(64, chunks_of(n, ranks))
    if ranks == 1:
        reduce = alone
    want = papers.onebit_adam(
        x, grads, reduce, freeze_step=freeze,
        lr=0.01, beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=decay, corrected=corrected, eps_inside=inside,
    )  # fmt: skip
    for rank, params in enumerate(got):
        assert np.array_equal(params, got[0])
        np.testing.assert_allclose(params, want[:, rank], rtol=2e-3, atol=2e-4)


@examples(times=2)
@given(
    SHAPES, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, 0.1]), st.integers(0, 99),
)  # fmt: skip
def test_zero_one_adam_is_its_paper(
    shapes: list[tuple[int, ...]], ranks: int, last: int, kappa: int, scaler: int, clipper: int, decay: float, seed: int
) -> None:
    n = sum(int(np.prod(s)) for s in shapes)
    grads = gradients(12, ranks, n, seed)
    grads[:last, :, -1] = 0
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": decay, "bias_correction": False,
               "var_freeze_step": last, "var_update_scaler": kappa, "local_step_scaler": scaler,
               "local_step_clipper": clipper}  # fmt: skip
    got = sim.run(ranks, lambda r: train(r, grads, shapes, stage=0, optimizer=ZeroOneAdam, **options))
    x = torch.cat([w.detach().view(-1) for w in Given(*shapes).weights]).numpy()
    reduce: Any = papers.OnebitAllReduce(64, chunks_of(n, ranks))
    if ranks == 1:
        reduce = alone
    want = papers.zero_one_adam(
        x, grads, reduce, last_variance=last,
        kappa=kappa, syncs=synchronised(last, scaler, clipper), lr=np.full(12, 0.01), beta1=0.8, beta2=0.95, eps=1e-3,
        weight_decay=decay,
    )  # fmt: skip
    for rank, params in enumerate(got):
        np.testing.assert_allclose(params, want[:, rank], rtol=2e-3, atol=2e-4)
    for step in synchronised(last, scaler, clipper)[:-1]:
        assert all(np.array_equal(params[step - 1], got[0][step - 1]) for params in got if step <= 12)


def synchronised(last: int, scaler: int, clipper: int) -> list[int]:
    """T_u up to step 12 and one more."""
    found = list(range(1, last + 1))
    while found[-1] < 13:
        found.append(found[-1] + min(2 ** ((found[-1] - last) // scaler), clipper))
    return found


@examples(times=2)
@given(SHAPES, st.integers(1, 4), st.integers(2, 4), st.integers(0, 99))
def test_onebit_lamb_is_its_paper(shapes: list[tuple[int, ...]], ranks: int, freeze: int, seed: int) -> None:
    n = sum(int(np.prod(s)) for s in shapes)
    grads = gradients(8, ranks, n, seed)
    grads[:, :, : n // 3] *= 1e-2
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "bias_correction": False, "freeze_step": freeze,
               "coeff_beta": 0.5, "max_coeff": 3.0, "min_coeff": 0.1, "factor_min": 0.7, "factor_max": 1.5,
               "factor_threshold": 0.2}  # fmt: skip
    got = sim.run(ranks, lambda r: train(r, grads, shapes, stage=0, optimizer=OnebitLamb, **options))
    x = torch.cat([w.detach().view(-1) for w in Given(*shapes).weights]).numpy()
    reduce: Any = papers.OnebitAllReduce(64, chunks_of(n, ranks))
    if ranks == 1:
        reduce = alone
    ends = np.cumsum([int(np.prod(s)) for s in shapes])
    tensors = [slice(end - int(np.prod(s)), end) for end, s in zip(ends, shapes, strict=True)]
    want = papers.onebit_lamb(
        x, grads, reduce, tensors,
        freeze_step=freeze, lr=0.01, beta1=0.8, beta2=0.95, beta3=0.5, eps=1e-3, phi=(0.1, 3.0),
        factor=(0.7, 1.5, 0.2),
    )  # fmt: skip
    for rank, params in enumerate(got):
        assert np.array_equal(params, got[0])
        np.testing.assert_allclose(params, want[:, rank], rtol=2e-3, atol=2e-4)


def alone(xs: np.ndarray) -> np.ndarray:
    """What a single rank agrees on with itself."""
    return xs[0]


@examples(times=1)
@given(SHAPES, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_diloco_and_local_sgd_are_their_papers(
    shapes: list[tuple[int, ...]], ranks: int, every: int, nesterov: bool, seed: int
) -> None:
    n = sum(int(np.prod(s)) for s in shapes)
    grads = gradients(7, ranks, n, seed)
    x = torch.cat([w.detach().view(-1) for w in Given(*shapes).weights]).numpy()
    outer = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": nesterov, "sync_every": every}
    adam = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "compressor": None}
    inner = papers.Adamw(ranks, n, lr=0.01, beta1=0.8, beta2=0.95, eps=1e-3, decay=0.1)
    got = sim.run(ranks, lambda r: train(r, grads, shapes, stage=0, optimizer=DiLoCo, **adam, **outer))
    want = papers.local_steps(x, grads, inner, every=every, outer_lr=0.7, momentum=0.9, nesterov=nesterov)
    for rank, params in enumerate(got):
        np.testing.assert_allclose(params, want[:, rank], rtol=1e-3, atol=1e-5)
    plain = {"sync_every": every, "lr": 0.1, "compressor": None}
    got = sim.run(ranks, lambda r: train(r, grads, shapes, stage=0, optimizer=LocalSGD, **plain))
    want = papers.local_steps(
        x, grads, lambda x, g, _: x - 0.1 * g, every=every, outer_lr=1.0, momentum=0.0, nesterov=False
    )
    for rank, params in enumerate(got):
        np.testing.assert_allclose(params, want[:, rank], rtol=1e-3, atol=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("placement", [{"stage": 0}, {"stage": 1}, {"stage": 2, "mics_shard_size": 2}], ids=str)
def test_a_warm_up_ends_when_the_variance_is_stable(placement: dict[str, Any]) -> None:
    """β2 = 0.8: looked at every 5 steps, frozen when ‖v‖₁ has changed by less than 4 %; the forecast knows of it."""
    shapes, steps = [(33, 3), (7,)], 40
    grads = gradients(1, 4, 106).repeat(steps, 0)
    grads *= np.where(np.arange(steps) < 8, 3.0, 1.0)[:, None, None].astype(np.float32)
    v, norms, want = np.zeros(106), {}, None
    for t, g in enumerate(grads, 1):
        v = 0.8 * v + 0.2 * g.mean(0) ** 2
        if t % 5 == 0:
            norms[t] = v.sum()
            before = norms.get(t - 5, 0.0)
            if want is None and min(before, v.sum()) >= 0.96 * max(before, v.sum()):
                want = t

    def fn(rank: int) -> Any:
        model = Given(*shapes)
        options = {"freeze_step": "auto", "betas": (0.9, 0.8), "lr": 1e-3, "compressor": GROUP, **placement}
        optimizer = ZeroOptimizer(model, optimizer=OnebitAdam, **options)
        for step in grads:
            expected = optimizer.forecast().wire_bytes
            optimizer.comm.log.reset()
            model(torch.from_numpy(step[rank])).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent = {op: row.wire_bytes for op, row in optimizer.comm.log.ops.items() if row.wire_bytes}
            assert sent == expected
        return optimizer.param_groups[0]["freeze_step"]

    assert want is not None
    assert sim.run(4, fn) == [want] * 4
