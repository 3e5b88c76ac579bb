"""What attaches to an engine: parts from sections, their calls, records, sinks, sections that nobody carries out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_engine import BASE, data, net, stage
from torch import nn

from zoo import sim
from zoo.config import ConfigError, Section
from zoo.engine import Engine, initialize
from zoo.parts import Clock, Environment, StepRecord
from zoo.registry import CORE, Registry


class HeatSection(Section):
    enabled: bool = False
    degrees: float = 20.0


class Heat:
    """A part with every method but ``make_loader``, which writes down what it is told."""

    said: list[str] = []  # noqa: RUF012  (of all instances, in order)

    def __init__(self, section: HeatSection, environment: Environment) -> None:
        self.section, self.environment = section, environment
        self.clocks: list[Clock] = []
        self.records: list[StepRecord] = []
        self.memory = 0
        self.name = type(self).__name__

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        assert all(p.numel() for p in module.parameters())  # nothing is sharded yet
        self.said.append(f"{self.name} prepare")

    def on_batch(self, args: Any, kwargs: Any, clock: Clock) -> Any:
        self.clocks.append(clock)
        self.said.append(f"{self.name} batch")
        x, y = args
        return (x * 2, y), kwargs

    def on_loss(self, loss: torch.Tensor, clock: Clock) -> torch.Tensor:
        self.said.append(f"{self.name} loss")
        return loss * 3

    def lr_factor(self, clock: Clock) -> float:
        return 0.5

    def before_update(self, clock: Clock) -> None:
        self.said.append(f"{self.name} before")

    def after_update(self, record: StepRecord) -> None:
        self.memory += 1
        self.records.append(record)
        self.said.append(f"{self.name} after")

    def metrics(self) -> dict[str, float]:
        return {"degrees": self.section.degrees + self.memory}

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory = state["memory"]

    def close(self) -> None:
        self.said.append(f"{self.name} close")


class Cold(Heat):
    before = ("heat",)


class Keeps:
    def __init__(self, section: HeatSection, environment: Environment) -> None:
        self.records: list[StepRecord] = []
        self.closed = False

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


def registry(*, parts: bool = True) -> Registry:
    found = Registry(CORE, origin="core")
    for name in ("heat", "wood", "cold"):
        found.register("config_section", name, HeatSection)
    if parts:
        found.register("engine_part", "heat", Heat)
        found.register("engine_part", "cold", Cold)
        found.register("sink", "wood", Keeps)
    return found


def begin(changes: dict[str, Any], **more: Any) -> Engine:
    torch.set_num_threads(1)
    return initialize({**BASE, **changes}, net(), training_data=data(), **{"registry": registry(), **more})[0]


def test_enabled_sections_become_parts_that_are_called_in_their_order() -> None:
    Heat.said.clear()
    sections = {"heat": {"enabled": True, "degrees": 3.0}, "cold": {"enabled": True}}
    engine = begin({**sections, "train_micro_batch_size_per_gpu": 4})
    assert list(engine.parts) == ["cold", "heat"]
    engine.train_batch()
    engine.destroy()
    both = ["batch", "batch", "loss", "loss"] * 2
    names = ["Cold", "Heat"]
    expected = ["Cold prepare", "Heat prepare"]
    expected += [f"{names[i % 2]} {what}" for i, what in enumerate(both)]
    expected += ["Cold before", "Heat before", "Cold after", "Heat after", "Heat close", "Cold close"]
    assert Heat.said == expected
    heat = engine.parts["heat"]
    assert heat.environment.world_size == 1
    assert heat.clocks == [Clock(0, 0, 0, 0), Clock(0, 1, 0, 0)]
    (record,) = heat.records
    assert record is engine.record
    assert record.metrics == {"cold/degrees": 20.0, "heat/degrees": 3.0}


def test_a_section_that_is_switched_off_or_absent_makes_no_part() -> None:
    assert begin({}).parts == {}
    assert begin({"heat": {"enabled": False, "degrees": 1.0}}).parts == {}


def test_what_parts_change_is_what_is_trained() -> None:
    changed = begin({"heat": {"enabled": True}, "gradient_clipping": 0.0})
    x, y = next(iter(changed.dataloader))
    changed.backward(changed(x, y))
    changed.step()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # the gradient itself
    (model(2 * x, y) * 3).backward()
    gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
    assert changed.record is not None
    assert changed.record.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert changed.record.lr == (0.5 * changed.lr_scheduler.rate(0, 0),)
    assert changed.get_lr() == [changed.lr_scheduler.rate(1, 0)]
    del optimizer


class Half:
    """A part that changes the loss, and nothing else."""

    def on_loss(self, loss: torch.Tensor, clock: Clock) -> torch.Tensor:
        return loss * 0.5


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_loss_that_parts_change_goes_backward_by_the_engine_alone(number: int) -> None:
    """Its own backward would train on another loss. Every rank is told, and the next step is right."""

    def fn(rank: int, *, refused: bool) -> dict[str, Any]:
        config = {**BASE, **stage(number), "gradient_accumulation_steps": 2}
        engine, *_ = initialize(config, net(), parts={"half": Half()})
        loss = engine(*data()[4 * rank : 4 * rank + 2])
        if refused:
            with pytest.raises(ValueError, match=r"whose part 'half' changes the loss.*engine\.backward\(loss\)"):
                loss.backward()
            engine.zero_grad()
        else:
            engine.zero_grad()
        for i in range(2):
            engine.backward(engine(*data()[4 * rank + 2 * i : 4 * rank + 2 * i + 2]))
            engine.step()
        assert engine.global_steps == 1
        return engine.module_state_dict()

    asked = [sim.run(2, lambda rank, refused=refused: fn(rank, refused=refused)) for refused in (True, False)]
    for found, expected in zip(*asked, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_states_of_parts_and_what_is_registered_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    class Counter:
        def __init__(self) -> None:
            self.value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    engine = begin({"heat": {"enabled": True}})
    mine = Counter()
    engine.register_state("mine", mine)
    for _ in range(3):
        engine.train_batch()
    mine.value = 7
    engine.save_checkpoint(tmp_path)
    again = begin({"heat": {"enabled": True}, "cold": {"enabled": True}})
    other = Counter()
    again.register_state("mine", other)
    again.load_checkpoint(tmp_path)
    assert other.value == 7
    assert again.parts["heat"].memory == 3
    assert (again.global_samples, again.clock) == (24, Clock(3, 0, 24, 0))
    assert "has nothing of the engine part 'cold'" in caplog.text
    caplog.clear()
    begin({}).load_checkpoint(tmp_path)
    assert "a state of the engine part 'heat', which is not there now" in caplog.text
    with pytest.raises(ValueError, match="the name is taken"):
        again.register_state("mine", other)
    with pytest.raises(ValueError, match="it needs state_dict"):
        again.register_state("number", 3)


def test_sinks_get_the_records() -> None:
    mine = Keeps(HeatSection(), None)  # type: ignore[arg-type]
    engine = begin({"wood": {"enabled": True}}, sinks={"mine": mine})
    for _ in range(3):
        engine.train_batch()
    engine.destroy()
    assert [r.step for r in mine.records] == [1, 2, 3]
    assert mine.closed


def test_a_section_that_nobody_carries_out_is_an_error() -> None:
    with pytest.raises(ConfigError, match="heat: asked for, and nobody carries it out"):
        begin({"heat": {"enabled": True}}, registry=registry(parts=False))
    begin({"heat": {"enabled": False}}, registry=registry(parts=False))


def test_a_name_is_taken_once() -> None:
    class Closes:
        def close(self) -> None:
            pass

    with pytest.raises(ValueError, match="the configuration has one of that name"):
        begin({"heat": {"enabled": True}}, parts={"heat": Closes()})
    assert list(begin({}, parts={"heat": Closes()}).parts) == ["heat"]


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_record_has_sums_and_means_of_all_ranks(number: int) -> None:
    def job(rank: int) -> list[StepRecord]:
        engine = begin({**stage(number), "gradient_accumulation_steps": 2})
        found = []
        for step in range(3):
            if step == 1 and rank == 1:
                engine.request_stop()
            engine.report("user/rank", rank)
            loss = engine.train_batch()
            assert engine.record is not None
            assert engine.record.loss == pytest.approx(float(loss), rel=1e-6)
            found.append(engine.record)
        return found

    first, second = sim.run(2, job)
    alone = begin({})
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        alone.train_batch()
        assert alone.record is not None
        assert one.step == other.step == step + 1
        assert one.loss == other.loss == pytest.approx(alone.record.loss, rel=1e-5)
        assert one.grad_norm == other.grad_norm == pytest.approx(alone.record.grad_norm, rel=1e-5)
        assert one.lr == other.lr == alone.record.lr
        assert one.samples == other.samples == 8
        assert one.total_samples == 8 * (step + 1)
        assert one.stop == other.stop == (step >= 1)
        assert one.metrics == {"user/rank": 0.0}
        assert other.metrics == {"user/rank": 1.0}
        assert one.step_s > 0
        assert one.wire_bytes > 0


def test_tokens_are_counted() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).square().mean()

    def job(rank: int) -> StepRecord | None:
        torch.manual_seed(0)
        engine = initialize({**BASE, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2}, Bag())[0]
        for _ in range(2):
            engine.train_batch(iter([torch.ones(2, 5 + rank, dtype=torch.long)]))
        return engine.record

    for record in sim.run(2, job):
        assert record is not None
        assert (record.tokens, record.total_tokens, record.samples) == (22, 44, 4)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_step_has_one_small_collective_and_a_record_none(number: int) -> None:
    def job(rank: int) -> tuple[int, int]:
        engine = begin(stage(number))
        for _ in range(2):
            engine.train_batch()
        plain = begin(stage(number))
        assert plain.optimizer is not None
        for x, y in list(plain.dataloader)[:2]:  # the same by hand, without a loss that is told to anybody
            plain.optimizer.backward(plain.module(x, y))
            plain.optimizer.step()
            plain.optimizer.zero_grad()

        def messages(engine: Engine) -> int:
            return sum(row.count for row in engine.comm.log.ops.values())

        with_engine, by_hand = messages(engine), messages(plain)
        before = messages(engine)
        assert engine.record is not None
        engine.record.to_dict()
        assert messages(engine) == before
        return with_engine, by_hand

    for with_engine, by_hand in sim.run(2, job):
        # At stage 0 every rank has the whole gradient and its norm; elsewhere the vector travels with the norms.
        assert with_engine - by_hand == (2 if number == 0 else 0)


def test_a_record_is_frozen() -> None:
    engine = begin({})
    engine.train_batch()
    assert engine.record is not None
    with pytest.raises(AttributeError):
        engine.record.loss = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        engine.record.metrics["a/b"] = 1.0  # type: ignore[index]
    with pytest.raises(ValueError, match="'user/accuracy'"):
        engine.report("accuracy", 1.0)


def test_wall_clock_breakdown() -> None:
    engine = begin({"wall_clock_breakdown": True})
    engine.train_batch()
    assert engine.record is not None
    assert set(engine.record.metrics) == {"time/forward_s", "time/backward_s", "time/update_s"}
    assert all(0 < value <= engine.record.step_s for value in engine.record.metrics.values())
