"""What a careless user does, one sentence each: it computes what plain torch computes, or is refused by name.

The drawn programs of ``tests/laws/test_careless.py`` put the same uses together in any order.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.zero.blocks import RATE, STAGES, Blocks, build, check, check_update, data, one_step, twin
from torch import nn

import zoo.optim
from zoo import sim
from zoo.zero import PartitionedAccessError, ZeroOptimizer

# 1 and 2: outputs that nobody brings back, exceptions ----------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
@pytest.mark.parametrize("dropped_later", [False, True])
def test_outputs_that_some_ranks_keep_change_no_order(stage: int, dropped_later: bool) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        kept = []
        for step in range(3):
            output = model(data(rank, 7))
            if rank == 1:
                kept.append(output)
            del output
            loss = model(data(rank, step)).square().mean()
            if dropped_later:
                kept.clear()
                gc.collect(1)  # what is young: a whole collection takes longer than the rest of this
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        check(optimizer, twin(2, 3))

    for seed in range(3):
        sim.run(2, fn, seed=seed)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_a_whole_forward_that_only_some_ranks_lead_to_the_loss(stage: int) -> None:
    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        first, second = model(data(rank)).square().mean(), model(data(rank, 1)).square().mean()
        return first if rank == 1 else first + second if rank == 0 else second

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        loss_of(model, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        one_step(model, optimizer, rank, 5)
        check(optimizer, expected)

    plain = Blocks().double()
    reference = torch.optim.SGD(plain.parameters(), lr=RATE)
    for loss in (loss_of, lambda model, rank: model(data(rank, 5)).square().mean()):
        reference.zero_grad()
        for rank in range(3):
            (loss(plain, rank) / 3).backward()
        reference.step()
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(3, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards_in_any_order(stage: int, order: tuple[int, int]) -> None:
    def run(model: nn.Module, rank: int, world: int) -> None:
        losses = [model(data(rank, step)).square().mean() / world for step in range(2)]
        for index in order:
            losses[index].backward()

    check_update(stage, run)


def _raise(*_: Any) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", ["forward", "backward", "hook"])
@pytest.mark.parametrize("overlap", [True, False])
def test_after_an_exception_the_next_correct_step_is_correct(stage: int, place: str, overlap: bool) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, overlap_comm=overlap)
        x = data(rank, 9)
        if place == "forward":
            handle = model.blocks[1].register_forward_pre_hook(_raise)
        elif place == "backward":
            handle = model.blocks[1].register_full_backward_hook(_raise)
        else:
            handle = model.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(_raise) and None)
        with pytest.raises(ArithmeticError):
            model(x).square().mean().backward()
        handle.remove()
        if place != "forward":
            with pytest.raises(RuntimeError, match=r"ended with an exception.*zero_grad"):
                optimizer.step()
            with pytest.raises(RuntimeError, match=r"ended with an exception.*zero_grad"):
                model(data(rank)).square().mean().backward()
            optimizer.zero_grad()
        for step in range(2):
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_through_a_forward_before_the_update_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        old = model(data(rank, 3)).square().mean()
        one_step(model, optimizer, rank)
        with pytest.raises(RuntimeError, match="older than the latest step"):
            old.backward()
        optimizer.zero_grad()
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_between_forward_and_backward(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for step in range(2):
            loss = model(data(rank, step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


# 3: gradients for something else -------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["grad", "inputs", "weights"])
def test_gradients_for_inputs_are_no_step(stage: int, way: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, weight_decay=0.1, momentum=0.9)
        one_step(model, optimizer, rank)
        before = optimizer.consolidated_parameters()
        x = data(rank, 1).requires_grad_()
        loss = model(x).square().mean()
        if way == "grad":
            (found,) = torch.autograd.grad(loss, x)
        elif way == "inputs":
            loss.backward(inputs=[x])
            found = x.grad
        else:
            (found,) = torch.autograd.grad(loss, model.blocks[0].weight)
        plain = Blocks().double()
        plain.load_state_dict(before)
        y = x.detach().clone().requires_grad_()
        wanted = plain.blocks[0].weight if way == "weights" else y
        (expected,) = torch.autograd.grad(plain(y).square().mean(), wanted)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        optimizer.step()
        after = optimizer.consolidated_parameters()
        assert all(torch.equal(before[n], after[n]) for n in before)
        optimizer.zero_grad()
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2, weight_decay=0.1, momentum=0.9))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_for_inputs_before_the_backward_of_the_same_graph(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        x = data(rank).requires_grad_()
        loss = model(x).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        optimizer.step()
        check(optimizer, twin(2))

    sim.run(2, fn)


# 4 and 5: values that are written ------------------------------------------------------------------------------------


def _write_data(model: nn.Module, name: str, value: torch.Tensor) -> None:
    model.get_parameter(name).data = value


def _write_through_data(model: nn.Module, name: str, value: torch.Tensor) -> None:
    model.get_parameter(name).data.copy_(value)


def _write_in_place(model: nn.Module, name: str, value: torch.Tensor) -> None:
    with torch.no_grad():
        model.get_parameter(name).copy_(value)


def _write_state_dict(model: nn.Module, name: str, value: torch.Tensor) -> None:
    model.load_state_dict({**model.state_dict(), name: value})


WRITES = [_write_data, _write_through_data, _write_in_place, _write_state_dict]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cls", [torch.optim.SGD, zoo.optim.AdamW])
def test_written_values_stay(stage: int, write: Any, dtype: torch.dtype, cls: Any) -> None:
    def fn(rank: int) -> None:
        model = Blocks().to(dtype)
        threshold = 10**6 if stage == 3 else 0  # whole on every rank, as at the other stages
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=cls, lr=2.0**-10, param_persistence_threshold=threshold, reduce_bucket_size=1
        )
        value = torch.full((6, 6), 3.0, dtype=dtype)
        for step in range(2):
            model(data(rank, step).to(dtype)).square().mean().backward()
            if step == 1:
                write(model, "blocks.1.weight", value)
            optimizer.step()
            optimizer.zero_grad()
        got = optimizer.consolidated_parameters()["blocks.1.weight"]
        assert float((got - value).abs().max()) < 0.1
        saved = {s.name: s.tensor for s in optimizer.state_slices() if s.role == "parameter"}
        if "blocks.1.weight" in saved:
            assert float((saved["blocks.1.weight"] - 3.0).abs().max()) < 0.1

    sim.run(2, fn)


def test_data_of_a_partitioned_parameter_is_every_ranks_part() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3)
        value = torch.arange(36, dtype=torch.float64).view(6, 6)
        model.blocks[1].weight.data = value
        got = optimizer.consolidated_parameters()["blocks.1.weight"]
        assert torch.equal(got, value)
        with pytest.raises(PartitionedAccessError, match=r"blocks\.1\.weight"):
            model.blocks[1].weight.data.sum()

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_another_shape_or_dtype_for_data_is_refused(stage: int) -> None:
    model, optimizer = build(stage)
    with pytest.raises(ValueError, match=r"blocks\.1\.weight.*shape \(2, 2\)"):
        model.blocks[1].weight.data = torch.zeros(2, 2, dtype=torch.float64)
    for change in (lambda: model.half(), lambda: model.to(torch.float32)):
        with pytest.raises(ValueError, match=r"first\.weight.*before the optimizer"):
            change()
    model.to(torch.float64)
    model.cpu()
    one_step(model, optimizer, 0)
    check(optimizer, twin(1))


def test_a_write_that_a_partitioned_parameter_would_lose_is_refused() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3)

        def write(module: nn.Module, args: Any) -> None:
            with torch.no_grad():
                module.weight.mul_(0.5)

        handle = model.blocks[1].register_forward_pre_hook(write)
        model(data(rank)).square().mean()
        handle.remove()
        model(data(rank)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"blocks\.1\.weight.*written to"):
            optimizer.step()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


# 6 to 9: gradients and steps -----------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_the_model(stage: int, to_none: bool) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, momentum=0.9)
        for step in range(3):
            model(data(rank, step)).square().mean().backward()
            optimizer.step()
            model.zero_grad(set_to_none=to_none)
        if to_none:
            optimizer.step()  # without gradients nothing moves, as in torch
        check(optimizer, twin(2, 3, momentum=0.9))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reduced_gradient_is_there_and_cannot_be_computed_with(stage: int) -> None:
    def fn(rank: int) -> None:
        model, _ = build(stage)
        model(data(rank)).square().mean().backward()
        gradient = model.blocks[0].weight.grad
        assert gradient is not None
        assert (gradient.shape, gradient.dtype) == ((6, 6), torch.float64)
        with pytest.raises(PartitionedAccessError, match=r"blocks\.0\.weight.*clip_grad_norm_"):
            gradient.norm()

    sim.run(2, fn)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).unsqueeze(0)
        out: torch.Tensor = self.last(self.attention(x, x, x)[0])
        return out


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("threshold", [0, 10**6])
def test_multihead_attention_outside_of_blocks(stage: int, threshold: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, Attention(), param_persistence_threshold=threshold)
        for step in range(2):
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2, Attention))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_whose_child_is_used_without_being_called(stage: int) -> None:
    class Uses(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x @ self.hidden.weight

        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(2, 2)

    def fn(rank: int) -> None:
        model, optimizer = build(stage, Uses())
        for step in range(2):
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2, Uses))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_scale_that_backward_does_not_know_of(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, loss_scale=64.0)
        with pytest.raises(ValueError, match=r"loss_scale=64\.0.*optimizer\.backward\(loss\)"):
            model(data(rank)).square().mean().backward()
        optimizer.zero_grad()
        optimizer.scale_loss(model(data(rank)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("policy", ["skip", "error"])
def test_a_norm_that_is_not_finite(stage: int, policy: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, clip_norm=1e6, nonfinite_gradients=policy)
        before = optimizer.consolidated_parameters()
        factor = float("nan") if rank == 1 else 1.0
        (model(data(rank)).square().mean() * factor).backward()
        if policy == "skip":
            optimizer.step()
            assert (optimizer.skipped, optimizer.num_skipped) == (True, 1)
        else:
            with pytest.raises(FloatingPointError, match="norm of the gradients is nan"):
                optimizer.step()
        after = optimizer.consolidated_parameters()
        assert all(torch.equal(before[n], after[n]) for n in before)
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)
