"""Steps that return before anybody knows what they came to: the same records, made later, and nothing is looked at."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_engine import BASE, data, net, stage
from tests.processes import run
from tests.profiles import examples
from tests.zero.late import LookedAtError, counted_reads, nothing_is_read

from zoo import sim
from zoo.engine import Engine, RepeatingLoader, initialize
from zoo.parts import StepRecord
from zoo.zero import ZeroOptimizer


@contextlib.contextmanager
def reading(late: bool | None) -> Iterator[None]:
    """Whether steps are waited for, inside."""
    before, ZeroOptimizer._reads_late = ZeroOptimizer._reads_late, late
    try:
        yield
    finally:
        ZeroOptimizer._reads_late = before


@pytest.fixture
def late() -> Iterator[None]:
    """Steps are not waited for."""
    with reading(True):
        yield


class Follows:
    """A part, and a sink, that keep the records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.fails_at = -1

    def after_update(self, record: StepRecord) -> None:
        self.records.append(record)
        if record.step == self.fails_at:
            raise OSError("after that step")

    def metrics(self) -> dict[str, float]:
        return {"seen": float(len(self.records))}

    write = after_update

    def close(self) -> None:
        pass


FP16: dict[str, Any] = {
    "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 3}
}


def start(changes: dict[str, Any] | None = None, bad: int = -1) -> tuple[Engine, Follows, Follows]:
    torch.set_num_threads(1)
    part, sink, model, samples = Follows(), Follows(), net(), data()
    if bad >= 0:
        samples.tensors[0][bad] = float("inf")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    document = {**BASE, "optimizer": None, **(changes or {})}
    engine = initialize(
        document, model, optimizer=optimizer, training_data=samples, parts={"follows": part}, sinks={"sink": sink}
    )[0]
    return engine, part, sink


def plain(record: StepRecord) -> dict[str, str]:
    """What is the same however the step was waited for: skipped ones send parameters that have not changed."""
    found = dataclasses.asdict(dataclasses.replace(record, step_s=0.0, wire_bytes=0, metrics={**record.metrics}))
    return {key: repr(value) for key, value in found.items()}


def go(number: int, scaled: bool, accumulation: int, bad: int, asked: list[str]) -> list[Any]:
    changes = {**stage(number), "gradient_accumulation_steps": accumulation, **(FP16 if scaled else {})}
    engine, part, sink = start(changes, bad)
    found: list[Any] = []
    losses = []
    batches = iter(RepeatingLoader(engine.dataloader))
    for what in asked:
        if what == "calls":
            for _ in range(accumulation):
                engine.backward(engine(*next(batches)))
                engine.step()
        else:
            losses.append(engine.train_batch(batches))
        if what == "lr":
            found.append((engine.get_lr(), engine.lr_scheduler.get_last_lr()))
        elif what == "counts":
            found.append((engine.skipped_steps, engine.global_samples, engine.clock))
        elif what == "record" and engine.record is not None:
            found.append(plain(engine.record))
    found += [float(loss) for loss in losses]
    engine.destroy()
    assert [r.step for r in part.records] == [r.step for r in sink.records] == list(range(1, len(asked) + 1))
    found.append([plain(r) for r in part.records])
    found.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    return [*found, engine.skipped_steps]


ASKED = st.lists(st.sampled_from(["nothing", "nothing", "calls", "record", "lr", "counts"]), min_size=1, max_size=5)


@examples(times=0.6)
@given(st.integers(0, 3), st.integers(1, 2), st.booleans(), st.integers(1, 2), st.sampled_from([-1, 20, 40]), ASKED)
def test_records_losses_and_rates_are_those_of_steps_that_are_waited_for(
    number: int, world: int, scaled: bool, accumulation: int, bad: int, asked: list[str]
) -> None:
    found = []
    for late in (False, True):
        with reading(late):
            found.append(sim.run(world, lambda rank: go(number, scaled, accumulation, bad, asked)))
    for waiting, other in zip(*found, strict=True):
        assert repr(waiting) == repr(other)


@pytest.mark.matrix
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "changes", [{}, {"fp16": {**FP16["fp16"], "initial_scale_power": 8}}, {"gradient_clipping": 0.0}],
    ids=["clipping", "fp16", "norm"],
)  # fmt: skip
def test_nothing_is_read_between_the_first_forward_and_the_return(
    world: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, scaled = counted_reads(monkeypatch), "fp16" in changes

    def job(rank: int) -> None:
        engine, _, _ = start({**stage(2), "gradient_accumulation_steps": 2, **changes})
        batches = [next(iter(engine.dataloader)) for _ in range(2)]
        engine.train_batch(iter(batches))
        for _ in range(3):  # what is known of the step before is read by the next update, and nothing else is
            with nothing_is_read():
                loss = engine.train_batch(iter(batches))
                own = engine.optimizer.outcome
                for batch in batches:
                    assert own is engine.optimizer.outcome or scaled  # a scaled backward needs the scale
                    engine.backward(engine(*batch))
                    engine.step()
            assert own is not None
            assert engine.optimizer.outcome is not None
            assert loss.dim() == 0
            assert loss.isfinite()
        assert engine.global_steps == 7

    sim.run(world, job)
    assert len({id(outcome) for outcome in reads}) == 6 * world  # the seventh was never asked for


@pytest.mark.usefixtures("late")
def test_a_record_starts_no_collective() -> None:
    def job(rank: int) -> None:
        engine, _, _ = start({**stage(1), "comm": {"check": True}})
        for step in range(4):
            engine.train_batch()
            table = engine.comm.log.table()
            if rank == 0 or step == 3:  # the other one never asks
                assert engine.record is not None
                assert engine.record.step == step + 1
            assert engine.comm.log.table() == table

    sim.run(2, job)


@pytest.mark.usefixtures("late")
def test_what_is_saved_is_known_first(tmp_path: Path) -> None:
    changes = {**stage(1), "fp16": {**FP16["fp16"], "initial_scale_power": 8}}
    engine, part, _ = start(changes)
    for _ in range(5):
        engine.train_batch()
    assert len(part.records) == 4
    engine.save_checkpoint(tmp_path)
    assert len(part.records) == 5
    again, follows, _ = start(changes)
    again.train_batch()
    again.train_batch()
    assert len(follows.records) == 1
    again.load_checkpoint(tmp_path)
    assert len(follows.records) == 2
    assert (again.clock, again.skipped_steps) == (engine.clock, engine.skipped_steps)
    assert again.optimizer.loss_scale == engine.optimizer.loss_scale
    for _ in range(3):
        assert torch.equal(engine.train_batch(), again.train_batch())
    assert again.get_lr() == engine.get_lr()


@pytest.mark.usefixtures("late")
def test_nothing_is_saved_or_loaded_where_the_latest_step_ends_the_run(tmp_path: Path) -> None:
    engine, _, _ = start(stage(3))
    engine.train_batch()
    engine.save_checkpoint(tmp_path / "first")
    for what in (
        lambda: engine.save_checkpoint(tmp_path / "second"),
        lambda: engine.save_16bit_model(tmp_path / "second"),
        lambda: engine.load_checkpoint(tmp_path / "first"),
    ):
        engine.train_batch()
        engine.parts["follows"].fails_at = engine.global_steps
        before = engine.optimizer.consolidated_parameters()
        with pytest.raises(OSError, match="after that step"):
            what()
        after = engine.optimizer.consolidated_parameters()
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert not (tmp_path / "second").exists()


@pytest.mark.usefixtures("late")
def test_what_a_script_measures_itself_is_no_part_of_a_record() -> None:
    found = []
    for measures in (False, True):
        engine, part, _ = start(stage(1))
        for step in range(4):
            batch = next(iter(engine.dataloader))
            engine.backward(engine(*batch))
            if measures:
                assert engine.optimizer.clip_grad_norm_(1e9) == engine.optimizer.global_norm() > 0
            if step != 2 or not measures:
                engine.step()
                continue
            engine.optimizer.step()  # past the engine: a step that it does not count
            engine.optimizer.zero_grad()
        engine.destroy()
        found.append([plain(record) for record in part.records])
    assert found[1][:2] == found[0][:2]
    assert [record["step"] for record in found[1]] == ["1", "2", "3"]


@pytest.mark.usefixtures("late")
def test_what_a_part_raises_comes_before_the_next_update() -> None:
    engine, part, _ = start(stage(2))
    part.fails_at = 3
    for _ in range(3):
        engine.train_batch()
    before = engine.optimizer.consolidated_parameters()
    with pytest.raises(OSError, match="after that step"):
        engine.train_batch()
    assert engine.global_steps == 3
    after = engine.optimizer.consolidated_parameters()
    assert all(torch.equal(after[name], before[name]) for name in before)
    engine.train_batch()
    engine.destroy()
    assert [record.step for record in part.records] == [1, 2, 3, 4]


@pytest.mark.usefixtures("late")
def test_the_last_record_gets_to_the_sinks() -> None:
    engine, _, sink = start()
    engine.train_batch()
    engine.train_batch()
    engine.feed.close()
    assert [record.step for record in sink.records] == [1, 2]
    engine, part, sink = start()
    part.fails_at = 2
    engine.train_batch()
    engine.train_batch()
    with pytest.raises(OSError, match="after that step"):
        engine.destroy()
    assert [record.step for record in sink.records] == [1, 2]
    assert not hasattr(engine.module.first.weight, "_zoo_slot")  # closed all the same


ENDS = """
from tests.engine.test_late import ZeroOptimizer, start
from zoo.parts import StepRecord

class Says:
    def write(self, record: StepRecord) -> None:
        print("record", record.step, flush=True)

    def close(self) -> None:
        print("closed", flush=True)

ZeroOptimizer._reads_late = True
engine, _, sink = start()
engine.feed._sinks = {"says": Says()}
engine.train_batch()
engine.train_batch()
engine.feed.flush()
print("end", flush=True)
"""


def test_a_script_that_ends_without_destroy_loses_no_record() -> None:
    result = run(ENDS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["record", "1", "end", "record", "2", "closed"]


def test_on_the_cpu_a_step_is_waited_for() -> None:
    engine, part, _ = start()
    with pytest.raises(LookedAtError), nothing_is_read():
        engine.train_batch()
    engine.train_batch()
    assert part.records[-1].step == engine.global_steps
