"""Micro-batches that a schedule drives: the bits of the hooks, memory within the budget, one defined end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.shard.runtime.micro_batches import WIDTH, Case, Model, build, cases, data, drive, hooks, train
from torch import nn

from zoo import sim
from zoo.shard import Window
from zoo.shard.parameters import Presence
from zoo.zero import ShardedModel, ZeroOptimizer


@pytest.mark.dear
@given(cases())
@example(Case(stage=3, max_bytes=10**6))
@example(Case(stage=1, each=(0, 1, 2)))
@example(Case(stage=3, nested=True, shared=True, max_bytes=500, silent=(1,)))
@example(Case(stage=3, world=4, hpz=True, max_bytes=0, recompute=True))
def test_driven_from_outside_has_the_bits_of_the_hooks(case: Case) -> None:
    expected = sim.run(case.world, lambda rank: train(case, hooks, rank))
    found = sim.run(case.world, lambda rank: train(case, drive, rank), seed=case.seed)
    for rank, ((losses, parameters), (other_losses, others)) in enumerate(zip(found, expected, strict=True)):
        assert losses == other_losses, f"rank {rank}"
        for name, value in parameters.items():
            assert torch.equal(value, others[name]), f"rank {rank}: {name}"


@contextlib.contextmanager
def watching(sharded: ShardedModel) -> Iterator[Callable[[], tuple[int, int, int]]]:
    """Returns (most bytes whole, most bytes needed at once, number of gathers) of what happens inside."""
    most = needed = gathers = 0
    opened: dict[Any, None] = {}
    partitioned = [b for b in sharded.buckets if b.partitioned]

    class Gathers:
        def unshards(self, bucket: Any, *, exact: bool, ahead: bool) -> None:
            nonlocal most, needed, gathers
            gathers += 1
            whole = [b for b in partitioned if b is bucket or b.parameters.presence is not Presence.SHARDED]
            # What a backward has opened is in use until it is past its first use.
            used = [b for b in whole if b is bucket or b.active or b in opened]
            most, needed = max(most, sum(b.num_bytes for b in whole)), max(needed, sum(b.num_bytes for b in used))

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    executor, watcher = sharded.executor, Gathers()
    executor.watchers += (watcher,)
    residency = sharded.runtime.residency
    needing, resting = residency.need, residency.rest

    def need(bucket: Any) -> None:
        opened[bucket] = None
        needing(bucket)

    def rest(bucket: Any, *, backward: bool) -> None:
        opened.pop(bucket, None)
        resting(bucket, backward=backward)

    residency.need, residency.rest = need, rest  # type: ignore[method-assign]
    try:
        yield lambda: (most, needed, gathers)
    finally:
        del residency.need, residency.rest
        executor.watchers = ()


@given(cases(), st.sampled_from([0, 200, 500, 900, 10**6]))
def test_what_is_whole_stays_within_the_budget(case: Case, budget: int) -> None:
    case = dataclasses.replace(case, stage=3, max_bytes=budget, recompute=False)

    def fn(rank: int) -> None:
        model, optimizer = build(case)
        for step in range(2):
            with watching(optimizer.sharded) as seen:
                drive(model, optimizer, case, rank, step)
            most, needed, gathers = seen()
            assert most <= max(budget, needed), (most, needed)
            partitioned = [b for b in optimizer.buckets if b.partitioned]
            if budget == 10**6:
                assert gathers == len(partitioned)  # once for the window
            optimizer.zero_grad()

    sim.run(case.world, fn, seed=case.seed)


def test_a_larger_budget_gathers_less() -> None:
    case = Case(num_blocks=8, prefetch=0, keep=0, events=(0, 1, 2, 0, 1, 2))
    counts = []

    def fn(rank: int, budget: int) -> int:
        model, optimizer = build(dataclasses.replace(case, max_bytes=budget))
        with watching(optimizer.sharded) as seen:
            drive(model, optimizer, dataclasses.replace(case, max_bytes=budget), rank, 0)
        return seen()[2]

    for budget in range(0, 3073, 512):  # a bucket of one layer takes 256 bytes, that of the model itself 512
        found = sim.run(2, lambda rank, n=budget: fn(rank, n))
        assert len(set(found)) == 1
        counts.append(found[0])
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (6 * 11, 11)
    assert len(set(counts)) > 4


# Split backward ------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Linear layers; it remembers what went into each and came out of it, as a schedule that splits backward does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, outputs: list[torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            outputs.append(layer(x))
            x = torch.tanh(outputs[-1])
        return x


def rows(rank: int, micro: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * micro + rank))


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("max_bytes", [None, 0, 10**6])
def test_a_split_backward_has_the_bits_of_the_ordinary_one(stage: int, reduce: bool, max_bytes: int | None) -> None:
    # F F I W I F I W W: the weights come as late as a schedule likes.
    plan = ["F0", "F1", "I0", "W0", "I1", "F2", "I2", "W1", "W2"]

    def fn(rank: int, split: bool) -> dict[str, torch.Tensor]:
        model = Layers()
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=50,
            max_live_parameters=0,
        )  # fmt: skip
        sharded = optimizer.sharded
        inputs, losses, inside, found = {}, {}, {}, {}
        with sharded.window(max_bytes=max_bytes) as window:
            for kind, micro in plan:
                if kind == "F":
                    inputs[micro], inside[micro] = rows(rank, int(micro)).requires_grad_(), []
                    with window.forward(micro):
                        losses[micro] = model(inputs[micro], inside[micro]).square().mean()
                elif not split:
                    if kind == "W":
                        with window.backward(micro, reduce=reduce):
                            losses[micro].backward()
                        found[micro] = inputs[micro].grad
                elif kind == "I":
                    with window.backward_inputs(micro):
                        wanted = [inputs[micro], *inside[micro]]
                        found[micro], *grads = torch.autograd.grad(losses[micro], wanted, retain_graph=True)
                    inside[micro] = list(zip(inside[micro], grads, strict=True))
                    if max_bytes is None and stage == 3:
                        assert not any(b.parameters.live for b in sharded.buckets)
                else:
                    with window.backward_weights(micro, reduce=reduce):
                        for layer, (output, grad) in zip(model.layers, inside[micro], strict=True):
                            weights = (layer.weight, layer.bias)
                            for weight, value in zip(weights, torch.autograd.grad(output, weights, grad), strict=True):
                                sharded.accumulate(weight, value)
                        if max_bytes is None and stage == 3:
                            assert not any(b.parameters.live for b in sharded.buckets)
        optimizer.step()
        return optimizer.consolidated_parameters() | {f"input {k}": v for k, v in found.items()}

    expected, got = (sim.run(2, lambda rank, s=split: fn(rank, s), seed=4) for split in (False, True))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), name


def test_several_autograd_calls_in_one_backward() -> None:
    """A stage with several outputs that are brought back one by one."""

    def fn(rank: int) -> None:
        found = []
        for parts in (1, 2):
            model = Layers()
            optimizer = ZeroOptimizer(
                model, stage=3, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1,
            )  # fmt: skip
            with optimizer.sharded.window() as window:
                with window.forward(0):
                    out = model(rows(rank, 0), [])
                with window.backward(0):
                    for part in (out.sum(),) if parts == 1 else (out[:1].sum(), out[1:].sum()):
                        part.backward(retain_graph=True)
            optimizer.step()
            found.append(optimizer.consolidated_parameters())
        plain = Layers()
        for r in range(2):
            (plain(rows(r, 0), []).sum() / 2).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for name, value in plain.named_parameters():
            for got in found:
                torch.testing.assert_close(got[name], value.detach())

    sim.run(2, fn)


# Tiers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_window_over_parameters_in_other_tiers(tier: str, tmp_path: Path) -> None:
    case = Case(events=(0, 1, 0, 1))

    def fn(rank: int) -> list[dict[str, torch.Tensor]]:
        found = []
        for offload in ({"device": "none"}, {"device": tier, "nvme_path": tmp_path, "max_in_cpu": 0}):
            model = Model(case)
            optimizer = ZeroOptimizer(
                model, stage=3, lr=0.01, param_persistence_threshold=0, reduce_bucket_size=1, offload_param=offload
            )
            for max_bytes in (None, 10**6):
                drive(model, optimizer, dataclasses.replace(case, max_bytes=max_bytes), rank, 0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(optimizer.consolidated_parameters())
        return found

    for one, other in sim.run(2, fn):
        assert all(torch.equal(one[name], other[name]) for name in one)


# Leaving in any way --------------------------------------------------------------------------------------------------


def _raise(*_: Any) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("place", ["forward", "backward", "between", "backward_inputs", "backward_weights", "caught"])
@pytest.mark.parametrize("max_bytes", [None, 500])
def test_after_an_exception_the_next_correct_step_is_correct(stage: int, place: str, max_bytes: int | None) -> None:
    case = Case(stage=stage, max_bytes=max_bytes, events=(0, 1, 1, 0))

    def fail(model: Model, window: Window, rank: int) -> None:
        if place == "forward":
            handle = model.blocks[1].register_forward_pre_hook(_raise)
            try:
                with window.forward(5):
                    model(data(rank, 5), rank)
            finally:
                handle.remove()
            return
        handle = model.blocks[1].register_full_backward_hook(_raise) if place == "backward" else None
        with window.forward(5):
            loss = model(data(rank, 5), rank).square().mean()
        if place == "between":
            _raise()
        if place == "backward_weights":
            with window.backward_inputs(5):
                torch.autograd.grad(loss, model.last.bias, retain_graph=True)
            with window.backward_weights(5):
                _raise()
        loss.register_hook(_raise if place == "caught" else lambda g: None)
        try:
            with window.backward_inputs(5) if place == "backward_inputs" else window.backward(5):
                if place == "caught":
                    with contextlib.suppress(ArithmeticError):
                        loss.backward()
                    _raise()
                if place == "backward_inputs":
                    _raise()
                loss.backward()
        finally:
            if handle is not None:
                handle.remove()

    def fn(rank: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(case)
        with contextlib.suppress(ArithmeticError), optimizer.sharded.window(max_bytes=max_bytes) as window:
            with window.forward(4):
                kept = model(data(rank, 4), rank)
            fail(model, window, rank)
            raise AssertionError("the exception vanished")
        del kept
        assert not any(b.leases or b.active for b in optimizer.buckets)
        assert all(b.parameters.presence is Presence.SHARDED for b in optimizer.buckets if b.partitioned)
        if place in ("backward", "backward_weights", "caught"):
            with pytest.raises(RuntimeError, match=r"ended with an exception.*zero_grad"):
                optimizer.step()
        optimizer.zero_grad()
        drive(model, optimizer, case, rank, 0)
        optimizer.step()
        return optimizer.consolidated_parameters()

    def undisturbed(rank: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(case)
        drive(model, optimizer, case, rank, 0)
        optimizer.step()
        return optimizer.consolidated_parameters()

    expected = sim.run(2, undisturbed)[0]
    for found in sim.run(2, fn, seed=2):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_failed_forward_leaves_the_other_micro_batches_open(stage: int) -> None:
    def fn(rank: int) -> None:
        case = Case(stage=stage)
        model, optimizer = build(case)
        with optimizer.sharded.window() as window:
            with window.forward(0):
                loss = model(data(rank, 0), rank).square().mean()
            handle = model.blocks[1].register_forward_pre_hook(_raise)
            with pytest.raises(ArithmeticError), window.forward(1):
                model(data(rank, 1), rank)
            handle.remove()
            assert window.open == [0]
            with pytest.raises(ValueError, match="micro-batch 1, which ended with an exception"), window.backward(1):
                pass
            with window.backward(0):
                loss.backward()
        optimizer.step()
        other, plain = build(case)
        other(data(rank, 0), rank).square().mean().backward()
        plain.step()
        found, expected = optimizer.consolidated_parameters(), plain.consolidated_parameters()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    sim.run(2, fn)
