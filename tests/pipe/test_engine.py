"""What a script does with the engine of a pipeline."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tests.pipe.test_training import VOCABULARY, WIDTH, Block, Case, batch, config, layers, loss_fn, whole
from torch import nn

import zoo.engine
from zoo import sim
from zoo.pipe import LayerSpec, PipelineModule, attach_loss


def engine_of(case: Case, specs: list[Any] | None = None, **more: Any) -> Any:
    torch.manual_seed(0)
    options = {"loss_fn": loss_fn, **more.pop("options", {})}
    model = PipelineModule(
        layers(case) if specs is None else specs, num_stages=case.pipe, schedule=case.schedule, **options
    )
    if specs is None:
        weights = whole(case).state_dict()
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return zoo.engine.initialize({**config(case), **more}, model)[0]


def batches(case: Case, engine: Any, step: int = 0) -> Any:
    return iter([batch(case, step, m, engine.batch_rank) for m in range(case.num_micro)])


@pytest.mark.dear
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_evaluation(schedule: str) -> None:
    case = Case(schedule=schedule, data=2, stage=3)
    model = whole(case)
    each = {
        rank: [model(ids) for ids, _ in (batch(case, 0, m, rank) for m in range(case.num_micro))] for rank in range(2)
    }
    losses = {
        rank: [float(loss_fn(out, batch(case, 0, m, rank)[1])) for m, out in enumerate(outs)]
        for rank, outs in each.items()
    }
    mean = sum(map(sum, losses.values())) / 2 / case.num_micro

    def fn(rank: int) -> None:
        engine = engine_of(case)
        last = engine.is_last_stage()
        assert float(engine.eval_batch(batches(case, engine))) == pytest.approx(mean, rel=1e-6)
        loss, logits = engine.eval_batch(batches(case, engine), return_logits=True)
        assert float(loss) == pytest.approx(mean, rel=1e-6)
        assert (logits is None) == (not last)
        for found, wanted in zip(logits or [], each[engine.batch_rank], strict=False):
            torch.testing.assert_close(found, wanted)
        alone = engine.eval_batch(batches(case, engine), reduce_output=None, bcast_loss=False)
        assert (alone is None) == (not last)
        if last:
            assert [float(x) for x in alone] == pytest.approx(losses[engine.batch_rank], rel=1e-6)
        one = engine.eval_batch(batches(case, engine), compute_loss=False, num_micro_batches=1)
        assert (one is None) == (not last)
        assert engine.module.training
        assert float(engine.train_batch(batches(case, engine))) == pytest.approx(mean, rel=1e-6)
        assert float(engine.eval_batch(batches(case, engine))) < mean
        engine.destroy()

    sim.run(4, fn, seed=0)


class Mixed(nn.Module):
    """A layer of trees: a float that trains, one that does not, integers, bools, plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        x, (mask, ids), extra = given["x"], given["more"], given["extra"]
        y = torch.where(mask, torch.tanh(self.linear(x)), x) + extra["constant"] * extra["scale"]
        return {"x": y.relu_(), "more": (~mask, ids + 1), "extra": extra}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, given: Any) -> torch.Tensor:
        return self.linear(given["x"]) * given["more"][1].unsqueeze(-1)


def mixed(m: int, length: int = 3) -> Any:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(2, length, WIDTH, generator=generator)
    given = {"x": x, "more": (x > 0, torch.arange(length)), "extra": {"constant": x * 0.1, "scale": 2.0, "none": None}}
    return given, torch.randn(2, length, 1, generator=generator)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_activations_are_trees_and_change_their_shapes(schedule: str) -> None:
    case = Case(schedule=schedule, pipe=2, num_micro=2)
    specs = [LayerSpec(Mixed) for _ in range(5)]

    def train(num_stages: int, name: str) -> Any:
        torch.manual_seed(0)
        model = PipelineModule(
            [*specs, LayerSpec(Head)], num_stages=num_stages, loss_fn=nn.functional.mse_loss, seed_layers=True,
            schedule=name,
        )  # fmt: skip
        engine = zoo.engine.initialize({**config(case), "pipeline": {}}, model)[0]
        losses = [
            float(engine.train_batch(iter([mixed(2 * step + m, length) for m in range(2)])))
            for step, length in enumerate((3, 3, 5, 3, 5))
        ]
        return losses, engine.optimizer.consolidated_parameters()

    expected_losses, expected = train(1, "1f1b")
    for losses, found in sim.run(2, lambda rank: train(2, schedule), seed=0):
        assert losses == expected_losses
        assert found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])


class Balanced(Block):
    """A block with a loss of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return attach_loss(y, 0.1 * y.square().mean(), "balance")


@pytest.mark.dear
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_losses_of_middle_layers_are_trained_on_and_reported(dtype: str) -> None:
    case = Case(pipe=3, num_micro=3, dtype=dtype, stage=1)
    specs = [nn.Linear(4, WIDTH), *(LayerSpec(Balanced, n) for n in range(4)), nn.Linear(WIDTH, 4)]

    def data(m: int) -> Any:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(m))
        return x.half() if dtype == "fp16" else x, x.flip(0)

    def train(num_stages: int) -> Any:
        torch.manual_seed(0)
        model = PipelineModule(
            [LayerSpec(nn.Linear, 4, WIDTH), *specs[1:-1], LayerSpec(nn.Linear, WIDTH, 4)], num_stages=num_stages,
            loss_fn=lambda out, labels: nn.functional.mse_loss(out.float(), labels), seed_layers=True,
        )  # fmt: skip
        engine = zoo.engine.initialize(config(case), model)[0]
        losses, extra = [], []
        for step in range(3):
            losses.append(float(engine.train_batch(iter([data(3 * step + m) for m in range(3)]))))
            extra.append((engine.get_additional_losses() or {}).get("balance"))
        return losses, extra, engine.optimizer.consolidated_parameters()

    losses, extra, expected = train(1)
    assert all(extra)
    for found_losses, found_extra, found in sim.run(3, lambda rank: train(3), seed=0):
        assert found_losses == pytest.approx(losses, rel=1e-3)
        assert found_extra[1:] == pytest.approx(extra[1:], rel=1e-2)  # known from the second batch on
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-3)


def test_attached_losses_are_those_of_the_sum() -> None:
    """Against plain autograd: the gradient of loss + Σ attached."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Balanced(n) for n in range(3)))
    plain = nn.Sequential(*(Block(n) for n in range(3)))
    plain.load_state_dict(blocks.state_dict())
    x = torch.randn(5, WIDTH)
    model = PipelineModule(list(blocks), num_stages=1, loss_fn=lambda out, labels: out.square().mean())
    engine = zoo.engine.initialize(
        {"train_micro_batch_size_per_gpu": 5, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}, model
    )[0]
    before = {name: value.clone() for name, value in plain.named_parameters()}
    engine.train_batch(iter([(x, x)]))
    total, y = torch.zeros(()), x
    for block in plain:
        y = block(y)
        total = total + 0.1 * y.square().mean()
    (total + y.square().mean()).backward()
    for name, parameter in engine.optimizer.consolidated_parameters().items():
        torch.testing.assert_close(parameter, before[name] - dict(plain.named_parameters())[name].grad)


@pytest.mark.dear
def test_checkpoints_are_by_layer_and_load_at_another_number_of_stages(tmp_path: Any) -> None:
    first = Case(pipe=2, data=2, stage=3, num_micro=2, tied=True)
    second = Case(pipe=4, data=1, stage=1, num_micro=4, tied=True, schedule="1f1b")

    def train(case: Case, load: bool) -> Any:
        engine = engine_of(case)
        if load:
            engine.load_checkpoint(str(tmp_path))
        losses = []
        for step in range(2):
            micro = [
                batch(first, step + 2 * load, m, r) for r in range(2) for m in range(first.num_micro)
            ]  # the same samples, whoever has them
            mine = micro if case.data == 1 else micro[engine.batch_rank * 2 :][:2]
            losses.append(float(engine.train_batch(iter(mine))))
        if not load:
            engine.save_checkpoint(str(tmp_path))
            for step in (2, 3):
                mine = [batch(first, step, m, engine.batch_rank) for m in range(2)]
                losses.append(float(engine.train_batch(iter(mine))))
        return losses

    expected = sim.run(4, lambda rank: train(first, False), seed=0)[0]
    found = sim.run(4, lambda rank: train(second, True), seed=0)[0]
    assert found == pytest.approx(expected[2:], rel=1e-5)


@pytest.mark.dear
def test_dropout_does_not_depend_on_the_stages() -> None:
    specs = [LayerSpec(Block, 0), nn.Dropout(0.3), LayerSpec(Block, 1), nn.Dropout(0.3), LayerSpec(Block, 2)]
    case = Case(num_micro=3)

    def train(num_stages: int) -> list[float]:
        model = PipelineModule(
            specs, num_stages=num_stages, loss_fn=nn.functional.mse_loss, seed_layers=True, partition_method="uniform"
        )
        engine = zoo.engine.initialize(config(case), model)[0]
        x = torch.ones(4, WIDTH)
        return [float(engine.train_batch(iter([(x, x)] * 3))) for _ in range(3)]

    expected = train(1)
    assert len(set(expected)) == 3
    assert sim.run(2, lambda rank: train(2), seed=0) == [expected, expected]


def test_samples_and_tokens_of_the_record() -> None:
    case = Case(pipe=2, data=2, num_micro=3)

    def fn(rank: int) -> None:
        engine = engine_of(case)
        given = batches(case, engine) if engine.is_first_stage() or engine.is_last_stage() else None
        engine.train_batch(given)
        record = engine.record
        assert (record.samples, record.tokens) == (2 * 3 * 2, 2 * 3 * 3 * 2)
        assert engine.train_batch_size == 12

    sim.run(4, fn, seed=0)


def test_middle_stages_need_no_data() -> None:
    case = Case(pipe=3, num_micro=3)

    def fn(rank: int) -> float:
        engine = engine_of(case)
        return float(engine.train_batch(None if rank == 1 else batches(case, engine)))

    assert len(set(sim.run(3, fn, seed=0))) == 1


def test_iterators_batch_functions_and_batch_sizes() -> None:
    case = Case(num_micro=2)

    def fn(rank: int) -> Any:
        engine = engine_of(case)
        expected = float(engine.eval_batch(batches(case, engine)))
        engine.set_batch_fn(lambda given: {"labels": given["y"], "ids": given["x"]} and (given["x"], given["y"]))
        engine.set_dataiterator({"x": x, "y": y} for x, y in [*batches(case, engine)] * 4)
        assert float(engine.eval_batch(None)) == expected
        engine.set_train_batch_size(8)
        assert engine.accumulation == 4
        assert float(engine.train_batch()) == pytest.approx(expected, rel=1e-6)
        with pytest.raises(RuntimeError, match=r"engine\.backward of a pipeline"):
            engine.backward(None)
        with pytest.raises(RuntimeError, match=r"engine\.forward of a pipeline"):
            engine(1)
        assert engine.is_gradient_accumulation_boundary()
        return engine.global_steps

    assert sim.run(2, fn, seed=0) == [1, 1]


def test_the_timeline_has_every_computation() -> None:
    case = Case(schedule="zb_h1", num_micro=3)

    def fn(rank: int) -> list[str]:
        engine = engine_of(case)
        engine.time_computations()
        engine.train_batch(batches(case, engine))
        assert all(event.start_s <= event.end_s for event in engine.timeline)
        return sorted(str(event.computation) for event in engine.timeline)

    found = sim.run(2, fn, seed=0)
    assert found[0] == sorted(f"0{kind}{m}" for kind in "FIW" for m in range(3))


def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.05)
    return x


def test_to_wait_for_a_message_is_no_part_of_a_computation() -> None:
    specs = [slow, LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, WIDTH, WIDTH)]
    x = torch.ones(2, WIDTH)

    def fn(rank: int) -> list[tuple[str, float, float]]:
        options = {"loss_fn": nn.functional.mse_loss, "partition_method": [1.0, 1.0, 1.0]}
        engine = engine_of(Case(num_micro=2), specs, options=options)
        engine.time_computations()
        engine.train_batch(iter([(x, x)] * 2))
        began = engine.timeline_began_s
        return [(str(e.computation), began + e.start_s, began + e.end_s) for e in engine.timeline]

    first, second = sim.run(2, fn, seed=0)
    spans = {name: (start, end) for name, start, end in first + second}
    assert all(spans[f"0F{m}"][1] - spans[f"0F{m}"][0] >= 0.05 for m in range(2))
    for m in range(2):  # by one clock: what needs a message begins after what sends it has ended
        assert spans[f"0F{m}"][1] <= spans[f"1F{m}"][0]
        assert spans[f"1B{m}"][1] <= spans[f"0B{m}"][0]


def test_the_vocabulary_of_the_models() -> None:
    """The names are those of the whole model, whatever the stages."""

    def fn(rank: int) -> list[str]:
        model = PipelineModule(layers(Case(tied=True)), num_stages=2, loss_fn=loss_fn)
        return [name for name, _ in model.named_parameters()]

    first, second = sim.run(2, fn, seed=0)
    assert "tied_modules.embed.weight" in set(first) & set(second)
    everything = {name for name, _ in whole(Case(tied=True)).named_parameters()}
    assert set(first) | set(second) == everything
    assert VOCABULARY > WIDTH


class Counted(Block):
    """How often a layer was called with gradients, and without."""

    def __init__(self) -> None:
        super().__init__(0)
        self.calls = {True: 0, False: 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[torch.is_grad_enabled()] += 1
        return super().forward(x)


def squared(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def counts(pipeline: dict[str, Any], section: dict[str, Any] | None = None, **options: Any) -> dict[bool, int]:
    """Of each of four layers on two stages, in a step of two micro-batches."""

    def fn(rank: int) -> list[dict[bool, int]]:
        torch.manual_seed(0)
        model = PipelineModule([LayerSpec(Counted)] * 4, num_stages=2, loss_fn=squared, **options)
        engine = zoo.engine.initialize(
            {
                "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
                "pipeline": {"check_shapes": False, **pipeline},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "activation_checkpointing": section or {},
            },
            model,
        )[0]  # fmt: skip
        x = torch.ones(1, 3, WIDTH, requires_grad=True)
        engine.train_batch(iter([(x, torch.ones(1, 3, WIDTH))] * 2))
        return [layer.calls for layer in model.modules() if isinstance(layer, Counted)]

    found = [calls for rank in sim.run(2, fn) for calls in rank]
    assert len(found) == 4
    assert all(calls == found[0] for calls in found)
    return found[0]


def test_the_section_says_which_activations_are_computed_again() -> None:
    reentrant = {"use_reentrant": True}
    assert counts({}) == {True: 2, False: 0}
    assert counts({"activation_checkpoint_interval": 0}, activation_checkpoint_interval=2) == {True: 4, False: 0}
    assert counts({"activation_checkpoint_interval": 1}) == {True: 4, False: 0}
    assert counts({"activation_checkpoint_interval": 2, "use_reentrant": True}) == {True: 4, False: 0}
    assert counts({"activation_checkpoint_interval": 2}, reentrant) == {True: 2, False: 2}  # a forward without a graph
    assert counts({"activation_checkpoint_interval": 2, "use_reentrant": False}, reentrant) == {True: 4, False: 0}
    own: list[int] = []

    def mine(function: Any, *inputs: Any) -> Any:
        own.append(1)
        return function(*inputs)

    assert counts({"activation_checkpoint_interval": 2}, activation_checkpoint_func=mine) == {True: 2, False: 0}
    assert own
    own.clear()
    options = {"activation_checkpoint_func": mine, "activation_checkpoint_interval": 1}
    assert counts({"use_reentrant": False}, **options) == {True: 4, False: 0}  # in its place, as in DeepSpeed
    assert not own


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_loader_in_the_place_of_an_iterator_does_not_begin_anew_in_each_step(pipe: int) -> None:
    case = Case(pipe=pipe, num_micro=2)
    found = []

    def fn(rank: int) -> None:
        engine, twin = engine_of(case), engine_of(case)
        many = [one for step in range(3) for one in batches(case, engine, step)]
        with pytest.raises(Exception, match=r"train_batch got a list.*takes an iterator of batches.*iter\(loader\)"):
            engine.train_batch(many)
        for step in range(2):
            own = list(batches(case, engine, step))
            one = engine.train_batch(own if step else iter(own))  # those of one step, no more, are a step
            assert float(one) == float(twin.train_batch(batches(case, twin, step)))
            found.append(float(one))
        assert float(engine.eval_batch(many)) == float(engine.eval_batch(iter(many)))
        for wrong in ("2", 2.5, True, 0):
            with pytest.raises(ValueError, match=r"num_micro_batches of eval_batch\(\) got .*whole number"):
                engine.eval_batch(iter(many), num_micro_batches=wrong)
        for one in (engine, twin):
            one.destroy()

    sim.run(pipe, fn, seed=0)
    assert len(set(found)) == 2


class Both:
    """A loader that is its own iterator, and begins anew when it is asked for one, as DeepSpeed's are."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.rest = batches, iter(batches)

    def __iter__(self) -> Any:
        self.rest = iter(self.batches)
        return self.rest

    def __next__(self) -> Any:
        return next(self.rest)


@pytest.mark.parametrize("pipe", [1, 2])
def test_an_iterator_goes_on_where_it_is_though_it_can_begin_anew(pipe: int) -> None:
    case = Case(pipe=pipe, num_micro=2)

    def fn(rank: int) -> None:
        engine, twin = engine_of(case), engine_of(case)
        loader = Both([one for step in range(3) for one in batches(case, engine, step)])
        for step in range(3):
            assert float(engine.train_batch(loader)) == float(twin.train_batch(batches(case, twin, step)))
        for one in (engine, twin):
            one.destroy()

    sim.run(pipe, fn, seed=0)
