"""What careless scripts do with an engine: it computes what plain torch would, or is refused with a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_engine import BASE, data, net, stage, start
from torch import nn
from torch.utils.data import DataLoader

from zoo import sim
from zoo.engine import Engine, RepeatingLoader, ShardedLoader, initialize
from zoo.monitor import Feed
from zoo.parts import StepRecord

GAS = {"gradient_accumulation_steps": 2, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2}


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return engine.optimizer.consolidated_parameters()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def by_hand(engine: Engine, batches: list[Any]) -> None:
    for batch in batches:
        engine.backward(engine(*batch))
        engine.step()


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_loading_in_the_middle_of_a_step_drops_its_gradients(number: int, tmp_path: Path) -> None:
    def job(rank: int) -> bool:
        engine, twin = (start({**stage(number), **GAS, "scheduler": None}) for _ in range(2))
        batches = list(engine.dataloader)
        for one in (engine, twin):
            by_hand(one, batches[:2])
        engine.save_checkpoint(tmp_path)
        engine.backward(engine(*batches[5]))
        engine.step()
        engine.load_checkpoint(tmp_path)
        for one in (engine, twin):
            by_hand(one, batches[2:4])
        return same(weights(engine), weights(twin))

    assert sim.run(2, job) == [True, True]


def test_training_in_evaluation_mode_is_training() -> None:
    engine, twin = start({**GAS, "scheduler": None}), start({**GAS, "scheduler": None})
    batches = list(engine.dataloader)[:2]
    for batch in batches:
        engine.eval()(*batch).backward()
        engine.step()
        twin.backward(twin.eval()(*batch))
        twin.step()
    assert all(torch.allclose(weights(engine)[name], weights(twin)[name], atol=1e-6) for name in weights(twin))
    assert engine.record is not None
    assert engine.record.samples == 4


def test_a_loaders_position_belongs_to_its_newest_iteration(tmp_path: Path) -> None:
    engine = start()
    engine.train_batch()
    assert engine.dataloader is not None
    for _ in engine.dataloader:  # a look through all of it
        pass
    for _ in range(9):  # over the end of an epoch
        engine.train_batch()
    next(iter(engine.dataloader))
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    again = start()
    again.load_checkpoint(tmp_path)
    assert float(again.train_batch()) == float(engine.train_batch())
    loader: ShardedLoader[Any] = engine.dataloader
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="is not the newest: another one has begun"):
        next(old)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_accumulation_with_updates_in_backward(number: int) -> None:
    def job(rank: int) -> bool:
        section = {"zero_optimization": {**stage(number)["zero_optimization"], "update_in_backward": True}}
        plain = {**GAS, "gradient_clipping": 0.0}
        one, other = start({**plain, **section}), start({**plain, **stage(number)})
        for _ in range(3):
            one.train_batch()
            other.train_batch()
        found, expected = weights(one), weights(other)
        return all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)

    assert sim.run(2, job) == [True, True]


def test_parts_that_act_before_an_update_are_refused_where_it_is_in_backward() -> None:
    class Halves:
        def lr_factor(self, clock: Any) -> float:
            return 0.5

    section = {"stage": 2, "update_in_backward": True}
    with pytest.raises(ValueError, match="update_in_backward with the engine part halves"):
        initialize({**BASE, "gradient_clipping": 0.0, "zero_optimization": section}, net(), parts={"halves": Halves()})


def test_a_refused_load_changes_nothing(tmp_path: Path) -> None:
    engine = start()
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(tmp_path)
    other = initialize(BASE, net(), training_data=data(48))[0]
    before, counts = weights(other), (other.global_steps, other.dataloader.state_dict())
    with pytest.raises(ValueError, match="of a data set of 64 samples; this one has 48"):
        other.load_checkpoint(tmp_path)
    model = net()
    model.register_buffer("extra", torch.zeros(3))
    more = initialize(BASE, model, training_data=data())[0]
    with pytest.raises(ValueError, match="the model's buffer 'extra'"):
        more.load_checkpoint(tmp_path)
    assert same(weights(other), before)
    assert same(weights(more), before)
    assert (other.global_steps, other.dataloader.state_dict()) == counts


def test_after_a_failed_train_batch_steps_by_hand_begin_anew() -> None:
    engine, twin = start({**GAS, "scheduler": None}), start({**GAS, "scheduler": None})
    batches = list(engine.dataloader)
    with pytest.raises(StopIteration):
        engine.train_batch(iter(batches[:1]))
    by_hand(engine, batches[1:3])
    by_hand(twin, batches[1:3])
    assert engine.global_steps == 1
    assert same(weights(engine), weights(twin))


def test_a_schedule_that_raises_has_not_undone_the_step() -> None:
    class Raises:
        def __init__(self) -> None:
            self.count = 0

        def step(self) -> None:
            self.count += 1
            if self.count == 2:
                raise RuntimeError("no rate")

    told: list[int] = []

    class Keeps:
        def write(self, record: StepRecord) -> None:
            told.append(record.step)

        def close(self) -> None: ...

    changes = {**BASE, "scheduler": None}
    engine = initialize(changes, net(), training_data=data(), lr_scheduler=Raises(), sinks={"keeps": Keeps()})[0]
    engine.train_batch()
    with pytest.raises(RuntimeError, match="no rate"):
        engine.train_batch()
    engine.train_batch()
    assert (engine.global_steps, engine.micro_steps) == (3, 3)
    engine.destroy()
    assert told == [1, 2, 3]


class Metrics:
    """A part whose numbers cannot be had after the second step."""

    def __init__(self) -> None:
        self.asked = 0

    def metrics(self) -> dict[str, float]:
        self.asked += 1
        if self.asked == 2:
            raise KeyError("no such number")
        return {"asked": self.asked}


@pytest.mark.parametrize("number", [0, 2])
def test_metrics_that_cannot_be_had_have_not_undone_the_step(number: int) -> None:
    changes = {**stage(number), "train_batch_size": 8}
    engine = initialize({**BASE, **changes}, net(), training_data=data(), parts={"mine": Metrics()})[0]
    twin = start(changes)
    batches = list(engine.dataloader)[:3]
    for step, batch in enumerate(batches):
        twin.backward(twin(*batch))
        twin.step()
        engine.backward(engine(*batch))
        with pytest.raises(KeyError, match="no such number") if step == 1 else contextlib.nullcontext():
            engine.step()
        record, expected = engine.record, twin.record
        assert record is not None
        assert expected is not None
        assert (record.step, record.samples, record.total_samples) == (step + 1, 8, 8 * (step + 1))
        assert (record.loss, engine.get_lr()) == (expected.loss, twin.get_lr())
        assert record.metrics == ({} if step == 1 else {"mine/asked": step + 1})
    assert same(weights(engine), weights(twin))


def test_a_schedule_that_needs_more_is_told_before_anything_changes() -> None:
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    engine = initialize({**BASE, "scheduler": None}, net(), training_data=data(), lr_scheduler=plateau)[0]
    before = weights(engine)
    with pytest.raises(ValueError, match="the step of the schedule ReduceLROnPlateau cannot be called"):
        engine.train_batch()
    assert same(weights(engine), before)
    engine.zero_grad()
    batch = next(iter(engine.dataloader))
    engine.backward(engine(*batch))
    engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.global_steps == 1


def test_a_step_without_gradients_has_no_norm() -> None:
    engine = start()
    engine.train_batch()
    before = weights(engine)
    engine.step()
    assert engine.record is not None
    assert (engine.record.loss, engine.record.grad_norm, engine.record.skipped) == (None, None, False)
    assert same(weights(engine), before)


def test_destroying_goes_on_when_a_part_cannot_close() -> None:
    closed: list[str] = []

    class Bad:
        def close(self) -> None:
            raise RuntimeError("stuck")

    class Good:
        def close(self) -> None:
            closed.append("good")

    engine = initialize({**BASE, **stage(3)}, net(), parts={"a": Good(), "b": Bad()})[0]
    with pytest.raises(RuntimeError, match="stuck"):
        engine.destroy()
    assert closed == ["good"]
    assert all(p.numel() for p in engine.module.parameters())


def test_a_state_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    class Fails:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            if self.rank == 1:
                raise KeyError("lost")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def job(rank: int) -> None:
        engine = start(stage(2))
        engine.register_state("mine", Fails(rank))
        with pytest.raises(Exception, match="lost"):
            engine.save_checkpoint(tmp_path)

    sim.run(2, job)
    assert not list(tmp_path.glob("*/manifest.json"))


def test_evaluation_gives_each_module_its_own_mode_back() -> None:
    engine = start()
    engine.module.norm.eval()
    engine.eval_batch(next(iter(engine.dataloader)))
    engine.train_batch()
    assert engine.module.training
    assert not engine.module.norm.training


def test_a_loader_without_a_state_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = initialize(BASE, net(), training_data=DataLoader(data(), batch_size=8))[0]
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert "the loader, a DataLoader, has no state_dict and load_state_dict: it begins anew" in caplog.text


def test_a_batch_size_set_by_hand_is_kept(tmp_path: Path) -> None:
    engine = start(GAS)
    engine.set_train_batch_size(6)
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    again = start(GAS)
    again.load_checkpoint(tmp_path)
    assert again.train_batch_size == 6
    assert float(again.train_batch()) == float(engine.train_batch())
    other = start({**GAS, "gradient_accumulation_steps": 4})  # what a configuration says is the configuration's
    start(GAS).save_checkpoint(tmp_path / "plain")
    other.load_checkpoint(tmp_path / "plain")
    assert other.train_batch_size == 8


def test_forwards_that_came_to_nothing_do_not_count() -> None:
    engine = start()
    batch = next(iter(engine.dataloader))
    engine(*batch)
    with pytest.raises(RuntimeError):
        engine(batch[0][:, :2], batch[1])
    engine.backward(engine(*batch))
    engine.step()
    assert engine.record is not None
    assert engine.record.samples == 8


def test_forwards_that_do_not_go_backward_do_not_count_either() -> None:
    """An evaluation with gradients on, between a micro-batch's forward and its step, whatever its mode and its use."""

    def job(rank: int, number: int, where: int) -> None:
        engine = start({**stage(number), "scheduler": None})
        x, y = (t[:3] for t in next(iter(engine.dataloader)))
        other = x[:1].clone().requires_grad_()

        def evaluate(at: int) -> None:
            if at == where:
                (found,) = torch.autograd.grad(engine.eval()(other, y[:1]), other)
                assert found.shape == other.shape
                engine.train()

        for step in (1, 2):
            loss = engine(x, y)
            evaluate(0)
            engine.backward(loss)
            evaluate(1)
            engine.step()
            evaluate(2)
            assert engine.record is not None
            assert (engine.record.samples, engine.global_samples) == (6, 6 * step)

    for number in (0, 2):
        for where in range(3):
            sim.run(2, lambda rank, number=number, where=where: job(rank, number, where))


def test_a_forward_ahead_counts_in_its_own_micro_batch() -> None:
    engine = start({**GAS, "scheduler": None})
    x, y = next(iter(engine.dataloader))
    engine.backward(engine(x[:2], y[:2]))
    ahead = engine(x[:1], y[:1])
    engine.step()
    engine.backward(ahead)
    engine.step()
    assert engine.record is not None
    assert engine.record.samples == 3


def test_no_sync_within_no_sync() -> None:
    engine = start()
    with engine.no_sync():
        with engine.no_sync():
            engine.backward(engine(*next(iter(engine.dataloader))))
        for call in (engine.step, engine.train_batch):
            with pytest.raises(ValueError, match=r"\(\) inside of no_sync"):
                call()


def test_stages_of_a_pipeline_count_samples_once() -> None:
    def job(rank: int) -> int:
        engine = start({"mesh": {"axes": {"pipe": 2, "data": 1}}, "train_batch_size": 8})
        engine.train_batch()
        assert engine.record is not None
        return engine.record.samples

    assert sim.run(2, job) == [8, 8]


def test_a_sink_that_leaves_the_thread_is_switched_off() -> None:
    class Leaves:
        def write(self, record: StepRecord) -> None:
            raise SystemExit

        def close(self) -> None: ...

    told: list[int] = []

    class Keeps(Leaves):
        def write(self, record: StepRecord) -> None:
            told.append(record.step)

    feed = Feed({"leaves": Leaves(), "keeps": Keeps()})
    for step in range(3):
        feed.put(StepRecord(step=step, loss=None, lr=(), grad_norm=None))
    assert feed.flush(10)
    feed.close()
    assert told == [0, 1, 2]
    assert "SystemExit" in feed.failed["leaves"]


class Epochs:
    """A loader without a state and without a number of its iterations, as most are: the same batches in each epoch."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((8, 5), self.value + i), torch.zeros(8, 1)) for i in range(6)])


class Seeing(nn.Module):
    """The model, and the first number of each batch that came."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = net(), list[float]()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x[0, 0]))
        return self.net(x, y)


def test_a_loader_that_takes_the_place_of_another_is_the_one_that_trains() -> None:
    model = Seeing()
    engine = initialize(BASE, model, training_data=Epochs(0.0))[0]
    engine.train_batch()
    engine.dataloader = Epochs(50.0)
    engine.train_batch()
    engine.train_batch()
    assert model.seen == [0.0, 50.0, 51.0]


def test_a_loader_without_a_state_begins_anew_when_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    model = Seeing()
    engine = initialize(BASE, model, training_data=Epochs(0.0))[0]
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    engine.train_batch()
    engine.load_checkpoint(tmp_path)
    engine.train_batch()
    assert model.seen == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("number", [0, 2])
def test_the_number_of_micro_batches_does_not_change_within_a_step(number: int) -> None:
    engine = start({**stage(number), **GAS, "gradient_accumulation_steps": 4})
    batches = list(engine.dataloader)[:4]
    by_hand(engine, batches[:2])
    with pytest.raises(ValueError, match=r"boundary.change\(\) in the middle of a step, after 2 of 4 micro-batches"):
        engine.boundary.change(2)
    by_hand(engine, batches[2:])
    twin = start({**stage(number), **GAS, "gradient_accumulation_steps": 4})
    by_hand(twin, batches)
    assert same(weights(engine), weights(twin))
    engine.boundary.change(2)
    assert engine.accumulation == 2


def test_gradients_dropped_between_forward_and_backward_do_not_drop_its_samples() -> None:
    engine, twin = start({"scheduler": None}), start({"scheduler": None})
    x, y = next(iter(engine.dataloader))
    loss = engine(x, y)
    engine.zero_grad()  # as loops of torch often have it
    engine.backward(loss)
    engine.step()
    by_hand(twin, [(x, y)])
    assert engine.record is not None
    assert (engine.record.samples, engine.global_samples) == (8, 8)
    assert engine.record.step_s > 0
    assert same(weights(engine), weights(twin))


def test_micro_batches_are_counted_on_from_a_checkpoint(tmp_path: Path) -> None:
    engine = start(GAS)
    engine.set_gradient_accumulation_boundary(True)
    by_hand(engine, list(engine.dataloader)[:3])
    engine.set_gradient_accumulation_boundary(None)
    engine.train_batch()
    assert (engine.global_steps, engine.micro_steps) == (4, 5)
    engine.save_checkpoint(tmp_path)
    again = start(GAS)
    again.load_checkpoint(tmp_path)
    assert (again.global_steps, again.micro_steps) == (4, 5)
    other = start({**GAS, "gradient_accumulation_steps": 4})  # what would have been, with its number of micro-batches
    other.load_checkpoint(tmp_path)
    assert (other.global_steps, other.micro_steps) == (4, 16)


def test_two_loaders_in_turn() -> None:
    engine = start()
    mine = iter(RepeatingLoader(ShardedLoader(data(), 8, seed=9)))
    losses = [float(engine.train_batch(mine if i % 2 else None)) for i in range(4)]
    assert len(set(losses)) == 4
    assert engine.dataloader.position == 16
