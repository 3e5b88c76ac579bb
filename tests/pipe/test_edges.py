"""What layers may do that a schedule has to stand: repeat themselves, return something else, share, be frozen."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.pipe.test_training import WIDTH, Case, config
from torch import nn
from torch.utils.checkpoint import checkpoint

import zoo.engine
from zoo import sim
from zoo.pipe import LayerSpec, PipelineModule, TiedLayerSpec, attach_loss
from zoo.pipe.runtime import runner


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.linear(x))


def data(num_micro: int, step: int = 0, length: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(length, WIDTH, generator=generator), torch.zeros(length, WIDTH)) for _ in range(num_micro)]


def make(specs: list[Any], case: Case, num_stages: int, more: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"seed_layers": True, "partition_method": "uniform", "loss_fn": nn.functional.mse_loss, **options}
    model = PipelineModule(specs, num_stages=num_stages, schedule=case.schedule, **options)
    return zoo.engine.initialize({**config(case), **(more or {})}, model)[0]


def train(specs: list[Any], case: Case, num_stages: int, steps: int = 3, **options: Any) -> Any:
    engine = make(specs, case, num_stages, **options)
    losses = [float(engine.train_batch(iter(data(case.num_micro, step)))) for step in range(steps)]
    return losses, engine.optimizer.consolidated_parameters()


def check(specs: list[Any], case: Case, **options: Any) -> None:
    """A pipeline trains as one process does."""
    expected_losses, expected = train(specs, Case(num_micro=case.num_micro, stage=case.stage), 1, **options)
    seen: set[str] = set()
    for losses, found in sim.run(case.pipe, lambda rank: train(specs, case, case.pipe, **options), seed=0):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        seen |= set(found)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    assert seen == set(expected)


def together(world: int, make: Any, words: str) -> None:
    """Every rank raises, and one of them says it."""

    def fn(rank: int) -> str:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            make(rank)
        return str(raised.value)

    found = sim.run(world, fn, seed=0, group_timeout_s=5.0)
    assert any(words in text for text in found)
    assert not any(re.match(r"rank \d+ waited", text) for text in found), found


# What runs twice -----------------------------------------------------------------------------------------------------


class Dropping(Layer):
    def forward(self, x: Any) -> Any:
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.5, self.training)


@pytest.mark.dear
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_repeated_forward_drops_what_the_first_one_dropped(schedule: str) -> None:
    check([LayerSpec(Dropping)] * 4, Case(schedule=schedule), activation_checkpoint_interval=1)


class Attaching(Layer):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return attach_loss(y, 0.1 * y.square().mean(), "size")


class Repeating(Attaching):
    """With a checkpoint of its own, after whose loss there is something to compute again."""

    def forward(self, x: Any) -> Any:
        return checkpoint(lambda x: torch.sin(Attaching.forward(self, x)), x, use_reentrant=False)


def reentrant(function: Any, x: torch.Tensor) -> Any:
    return checkpoint(function, x if x.requires_grad else x.clone().requires_grad_(), use_reentrant=True)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("how", ["of the model", "re-entrant", "of the layer", "of the layer, in two parts"])
def test_losses_are_attached_in_what_is_repeated(how: str) -> None:
    if how.startswith("of the layer"):
        case = Case(schedule="zb_h1" if "two" in how else "1f1b")
        check([LayerSpec(Repeating)] * 4, case)
        return
    options: dict[str, Any] = {"activation_checkpoint_interval": 2}
    specs = [LayerSpec(Attaching)] * 4
    expected = train(specs, Case(), 1)  # without checkpoints
    if how == "re-entrant":
        options["activation_checkpoint_func"] = reentrant
    found = train(specs, Case(), 1, **options)
    assert found[0] == pytest.approx(expected[0])
    check(specs, Case(), **options)
    engine = make(specs, Case(), 1, **options)
    engine.train_batch(iter(data(4)))
    plain = make(specs, Case(), 1)
    plain.train_batch(iter(data(4)))
    assert engine.get_additional_losses() == pytest.approx(plain.get_additional_losses())


# What messages look like ---------------------------------------------------------------------------------------------


class Counting(Layer):
    """Its output changes after the forwards of a step, though its input does not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0

    def forward(self, x: Any) -> Any:
        later, self.calls = self.calls >= 2, self.calls + 1
        y = super().forward(x)
        if self.what == "value":
            return y, 3.0 if later else 1.0
        if self.what == "shape":
            return y[: 2 if later else 3], 1.0
        return (x if later == (self.what == "no gradient") else y), 1.0


class Counted(Layer):
    def forward(self, x: Any) -> Any:
        return (self.linear(x[0]) * x[1]).sum(0, keepdim=True).expand(3, WIDTH)


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["value", "shape", "gradient"])
def test_an_output_that_changes_is_refused_or_travels_with_a_header(what: str) -> None:
    specs = [LayerSpec(Counting, what), LayerSpec(Counted)]
    case = Case(num_micro=2)

    def fails(rank: int) -> None:
        train(specs, case, 2)

    together(2, fails, "the output of layer 0 looks otherwise than that of the same micro-batch")
    check(specs, case, more={"pipeline": {"dynamic_shapes": True}})


def test_an_output_may_get_no_gradient_any_more() -> None:
    check([LayerSpec(Counting, "no gradient"), LayerSpec(Counted)], Case(num_micro=2))


def test_looks_of_many_batches_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "KEPT", 3)
    lengths = [2, 3, 4, 2, 5, 2, 3, 6, 2, 4]
    specs, case = [LayerSpec(Layer)] * 2, Case(num_micro=1)

    def fn(rank: int, num_stages: int = 2) -> Any:
        engine = make(specs, case, num_stages)
        losses = [float(engine.train_batch(iter(data(1, n, length)))) for n, length in enumerate(lengths)]
        assert len(engine._runner._metas) == 3
        return losses

    expected = fn(0, 1)
    assert sim.run(2, fn, seed=0) == [expected, expected]


class Waves(Layer):
    def forward(self, x: Any) -> Any:
        return torch.fft.fft(self.linear(x), dim=-1).conj()


class Back(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear(torch.fft.ifft(x.conj(), dim=-1).real)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_complex_activations_have_gradients(schedule: str) -> None:
    check([LayerSpec(Layer), LayerSpec(Waves), LayerSpec(Back), LayerSpec(Layer)], Case(schedule=schedule))


class Negated(Layer):
    """An output whose memory has the other sign."""

    def forward(self, x: Any) -> Any:
        return self.linear(x), torch._neg_view(x)


class Summed(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear(x[0] + x[1])


def test_what_is_negative_in_its_flag_alone_arrives_negative() -> None:
    check([LayerSpec(Negated), LayerSpec(Summed)], Case(num_micro=2))


class HandsOn(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear(x), self.linear.weight


class Uses(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear(x[0]) @ x[1]


def test_a_weight_that_a_layer_returns_gets_the_gradient_of_the_next_stages() -> None:
    check([LayerSpec(Layer), LayerSpec(HandsOn), LayerSpec(Uses)], Case(pipe=3, schedule="zb_h1", num_micro=2))


class WithPenalty(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear(x), (2 * self.linear.weight).square().sum()


class TakesPenalty(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear(x[0]) * (1 + 0.01 * x[1])


def test_a_weight_that_one_output_has_without_the_inputs_gets_both_gradients() -> None:
    check([LayerSpec(Layer), LayerSpec(WithPenalty), LayerSpec(TakesPenalty)], Case(pipe=3, schedule="zb_h1"))


class Merged(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Any) -> Any:
        return torch.tanh(nn.functional.linear(x, self.linear.weight + self.up @ self.down))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("layer", [Merged, Normed])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_that_is_made_of_others_has_its_gradient_while_these_are_whole(layer: Any, stage: int) -> None:
    check([LayerSpec(layer) for _ in range(4)], Case(schedule="zb_h1", stage=stage, num_micro=2))


class Tanh(Layer):
    def forward(self, x: Any) -> Any:
        return torch.tanh(self.linear(x))


class Doubling(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear(x.mul_(2))


def test_an_input_changed_in_place_that_the_stage_before_needs_is_refused() -> None:
    specs = [LayerSpec(Layer), LayerSpec(Tanh), LayerSpec(Doubling), LayerSpec(Layer)]
    case = Case(schedule="zb_v", num_micro=2)  # stages 1 and 2 are on one rank
    together(2, lambda rank: train(specs, case, 2), "modified by an inplace operation")
    specs[1] = LayerSpec(nn.Linear, WIDTH, WIDTH)  # needs its input alone
    check(specs, case)


# Data ----------------------------------------------------------------------------------------------------------------


def test_what_is_no_data_is_told_to_all_ranks() -> None:
    specs, case = [LayerSpec(Layer)] * 3, Case(pipe=3, num_micro=2)

    def fn(given: Any) -> Any:
        return lambda rank: make(specs, case, 3).train_batch(given(rank))

    together(3, fn(lambda rank: None), "got no batches; it needs an iterator")
    together(3, fn(lambda rank: 5 if rank == 0 else iter(data(2))), "got something of type int; it needs an iterator")
    together(3, fn(lambda rank: iter(data(2)) if rank == 0 else None), "rank 2 says ValueError: a first or last stage")
    odd = [({"ids": {1, 2}}, torch.zeros(3, WIDTH))] * 2
    together(3, fn(lambda rank: iter(odd if rank == 0 else data(2))), "the inputs of a batch has a set at ['ids']")


def test_outputs_without_losses_need_no_labels() -> None:
    def fn(rank: int) -> None:
        engine = make([LayerSpec(Layer)] * 2, Case(), 2)
        inputs = [x for x, _ in data(4)]
        found = engine.eval_batch(iter(inputs), compute_loss=False)
        both = engine.eval_batch(iter(data(4)), return_logits=True)[1]
        assert (found is None) == (rank == 0)
        assert all(torch.equal(a, b) for a, b in zip(found or [], both or [], strict=True))
        engine.destroy()
        with pytest.raises(ValueError, match=r"eval_batch\(\) after destroy\(\)"):
            engine.eval_batch(iter(data(4)))

    sim.run(2, fn, seed=0)


# Tied layers ---------------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """An embedding with positions, which its use as the output layer has nothing to do with; and a bias of both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.positions = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(3, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.positions + self.bias


def output(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = x @ module.weight.T + module.bias
    return found


TIED = [
    TiedLayerSpec("embed", Positions), LayerSpec(Layer), LayerSpec(Layer),
    TiedLayerSpec("embed", Positions, forward_fn=output),
]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_module_is_one_with_the_parameters_that_are_not_named(stage: int, tmp_path: Any) -> None:
    check(TIED, Case(stage=stage))

    def fn(rank: int) -> Any:
        case = Case(stage=stage)
        first = make(TIED, case, 2)
        first.train_batch(iter(data(4)))
        first.save_checkpoint(str(tmp_path))
        expected = float(first.train_batch(iter(data(4, 1))))
        again = make(TIED, case, 2, base_seed=7)
        again.load_checkpoint(str(tmp_path))
        assert float(again.train_batch(iter(data(4, 1)))) == expected

    sim.run(2, fn, seed=0)


def test_a_tied_module_that_is_frozen_on_one_stage_is_refused_on_all_ranks() -> None:
    def fn(rank: int) -> None:
        model = PipelineModule(TIED, num_stages=2, loss_fn=nn.functional.mse_loss)
        if rank == 1:
            model.tied_modules.requires_grad_(False)
        zoo.engine.initialize(config(Case()), model)

    together(2, fn, "is trained on some of the stages that have it, and frozen on others")
