"""What a careless user does to modules, states and memory, one sentence each."""

from __future__ import annotations

import contextlib
import copy
import io
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from tests.zero.blocks import RATE, STAGES, Blocks, build, check, data, one_step, twin
from torch import nn

import zoo.optim
from zoo import sim
from zoo.zero import GatheredParameters, ZeroOptimizer

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


@pytest.mark.matrix
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
    from zoo.zero.state import optimizer_states

    monkeypatch.setattr(optimizer_states, "leaves", lambda tensor: True)

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


@pytest.mark.matrix
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

        def fail(**_: Any) -> None:
            raise OSError("no room")

        for victim in optimizer.buckets[:2]:
            victim.parameters.start, start = fail, victim.parameters.start  # type: ignore[method-assign]
            with pytest.raises(OSError, match="no room"):
                model(data(rank))
            victim.parameters.start = start  # type: ignore[method-assign]
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_layer_that_is_put_back_has_its_name_again(stage: int) -> None:
    def job(rank: int) -> list[str]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.5, param_persistence_threshold=0
        )  # fmt: skip
        mine = model[0]
        model[0] = nn.Linear(3, 3)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ValueError, match="came into the model after"):
            optimizer.step()
        model[0] = mine
        optimizer.zero_grad()
        return sorted(optimizer.consolidated_parameters())

    for found in sim.run(2, job):
        assert found == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_torchscript_is_told_that_hooks_cannot_be_compiled_and_traces_the_values_there_are(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        with pytest.raises(AttributeError, match="Script the model before the engine or optimizer is constructed"):
            torch.jit.script(model)
        if stage == 3:
            with pytest.raises(NotImplementedError, match=r"Trace a copy\.deepcopy of the model"):
                torch.jit.trace(model, data(0))  # type: ignore[no-untyped-call]
            with optimizer.gathered():
                to_trace = copy.deepcopy(model)
        else:
            to_trace = model
        traced: Any = torch.jit.trace(to_trace, data(0))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            assert torch.equal(traced(data(0)), model(data(0)))
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)
