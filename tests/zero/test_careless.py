"""What a careless user does, one sentence each: it computes what plain torch computes, or is refused by name.

The drawn programs of ``tests/laws/test_careless.py`` put the same uses together in any order.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import zoo.optim
from zoo import sim
from zoo.zero import GatheredParameters, PartitionedAccessError, ZeroOptimizer

STAGES = range(4)
RATE = 0.1


class Blocks(nn.Module):
    """Four units; each rank may leave the first block out of its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.last(x)
        return out


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def build(stage: int, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model = (model if model is not None else Blocks()).double()
    given = {
        "optimizer": torch.optim.SGD, "lr": RATE, "param_persistence_threshold": 0, "reduce_bucket_size": 1,
        "max_live_parameters": 0, **options,
    }  # fmt: skip
    return model, ZeroOptimizer(model, stage=stage, **given)


def twin(world: int, steps: int = 1, make: Callable[[], nn.Module] = Blocks, **options: Any) -> dict[str, torch.Tensor]:
    """Plain torch in one process on the data of all ranks."""
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **options)
    for step in range(steps):
        for rank in range(world):
            (model(data(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def one_step(model: nn.Module, optimizer: ZeroOptimizer, rank: int, step: int = 0) -> None:
    optimizer.backward(model(data(rank, step)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def check(optimizer: ZeroOptimizer, expected: dict[str, torch.Tensor]) -> None:
    for name, value in optimizer.consolidated_parameters().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


# 1 and 2: outputs that nobody brings back, exceptions ----------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
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
                gc.collect()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        check(optimizer, twin(2, 3))

    for seed in range(3):
        sim.run(2, fn, seed=seed)


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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards_in_any_order(stage: int, order: tuple[int, int]) -> None:
    def run(model: nn.Module, rank: int, world: int) -> None:
        losses = [model(data(rank, step)).square().mean() / world for step in range(2)]
        for index in order:
            losses[index].backward()

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        run(model, rank, 1)
        optimizer.step()
        check(optimizer, expected)

    plain = Blocks().double()
    for rank in range(2):
        run(plain, rank, 2)
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(2, fn)


def _raise(*_: Any) -> None:
    raise ArithmeticError("on purpose")


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
            model.blocks[1].weight.data  # noqa: B018

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


# 10 and 11: states and constructions that cannot be ------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_of_another_layout_changes_nothing(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, momentum=0.9)
        one_step(model, optimizer, rank)
        other_model, other = build(stage, reduce_bucket_size=10**6, momentum=0.9)
        one_step(other_model, other, rank, 3)
        foreign = other.state_dict()
        if rank == 0 and stage == 0:
            foreign["slices"] = dict(list(foreign["slices"].items())[1:])  # whole slices fit any layout at stage 0
        before = optimizer.state_dict()["slices"]
        with pytest.raises(ValueError, match="state_dict"):
            optimizer.load_state_dict(foreign)
        after = optimizer.state_dict()["slices"]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2, momentum=0.9))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wrong", [{"lrr": 0.1}, {"lr": -1.0}, {"nesterov": True, "momentum": 0.0}])
def test_a_construction_that_fails_leaves_an_ordinary_model(stage: int, wrong: dict[str, Any]) -> None:
    def fn(rank: int) -> None:
        model = Blocks().double()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        with pytest.raises((TypeError, ValueError)):
            build(stage, model, **wrong)
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter
            assert torch.equal(parameter, before[name])
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        _, optimizer = build(stage, model)
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


# 12 to 14: modules ---------------------------------------------------------------------------------------------------


def test_submodules_called_one_by_one_keep_as_little_as_one_forward() -> None:
    def most(together: bool) -> int:
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
        _, optimizer = build(3, layers, prefetch_bucket_size=0)
        seen = []
        for layer in layers:
            layer.register_full_backward_hook(
                lambda *_: seen.append(sum(b.parameters.live for b in optimizer.buckets)) and None
            )
        x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
        if together:
            x = layers(x)
        else:
            for layer in layers:
                x = layer(x)
        x.sum().backward()
        return max(seen)

    for separately, together in zip(sim.run(2, lambda r: most(False)), sim.run(2, lambda r: most(True)), strict=True):
        assert separately <= together + 1


@pytest.mark.parametrize("stage", STAGES)
def test_submodules_called_one_by_one_train(stage: int) -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(model.first(x))
        for block in model.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = model.last(x)
        return out

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for step in range(2):
            run(model, data(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


class Plain:
    """An output of a class that nobody knows."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.inside = {"hidden": [hidden]}


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@dataclass
class Data:
    hidden: torch.Tensor


class Opaque:
    """Nothing can be found in it."""

    __slots__ = ()
    kept: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self, hidden: torch.Tensor) -> None:
        Opaque.kept[id(self)] = hidden


class Wraps(Blocks):
    kind: Any = Plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.last(x)
        return out

    def wrapped(self) -> Wraps:
        kind = self.kind
        for block in self.blocks:
            inner = block.forward
            block.forward = lambda x, f=inner: kind(f(x))
        opened = self

        class Opens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = opened

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = torch.tanh(self.model.first(x))
                for block in self.model.blocks:
                    found = block(x)
                    hidden = found.inside["hidden"][0] if isinstance(found, Plain) else found.hidden
                    x = x + torch.tanh(hidden)
                out: torch.Tensor = self.model.last(x)
                return out

        return Opens()  # type: ignore[return-value]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [Plain, Slotted, Data])
def test_outputs_of_any_class(stage: int, kind: type) -> None:
    def fn(rank: int) -> None:
        inner = Wraps()
        inner.kind = kind
        model, optimizer = build(stage, inner.wrapped())
        for step in range(2):
            one_step(model, optimizer, rank, step)
        check(optimizer, {f"model.{n}": v for n, v in twin(2, 2).items()})

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_an_output_in_which_nothing_can_be_found_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        inner = Wraps()
        inner.kind = Opaque
        model, optimizer = build(stage, inner.wrapped())
        with pytest.raises(TypeError, match=r"'model\.blocks\.0' returned an Opaque.*register_pytree_node"):
            model(data(rank))
        with torch.no_grad():
            assert isinstance(inner.blocks[0](torch.ones(1, 6, dtype=torch.float64)), Opaque)
        del optimizer

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_copied_model_is_an_ordinary_one(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        with optimizer.gathered():
            again = copy.deepcopy(model)
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
        assert all(type(p) is nn.Parameter for p in again.parameters())
        x = data(rank, 8)
        again(x).square().mean().backward()  # nothing of the optimizer hangs on it
        assert again.first.weight.grad is not None
        second = torch.optim.SGD(again.parameters(), lr=RATE)
        second.step()
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


# 17 to 19: memory that moves, and failures inside --------------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.optim.AdamW, zoo.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_come_back_to_other_memory_are_the_ones_that_train(
    cls: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU what comes back lies elsewhere; here every way there and back makes a copy.
    from zoo.zero.state import offload_states

    monkeypatch.setattr(offload_states, "leaves", lambda tensor: True)

    def fn(rank: int, moves: bool) -> dict[str, torch.Tensor]:
        model = Blocks().to(dtype)
        optimizer = ZeroOptimizer(model, stage=3, optimizer=cls, lr=0.1, param_persistence_threshold=0)
        for step in range(3):
            model(data(rank, step).to(dtype)).square().mean().backward()
            if moves:
                optimizer.offload_states()
                optimizer.reload_states()
            optimizer.step()
            optimizer.zero_grad()
            if moves:
                optimizer.offload_states()
                optimizer.reload_states()
        return optimizer.consolidated_parameters()

    for moved, stayed in zip(sim.run(2, lambda r: fn(r, True)), sim.run(2, lambda r: fn(r, False)), strict=True):
        assert all(torch.equal(moved[n], stayed[n]) for n in stayed)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_dropped_while_their_reduction_is_under_way(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)

        def late(*_: Any) -> None:
            model.zero_grad()  # the optimizer's is refused here
            raise ArithmeticError

        handle = model.first.register_full_backward_hook(late)
        with pytest.raises(ArithmeticError):
            model(data(rank)).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    for seed in range(5):
        sim.run(2, fn, seed=seed)


def test_a_gather_that_fails_leaves_no_bucket_in_use() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3, units=[Blocks])
        model, optimizer = build(3, nn.Sequential(Blocks(), nn.Linear(2, 2).float()), units=[Blocks])
        bucket = optimizer.buckets[-1]
        whole = bucket.parameters.gather

        def fail(**_: Any) -> None:
            raise OSError("no room")

        for victim in optimizer.buckets[:2]:
            victim.parameters.gather, whole = fail, victim.parameters.gather  # type: ignore[method-assign]
            with pytest.raises(OSError, match="no room"):
                model(data(rank))
            victim.parameters.gather = whole  # type: ignore[method-assign]
            assert [b.active for b in optimizer.buckets] == [0] * len(optimizer.buckets)

    sim.run(1, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_penalty_on_the_weights(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for step in range(2):
            loss = model(data(rank, step)).square().mean()
            context = GatheredParameters(model.blocks[0].weight) if stage == 3 else contextlib.nullcontext()
            with context:
                (loss + model.blocks[0].weight.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        check(optimizer, expected)

    plain = Blocks().double()
    reference = torch.optim.SGD(plain.parameters(), lr=RATE)
    for step in range(2):
        reference.zero_grad()
        for rank in range(2):
            ((plain(data(rank, step)).square().mean() + plain.blocks[0].weight.square().sum()) / 2).backward()
        reference.step()
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_penalty_alone_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        before = optimizer.consolidated_parameters()

        def penalise() -> None:
            with optimizer.gathered():
                model.blocks[0].weight.square().sum().backward()
            optimizer.step()

        with pytest.raises(RuntimeError, match=r"blocks\.0"):
            penalise()
        after = optimizer.consolidated_parameters()
        assert all(torch.equal(before[n], after[n]) for n in before)
        optimizer.zero_grad()
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


# What a fresh reading found -------------------------------------------------------------------------------------------


def parameters_of(optimizer: ZeroOptimizer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in optimizer.consolidated_parameters().items()}


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_assigned_count_or_are_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with optimizer.gathered():
            found = torch.autograd.grad(model(data(rank)).square().mean(), list(model.parameters()))
        try:
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
        except PartitionedAccessError as error:
            assert stage >= 2
            assert "cannot be assigned" in str(error)  # noqa: PT017
            return
        optimizer.step()
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_looking_at_the_model_in_a_hook_of_another_backward(stage: int, ranks: tuple[int, ...]) -> None:
    if stage == 3 and ranks == (0,):
        return  # all ranks run the same units there

    def fn(rank: int) -> None:
        model, optimizer = build(stage, momentum=0.9)
        one_step(model, optimizer, rank)
        other = torch.zeros(3, requires_grad=True)
        doubled = other * 2

        def look(gradient: torch.Tensor) -> None:
            if rank in ranks:
                with torch.no_grad():
                    model(data(rank, 5))

        doubled.register_hook(look)
        doubled.sum().backward()
        before = parameters_of(optimizer)
        optimizer.step()
        after = parameters_of(optimizer)
        assert all(torch.equal(before[n], after[n]) for n in before)
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2, momentum=0.9))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_for_an_input_while_all_is_frozen_is_no_step(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, momentum=0.9)
        one_step(model, optimizer, rank)
        for parameter in model.parameters():
            parameter.requires_grad = False
        x = data(rank, 3).requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        for parameter in model.parameters():
            parameter.requires_grad = True
        optimizer.step()
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2, momentum=0.9))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["data", "gathered"])
def test_new_values_between_a_forward_and_its_backward_are_refused_on_all_ranks(stage: int, way: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        loss = model(data(rank)).square().mean()
        weight = model.blocks[1].weight
        if way == "data":
            weight.data = torch.ones(6, 6, dtype=torch.float64)
        else:
            with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                if rank == 0:
                    weight.fill_(1.0)
        with pytest.raises(RuntimeError, match="new values that were given"):
            loss.backward()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_closed_optimizer_says_so(stage: int) -> None:
    def fn(rank: int) -> None:
        _, optimizer = build(stage)
        optimizer.close()
        optimizer.close()
        for use in (optimizer.step, optimizer.zero_grad, optimizer.state_dict, optimizer.consolidated_parameters):
            with pytest.raises(ValueError, match="was closed"):
                use()

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_inside_of_a_backward_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        handle = model.blocks[1].register_full_backward_hook(lambda *_: optimizer.step())
        with pytest.raises(RuntimeError, match=r"step\(\) inside of a backward"):
            model(data(rank)).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_many_forwards_that_lead_to_one_loss(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        torch.stack([model(data(rank, k)).square().mean() for k in range(70)]).sum().backward()
        optimizer.step()
        check(optimizer, expected)

    plain = Blocks().double()
    for rank in range(2):
        (torch.stack([plain(data(rank, k)).square().mean() for k in range(70)]).sum() / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("retain", [True, False])
def test_one_backward_through_an_old_forward_and_a_new_one(stage: int, retain: bool) -> None:
    def run(model: nn.Module, rank: int, world: int) -> None:
        old, first = (model(data(rank, k)).square().mean() / world for k in (1, 2))
        if retain:
            old.backward(retain_graph=True)
        first.backward()
        (old + model(data(rank, 3)).square().mean() / world).backward()

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        run(model, rank, 1)
        optimizer.step()
        check(optimizer, expected)

    plain = Blocks().double()
    for rank in range(2):
        run(plain, rank, 2)
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_scaled_loss_with_a_backward_inside_of_backward(stage: int) -> None:
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
            ctx.x, ctx.module = x.detach().requires_grad_(), module
            with torch.enable_grad():
                ctx.out = module(ctx.x)
            out: torch.Tensor = ctx.out.detach()
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            torch.autograd.backward(ctx.out, grad)
            return ctx.x.grad, None

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Blocks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Inside.apply(x.requires_grad_(), self.inner)
            return out

    def fn(rank: int) -> None:
        model, optimizer = build(stage, Wrapped(), loss_scale=4.0, units=[nn.Linear])
        one_step(model, optimizer, rank)
        check(optimizer, {f"inner.{n}": v for n, v in twin(2).items()})

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_pickled_model_is_an_ordinary_one(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        with optimizer.gathered():
            again = pickle.loads(pickle.dumps(model))
        assert all(type(p) is nn.Parameter for p in again.parameters())
        again(data(rank)).sum().backward()
        one_step(model, optimizer, rank)

    sim.run(2, fn)


def test_views_of_a_dict_are_outputs_too() -> None:
    class Views(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"a": super().forward(x)}.values()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Views(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                (x,) = block(x)
            return x

    for stage in STAGES:

        def fn(rank: int, stage: int = stage) -> None:
            model, optimizer = build(stage, Model())
            one_step(model, optimizer, rank)
            check(optimizer, twin(2, 1, Model))

        sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_zeroing_gradients_of_which_a_part_is_reduced(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        model(data(rank)).square().mean().backward()
        with optimizer.no_sync():
            model(data(rank, 1)).square().mean().backward()
        before = parameters_of(optimizer)
        model.zero_grad(set_to_none=False)
        optimizer.step()
        after = parameters_of(optimizer)
        assert all(torch.equal(before[n], after[n]) for n in before)

    sim.run(2, fn)
