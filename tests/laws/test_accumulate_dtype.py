"""Law: gradients of several backwards are added up in ``accumulate`` at every stage: G = Σ A(mean_r R(Σ A(g))).

A is Precision.accumulate, R is Precision.reduce or else A; the inner sum is over the backwards of a rank since the
latest reduction, the outer one over reductions. The reference does it in one process, operation by operation.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import zoo.optim
from zoo import sim
from zoo.zero import Precision, ZeroOptimizer, safe_get_full_grad

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Values = dict[str, torch.Tensor]
USUAL: dict[str, Any] = {"dtype": BF16, "accumulate": FP32, "reduce": None, "seed": 0, "threshold": 0, "bucket": 60}


class Net(nn.Module):
    """A frozen layer, a parameter of one element, and one that some passes do without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, *, short: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks[: 1 if short else 2]:
            x = x + torch.tanh(block(x))
        return self.frozen(x) * self.scale  # type: ignore[no-any-return]


def loss_of(model: nn.Module, rank: int, index: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * index + rank))
    return model(x.to(dtype), short=index % 3 == 1).float().square().mean()  # type: ignore[no-any-return]


def reference(
    cls: Any, world: int, steps: list[list[bool]], dtype: torch.dtype, accumulate: torch.dtype, reduce: torch.dtype
) -> tuple[list[Values], Values]:
    """The mean gradients of each step, and the masters after the last: plain torch in one process."""
    masters = {n: p for n, p in Net().to(dtype).float().named_parameters() if p.requires_grad}
    optimizer = cls(list(masters.values()), lr=0.01)
    computing = Net().to(dtype)
    copies = {n: p for n, p in computing.named_parameters() if p.requires_grad}
    index, history = 0, []
    for syncs in steps:
        total: Values = {}
        local: list[Values] = [{} for _ in range(world)]
        for sync in [*syncs[:-1], True]:
            for rank in range(world):
                loss = loss_of(computing, rank, index, dtype)
                found = torch.autograd.grad(loss, list(copies.values()), allow_unused=True)
                for name, gradient in zip(copies, found, strict=True):
                    one = torch.zeros_like(copies[name]) if gradient is None else gradient
                    before = local[rank].get(name)
                    local[rank][name] = one.to(accumulate) if before is None else before + one.to(accumulate)
            index += 1
            if sync:
                for name in copies:
                    mean = local[0][name].to(reduce)
                    for rank in range(1, world):
                        mean = mean + local[rank][name].to(reduce)
                    mean = (mean * (1.0 / world)).to(accumulate)
                    total[name] = total[name] + mean if name in total else mean
                local = [{} for _ in range(world)]
        history.append(total)
        for name, master in masters.items():
            master.grad = total[name].float()
        optimizer.step()
        for name, master in masters.items():
            copies[name].data.copy_(master.data)
    return history, {n: p.detach() for n, p in masters.items()}


def train(
    cls: Any, rank: int, steps: list[list[bool]], dtype: torch.dtype, **options: Any
) -> tuple[list[Values], Values, ZeroOptimizer]:
    model = Net().to(dtype)
    optimizer = ZeroOptimizer(model, optimizer=cls, lr=0.01, **options)
    index, history = 0, []
    for syncs in steps:
        for sync in [*syncs[:-1], True]:
            if sync:
                loss_of(model, rank, index, dtype).backward()  # type: ignore[no-untyped-call]
            else:
                with optimizer.no_sync():
                    loss_of(model, rank, index, dtype).backward()  # type: ignore[no-untyped-call]
            index += 1
        found = {n: safe_get_full_grad(p) for n, p in model.named_parameters() if p.requires_grad}
        history.append({n: g for n, g in found.items() if g is not None})
        optimizer.step()
        optimizer.zero_grad()
    return history, {n: s.clone() for n, s in masters_of(optimizer).items()}, optimizer


def masters_of(optimizer: ZeroOptimizer) -> Values:
    from zoo.zero import safe_get_full_fp32_param

    return {n: safe_get_full_fp32_param(p) for n, p in optimizer.model.named_parameters() if p.requires_grad}


@pytest.mark.dear
@given(
    world=st.integers(1, 4),
    stage=st.integers(0, 3),
    cls=st.sampled_from([torch.optim.SGD, torch.optim.AdamW, zoo.optim.AdamW]),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    accumulate=st.sampled_from([BF16, FP16, FP32]),
    reduce=st.sampled_from([None, BF16, FP32]),
    steps=st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=2),
    bucket=st.sampled_from([1, 60, 10**6]),
    threshold=st.sampled_from([0, 10]),
    seed=st.integers(0, 20),
)
@example(**USUAL, world=2, stage=0, cls=torch.optim.AdamW, steps=[[True, True, True], [False, True]])
@example(**USUAL, world=2, stage=1, cls=torch.optim.SGD, steps=[[False, True, False], [True]])
@example(**USUAL, world=3, stage=2, cls=zoo.optim.AdamW, steps=[[True, False, True], [False, False]])
@example(**USUAL, world=2, stage=3, cls=zoo.optim.AdamW, steps=[[True, True, True], [False, True]])
@example(**{**USUAL, "accumulate": BF16, "reduce": FP32}, world=2, stage=2, cls=torch.optim.SGD, steps=[[True, True]])
def test_gradients_are_added_up_in_the_dtype_that_was_asked_for(
    world: int, stage: int, cls: Any, dtype: torch.dtype, accumulate: torch.dtype, reduce: torch.dtype | None,
    steps: list[list[bool]], bucket: int, threshold: int, seed: int,
) -> None:  # fmt: skip
    wanted, masters = reference(cls, world, steps, dtype, accumulate, reduce or accumulate)

    def fn(rank: int) -> tuple[list[Values], Values]:
        return train(
            cls, rank, steps, dtype, stage=stage, precision=Precision(accumulate=accumulate, reduce=reduce),
            reduce_bucket_size=bucket, param_persistence_threshold=threshold,
        )[:2]  # fmt: skip

    with sim.defaults(semantics="gloo", transport="native"):  # which adds in the order of the ranks
        for history, found in sim.run(world, fn, seed=seed):
            for gradients, expected in zip(history, wanted, strict=True):
                for name, gradient in expected.items():
                    assert torch.equal(gradients[name], gradient.float()), name
            for name, master in masters.items():
                assert torch.equal(found[name], master), name


SUMS = Precision(accumulate=FP32)
STEPS = [[False, True, True], [True, False]]


@pytest.mark.matrix
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, zoo.optim.AdamW])
def test_offloading_changes_no_bit(stage: int, tier: str, cls: Any, tmp_path: Any) -> None:
    def fn(rank: int) -> None:
        plain, offloaded = (
            train(
                cls, rank, STEPS, BF16, stage=stage, precision=Precision(accumulate=FP32), sub_group_size=50, **options
            )[:2]
            for options in ({}, {"offload_optimizer": {"device": tier, "nvme_path": str(tmp_path)}})
        )
        for one, other in zip([*plain[0], plain[1]], [*offloaded[0], offloaded[1]], strict=True):
            assert all(torch.equal(value, other[name]) for name, value in one.items())

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_gradients_have_room(stage: int, tmp_path: Any) -> None:
    """Several pages of a file each; what is read and written is what the forecast says."""

    def fn(rank: int) -> None:
        found = []
        for device in ("none", "nvme"):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(BF16)
            optimizer = ZeroOptimizer(
                model, stage=stage, lr=0.01, reduce_bucket_size=1, precision=SUMS, sub_group_size=3000,
                param_persistence_threshold=0, offload_optimizer={"device": device, "nvme_path": str(tmp_path)},
            )  # fmt: skip
            for step in range(3):
                before = optimizer.nvme_traffic()
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            read, written = (now - then for now, then in zip(optimizer.nvme_traffic(), before, strict=True))
            forecast = optimizer.forecast()
            assert (read, written) == (forecast.nvme_read_bytes, forecast.nvme_written_bytes)
            found.append(optimizer.consolidated_parameters())
        assert all(torch.equal(found[1][name], value) for name, value in found[0].items())

    sim.run(2, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulate", [None, FP32])
@pytest.mark.parametrize("reduce", [None, BF16])
def test_the_forecast_is_what_is_held_and_sent(stage: int, accumulate: Any, reduce: Any) -> None:
    def fn(rank: int) -> None:
        model = Net().to(BF16)
        optimizer = ZeroOptimizer(
            model, stage=stage, lr=0.01, precision=Precision(accumulate=accumulate, reduce=reduce), clip_norm=1.0,
            param_persistence_threshold=10,
        )  # fmt: skip
        for index in range(2):
            optimizer.comm.log.reset()
            loss_of(model, rank, 0, BF16).backward()  # type: ignore[no-untyped-call]
            assert optimizer.memory()["gradients"] == optimizer.forecast().gradients_bytes
            optimizer.step()
            optimizer.zero_grad()
            forecast = optimizer.forecast()
            if index:
                sent = {op: row.wire_bytes for op, row in optimizer.comm.log.ops.items() if row.wire_bytes}
                assert sent == forecast.wire_bytes
        numel = sum(b.layout.size for b in optimizer.buckets if b.spec.trainable) // (2 if stage >= 2 else 1)
        assert forecast.gradients_bytes == numel * (2 if accumulate is None else 4)

    sim.run(2, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_scale_and_clipping(stage: int) -> None:
    """A power of two is taken off exactly, and the norm is that of the sum."""

    def fn(rank: int) -> None:
        found = []
        for scale in (None, 1024.0):
            model = Net().to(BF16)
            optimizer = ZeroOptimizer(
                model, stage=stage, optimizer=torch.optim.SGD, lr=0.01, precision=SUMS, loss_scale=scale,
                clip_norm=0.01,
            )  # fmt: skip
            for index in range(3):
                optimizer.backward(loss_of(model, rank, index, BF16))
            gradients = {n: safe_get_full_grad(p) for n, p in model.named_parameters() if p.requires_grad}
            norm = torch.stack([g.double().norm() for g in gradients.values() if g is not None]).norm()
            optimizer.step()
            assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-6)
            found.append((gradients, masters_of(optimizer)))
        for name, value in found[0][1].items():
            torch.testing.assert_close(found[1][1][name], value, rtol=1e-6, atol=0)
            assert torch.equal(found[0][0][name], found[1][0][name])  # type: ignore[arg-type]

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_that_bfloat16_would_round_away(stage: int) -> None:
    """256 + 1 is 256 in bfloat16: what is added after a large gradient counts in fp32 alone."""

    def fn(rank: int, accumulate: torch.dtype | None) -> float:
        model = nn.Linear(1, 1, bias=False, dtype=BF16)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.01, precision=Precision(accumulate=accumulate)
        )
        for value in (256.0, *[1.0] * 8):  # reduced each time
            model(torch.tensor([[value]], dtype=BF16)).sum().backward()
        gradient = safe_get_full_grad(model.weight)
        assert gradient is not None
        optimizer.zero_grad()
        return float(gradient)

    assert sim.run(2, lambda rank: fn(rank, None), seed=0) == [256.0, 256.0]
    assert sim.run(2, lambda rank: fn(rank, FP32), seed=0) == [264.0, 264.0]


def test_what_grad_is_and_how_a_model_comes_back() -> None:
    def fn(rank: int) -> None:
        model = Net().to(BF16)
        optimizer = ZeroOptimizer(model, stage=1, lr=0.01, precision=Precision(accumulate=FP32))
        with optimizer.no_sync():
            loss_of(model, rank, 0, BF16).backward()  # type: ignore[no-untyped-call]
        weight = model.first.weight
        assert weight.grad is not None
        assert weight.grad.dtype is FP32
        copied = copy.deepcopy(model)
        assert copied.first.weight.grad_dtype is BF16
        optimizer.sharded.accumulate(weight, torch.ones_like(weight))
        before = weight.grad.clone()
        weight.grad = torch.zeros_like(weight)  # as torch takes it: of the parameter's dtype
        assert weight.grad.dtype is FP32
        assert not weight.grad.any()
        assert before.any()
        optimizer.step()
        assert weight.grad is not None  # a shard of the mean
        assert weight.grad.dtype is FP32
        optimizer.close()
        loss_of(model, rank, 0, BF16).backward()  # type: ignore[no-untyped-call]
        assert model.first.weight.grad is not None
        assert model.first.weight.grad.dtype is BF16

    sim.run(2, fn, seed=0)


def test_a_dtype_that_cannot_be() -> None:
    with pytest.raises(
        ValueError, match=r"Precision\(accumulate=torch.int32\); the gradients of several backwards are added"
    ):
        ZeroOptimizer(nn.Linear(2, 2), lr=0.1, precision=Precision(accumulate=torch.int32))
