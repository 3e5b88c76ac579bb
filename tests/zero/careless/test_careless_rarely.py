"""Uses that are rare: each computes what plain torch computes, or is refused, and the next correct step is correct."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.zero.blocks import RATE, STAGES, Blocks, build, check, data, one_step, twin
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.shard.runtime.residency import ResidencyPolicy
from zoo.zero import (
    GatheredParameters,
    Precision,
    ZeroOptimizer,
    get_full_grads,
    get_full_optimizer_states,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_grad,
)

# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    "wrong", [torch.ones(1).double(), torch.ones(4).double(), torch.ones(6, 4), torch.ones(4, 6).double().t()[:1], 3.0]
)
def test_a_gradient_that_is_assigned_has_the_shape_and_the_dtype_of_its_own(stage: int, wrong: Any) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with pytest.raises(ValueError, match=r"the gradient of 'first.weight' was given a .* it takes one of \(6, 4\)"):
            model.first.weight.grad = wrong
        with pytest.raises((RuntimeError, TypeError)):
            Blocks().double().first.weight.grad = wrong
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


def test_a_gradient_that_is_assigned_has_the_dtype_of_gradients_or_of_parameters() -> None:
    def fn(rank: int) -> None:
        model = Blocks()
        precision = Precision(param=torch.bfloat16, accumulate=torch.float32)
        ZeroOptimizer(model, stage=1, optimizer=torch.optim.SGD, lr=RATE, precision=precision)
        for dtype in (torch.float32, torch.bfloat16):
            model.first.weight.grad = torch.full((6, 4), 1.5, dtype=dtype)
            found = model.first.weight.grad
            assert found is not None
            assert found.dtype is torch.float32
            assert bool((found == 1.5).all())
        with pytest.raises(ValueError, match=r"it takes one of \(6, 4\), torch.float32 or torch.bfloat16"):
            model.first.weight.grad = torch.ones(6, 4, dtype=torch.float16)

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("waits", [False, True])
def test_a_gradient_that_a_hook_replaces_while_it_arrives(stage: int, waits: bool) -> None:
    """It is whole then at every stage, whatever becomes of it afterwards."""

    def clamps(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clamps)
        with optimizer.no_sync() if waits else contextlib.nullcontext():
            optimizer.backward(model(data(rank)).square().mean())
        optimizer.step()
        check(optimizer, expected)

    plain = Blocks().double()
    sums = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for rank in range(2):
        plain.zero_grad()
        plain(data(rank)).square().mean().backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            sums[name] += p.grad.clamp(-0.01, 0.01) / 2
    expected = {name: p.detach() - RATE * sums[name] for name, p in plain.named_parameters()}
    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_one_rank_has_dropped_is_neither_read_nor_set(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        parameter, value = model.first.weight, torch.ones(6, 4).double()
        optimizer.backward(model(data(rank)).square().mean())
        if rank == 0:
            for each in model.first.parameters():
                each.grad = None
        with pytest.raises(ValueError, match=r"setting a value of 'first.weight' failed: rank 0: .* has no gradient"):
            safe_set_full_grad(parameter, value)
        if stage:
            with pytest.raises(CollectiveMismatchError, match="gradient of 'first"):
                safe_get_full_grad(parameter)
            with pytest.raises(CollectiveMismatchError, match="gradient of 'first"):
                list(get_full_grads([parameter]))
        optimizer.zero_grad()
        assert safe_get_full_grad(parameter) is None
        optimizer.backward(model(data(rank)).square().mean())
        safe_set_full_grad(parameter, value)
        found = safe_get_full_grad(parameter)
        assert found is not None
        assert torch.equal(found, value)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_no_memory_for_a_copy_of_what_is_to_be_written(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Nothing stays held, and a closed model is an ordinary one."""

    def no_memory(self: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(GatheredParameters, "_look", no_memory)

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with pytest.raises(MemoryError), GatheredParameters(model.first.weight, modifier_rank=0):
            raise AssertionError("not reached")
        assert not any(bucket.active for bucket in optimizer.buckets)
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))
        optimizer.close()

    sim.run(2, fn)


def test_a_norm_that_is_none_is_refused_without_gradients_too() -> None:
    def fn(rank: int) -> None:
        _, optimizer = build(2)
        for wrong in (math.nan, -1.0):
            with pytest.raises(ValueError, match="must be a norm >= 0"):
                optimizer.clip_grad_norm_(wrong)
        assert optimizer.clip_grad_norm_(1.0) == 0.0

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("frozen", ["first", "last", "blocks.1", "blocks", "blocks.1.weight"])
@pytest.mark.parametrize(("stage", "options"), [(0, {}), (2, {}), (3, {}), (3, {"overlap_comm": False})])
def test_parameters_that_are_frozen_for_a_while_on_one_rank(stage: int, options: dict[str, Any], frozen: str) -> None:
    """Their unit's output may need no gradient there; on the other rank backward comes back to it."""

    def freeze(model: nn.Module, on: bool) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (on and name.startswith(frozen)))

    def fn(rank: int) -> None:
        model, optimizer = build(stage, **options)
        freeze(model, rank == 0)
        one_step(model, optimizer, rank)
        freeze(model, False)
        one_step(model, optimizer, rank, 1)
        check(optimizer, expected)

    plain = Blocks().double()
    sgd = torch.optim.SGD(plain.parameters(), lr=RATE)
    for step in range(2):
        for rank in range(2):
            freeze(plain, rank == 0 and step == 0)
            (plain(data(rank, step)).square().mean() / 2).backward()
        sgd.step()
        sgd.zero_grad()
    expected = {n: p.detach() for n, p in plain.named_parameters()}
    sim.run(2, fn)


# Steps that fail -----------------------------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        if self.fails:
            raise RuntimeError("on purpose")
        return done


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 10**6])
def test_ranks_have_the_same_parameters_after_a_step_that_the_optimizer_fails(stage: int, size: int) -> None:
    """What it had changed by then is changed, as in plain torch, and the next step goes on from there."""

    def fn(rank: int) -> None:
        model, optimizer = build(stage, optimizer=Failing, reduce_bucket_size=size)
        optimizer.inner.fails = True
        optimizer.backward(model(data(rank)).square().mean())
        with pytest.raises(RuntimeError, match="on purpose"):
            optimizer.step()
        optimizer.inner.fails = False
        optimizer.zero_grad()
        check(optimizer, twin(2))
        with optimizer.gathered():
            mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, mine)
        assert torch.equal(*everyone)
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


def test_an_update_in_backward_that_fails_is_the_end_until_a_state_is_loaded() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(2, optimizer=Failing, update_in_backward=True)
        state = optimizer.state_dict()
        optimizer.inner.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            model(data(rank)).square().mean().backward()
        optimizer.inner.fails = False
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="incomplete since a step failed"):
            one_step(model, optimizer, rank)
        optimizer.load_state_dict(state)
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_load_that_fails_at_what_is_frozen_leaves_a_state_that_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model = Blocks().double()
        model.first.requires_grad_(False)
        _, optimizer = build(stage, model)
        values = dict(Blocks().double().named_parameters())

        def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
            if role != "parameter" or (lacks and name.startswith("first")):
                raise KeyError(name)
            return values[name].detach().reshape(-1)[start : start + length]

        lacks = True
        with pytest.raises(KeyError, match="first"):
            optimizer.load_state(read, {})
        with pytest.raises(RuntimeError, match="the training state is incomplete"):
            one_step(model, optimizer, rank)
        lacks = False
        optimizer.load_state(read, {})
        optimizer.zero_grad()
        one_step(model, optimizer, rank)

    sim.run(2, fn)


# Groups, instances ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_states_of_groups_that_keep_others(stage: int) -> None:
    """Also where parameters of both groups are in one bucket, whichever of them comes first."""

    def fn(rank: int) -> None:
        for first in range(2):
            model = Blocks().double()
            every = list(model.parameters())
            groups = [{"params": every[first::2], "momentum": 0.9}, {"params": every[1 - first :: 2]}]
            _, optimizer = build(stage, model, params=groups, reduce_bucket_size=10**6)
            one_step(model, optimizer, rank)
            found = dict(get_full_optimizer_states(every, "momentum_buffer"))
            assert len(found) == len(every)
            for number, (name, parameter) in enumerate(model.named_parameters()):
                one = safe_get_full_optimizer_state(parameter, "momentum_buffer")
                assert (one is None) == (number % 2 != first)
                assert found[name] is None if one is None else torch.equal(found[name], one)

    sim.run(2, fn)


class OfWhole(torch.optim.Optimizer):
    """Looks at the norm of a parameter: it gets them as they are."""

    def __init__(self, params: Any, lr: float = RATE) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (1.0 + p.norm()))


@pytest.mark.parametrize("named", [False, True])
def test_an_instance_has_frozen_parameters_in_its_groups(named: bool) -> None:
    def given(model: nn.Module) -> Any:
        return model.named_parameters() if named else model.parameters()

    def made() -> nn.Module:
        model = Blocks().double()
        model.blocks.requires_grad_(False)
        return model

    def fn(rank: int) -> None:
        model = made()
        optimizer = ZeroOptimizer(model, stage=0, optimizer=OfWhole(given(model)))
        one_step(model, optimizer, rank)
        check(optimizer, {n: p.detach() for n, p in plain.named_parameters()})

    plain = made()
    of_whole = OfWhole(given(plain))
    for rank in range(2):
        (plain(data(rank)).square().mean() / 2).backward()
    of_whole.step()
    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("watched", [False, True])
def test_an_instance_is_taken_over_again_after_close(stage: int, watched: bool) -> None:
    def fn(rank: int) -> None:
        model = Blocks().double()
        instance = torch.optim.SGD(model.parameters(), lr=RATE)
        if watched:
            torch.optim.lr_scheduler.ConstantLR(instance, 1.0, total_iters=1)
        optimizer = ZeroOptimizer(model, stage=stage, optimizer=instance)
        with pytest.raises(ValueError, match="has taken over already"):
            ZeroOptimizer(Blocks().double(), stage=stage, optimizer=instance)
        one_step(model, optimizer, rank)
        optimizer.close()
        with pytest.raises(ValueError, match=r"step\(\) .* which was closed since: .* Construct a new SGD"):
            instance.step()
        optimizer = ZeroOptimizer(model, stage=stage, optimizer=instance)
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))
        assert len(instance._optimizer_step_post_hooks) == 1
        optimizer.close()

    sim.run(2, fn)


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, 3])
def test_states_that_are_kept_keep_neither_model_nor_optimizer(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        state, alive = optimizer.state_dict(), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        assert alive() is None
        assert state["slices"]
        with pytest.raises(ValueError, match="the optimizer is gone since"):
            state["state"]

    sim.run(1, fn)


def test_states_after_close() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(1, momentum=0.9)
        one_step(model, optimizer, rank)
        assert list(optimizer.state[model.first.weight]) == ["momentum_buffer"]
        optimizer.close()
        with pytest.raises(ValueError, match="this optimizer was closed"):
            optimizer.state[model.first.weight]

    sim.run(2, fn)


# Where it does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_close_inside_of_gathered_parameters(stage: int) -> None:
    """Only the rank that writes would have what it wrote."""

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with GatheredParameters(model.first.weight, modifier_rank=0):
            if rank == 0:
                model.first.weight.data.fill_(3.0)
            with pytest.raises(RuntimeError, match=r"close\(\) inside of GatheredParameters"):
                optimizer.close()
        optimizer.close()
        assert bool((model.first.weight == 3.0).all())
        assert type(model.first.weight) is nn.Parameter

    sim.run(2, fn)


def test_a_residency_policy_inside_of_a_window() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3)
        with optimizer.sharded.window(max_bytes=2**20) as window:
            with pytest.raises(RuntimeError, match=r"use_residency\(\) inside of a window"):
                optimizer.sharded.use_residency(ResidencyPolicy())
            with window.forward(0):
                loss = model(data(rank)).square().mean()
            with window.backward(0, reduce=True):
                loss.backward()
        optimizer.step()
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_to_while_it_is_read_is_told_as_it_is(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        what = "would be lost" if stage == 3 else "stays on this rank alone"
        with pytest.raises(RuntimeError, match=f"the change {what}"), GatheredParameters(model.first.weight):
            model.first.weight.data.zero_()
        found = optimizer.consolidated_parameters()["first.weight"]
        assert bool((found == 0).all()) == (stage < 3)

    sim.run(2, fn)


def test_units_that_are_given_by_a_generator() -> None:
    def fn(rank: int) -> None:
        model = Blocks().double()
        chosen: Any = (unit for unit in (nn.Embedding, model.first, *model.blocks))
        _, optimizer = build(3, model, units=chosen)
        assert [unit.name for unit in optimizer.runtime.units] == ["", "first", "blocks.0", "blocks.1", "blocks.2"]
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)
