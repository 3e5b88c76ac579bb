"""DeepSpeed's own checkpoints, loaded by an engine: what goes on, what begins anew, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.foreign.golden_model import BEFORE, DECAY, LR, Net, batches, groups, loss_of, one_group
from torch import nn

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.checkpointing.foreign import ForeignCheckpoint, import_checkpoint, load_deepspeed, load_torch, plain
from zoo.engine import Engine, initialize

GOLDEN = Path(__file__).parents[1] / "checkpointing" / "foreign" / "golden"
CASES = ["stage0", "stage1", "stage2", "stage2_round_robin", "stage3", "stage2/universal", "stage3/universal"]


def start(stage: int, grouped: Any = groups, **changes: Any) -> Engine:
    """An engine for the golden model, whose optimizer has other settings than the checkpoints."""
    torch.set_num_threads(1)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.7}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **changes,
    }  # fmt: skip
    given = [{**group, "weight_decay": 0.3} for group in grouped(model)]
    return initialize(config, model, model_parameters=given)[0]


def train(engine: Engine, rank: int, world: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """The losses of the steps after a golden checkpoint."""
    found = []
    for number in range(BEFORE, len(batches(0))):
        parts = [batches(r, dtype)[number] for r in range(rank, 2, world)]
        loss = loss_of(engine, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def theirs(name: str) -> list[list[float]]:
    found: list[list[float]] = json.loads((GOLDEN / name / "losses.json").read_text())
    return found


@pytest.mark.dear
def test_training_goes_on_with_the_losses_of_deepspeed() -> None:
    for number, case in enumerate(CASES):
        name, _, tag = case.partition("/")

        def job(rank: int, world: int, stage: int, name: str = name, tag: str = tag or "step") -> list[float]:
            engine = start(stage)
            path, client = engine.load_checkpoint(GOLDEN / name, tag)
            assert (path, client) == (str(GOLDEN / name / tag), {"note": [1, (2, "three")]})
            assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (3, 24, 0)
            assert [(g["lr"], g["weight_decay"]) for g in engine.optimizer.param_groups] == [(LR, DECAY), (LR, 0.0)]
            assert engine.module.shift.tolist() == [0.0, 0.125, 0.25, 0.375, 0.5]
            return train(engine, rank, world)

        two = sim.run(2, lambda rank, stage=(3 + number) % 4, job=job: job(rank, 2, stage))
        for mine, expected in zip(two, theirs(name), strict=True):
            assert mine == pytest.approx(expected, rel=1e-6, abs=1e-6), case
        mean = torch.tensor(theirs(name)).mean(0).tolist()
        assert job(0, 1, number % 4) == pytest.approx(mean, rel=1e-6, abs=1e-6), case


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_at_every_stage(case: str, stage: int, world: int) -> None:
    name, _, tag = case.partition("/")

    def job(rank: int) -> list[float]:
        engine = start(stage)
        engine.load_checkpoint(GOLDEN / name, tag or "step")
        return train(engine, rank, world)

    found = torch.tensor(sim.run(world, job)).mean(0).tolist()
    assert found == pytest.approx(torch.tensor(theirs(name)).mean(0).tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "section"), [
    ("stage1_bf16", {"bf16": {"enabled": True}}), ("stage3_bf16", {"bf16": {"enabled": True}}),
    ("stage2_fp16", {"fp16": {"enabled": True, "initial_scale_power": 9}}),
])  # fmt: skip
@pytest.mark.parametrize("stage", [1, 3])
def test_16_bits_and_the_loss_scale(name: str, section: dict[str, Any], stage: int) -> None:
    def job(rank: int) -> list[float]:
        engine = start(stage, **section)
        engine.load_checkpoint(GOLDEN / name)
        scaler = {k: v for k, v in engine.optimizer.state_scalars().items() if k.startswith("zero/")}
        expected = {"zero/scale": 64.0, "zero/good_steps": 3.0, "zero/lives": 2.0} if "fp16" in section else {}
        assert scaler == expected
        return train(engine, rank, 2, torch.bfloat16 if "bf16" in section else torch.float16)

    for mine, expected in zip(sim.run(2, job), theirs(name), strict=True):
        assert mine == pytest.approx(expected, rel=1e-3)


def edited(folder: Path, name: str, **entries: Any) -> Path:
    """A golden checkpoint with other entries in the model's file."""
    shutil.copytree(GOLDEN / name, folder)
    for file in (folder / "step").glob("*model_states.pt"):
        model = torch.load(file, weights_only=False)
        torch.save({**model, **entries}, file)
    return folder


def test_the_schedule_goes_on(tmp_path: Path) -> None:
    section = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.1}}}
    folder = edited(tmp_path / "run", "stage1", lr_scheduler={"last_batch_iteration": 4}, global_steps=5)
    engine = start(1, **section)
    engine.load_checkpoint(folder)
    assert engine.get_lr() == [engine.lr_scheduler.rate(5, 0)] * 2
    torch_one = start(1, optimizer={"type": "AdamW", "params": {"lr": 0.5}})
    with pytest.raises(CheckpointError, match="state of another kind of learning-rate schedule"):
        _with_schedule(torch_one).load_checkpoint(folder)
    anew = start(1, **section)
    anew.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert anew.lr_scheduler.last_step == 0


def _with_schedule(engine: Engine) -> Engine:
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 3)
    return engine


def test_what_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zoo.engine"):
        sim.run(2, lambda rank: start(2).load_checkpoint(GOLDEN / "stage1"))
    (said,) = (r.getMessage() for r in caplog.records if "another system" in r.getMessage())
    assert "no position in the data and no states of random number generators" in said
    assert "at step 3" in said


def test_which_of_a_folder_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / "stage2", folder)
    (folder / "latest_universal").write_text("universal")
    universal = start(0, checkpoint={"load_universal": True})
    assert universal.load_checkpoint(folder)[0] == str(folder / "universal")
    assert start(0).load_checkpoint(folder)[0] == str(folder / "step")
    (folder / "latest").unlink()
    engine = start(0)
    assert engine.load_checkpoint(folder)[0] == str(folder / "universal")
    engine.save_checkpoint(folder, "ours")
    engine.wait_for_checkpoint()

    def job(rank: int) -> None:
        engine = start(2)
        with pytest.raises(CheckpointError, match=r"checkpoints of zoo \(ours\) and of DeepSpeed \(step, universal\)"):
            engine.load_checkpoint(folder)
        assert engine.load_checkpoint(folder, "ours")[0] == str(folder / "ours")
        assert engine.load_checkpoint(folder, "step")[0] == str(folder / "step")

    sim.run(2, job)
    shutil.copytree(folder / "ours", folder / "step", dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="files of a checkpoint of zoo and of one of DeepSpeed"):
        start(0).load_checkpoint(folder, "step")


@pytest.mark.parametrize("stage", [1, 3])
def test_what_cannot_be_read_any_more_on_one_rank_is_told_to_all(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ForeignCheckpoint.read
    failing = []

    def read(self: ForeignCheckpoint, name: str, role: str, start: int, length: int) -> torch.Tensor:
        if role in failing and torch.distributed.get_rank() == 1:
            raise CheckpointError("the file has become shorter")
        return whole(self, name, role, start, length)

    monkeypatch.setattr(ForeignCheckpoint, "read", read)

    def job(rank: int) -> None:
        engine = start(stage)
        failing.append("exp_avg")
        with pytest.raises(CheckpointError, match=r"rank 1.*the file has become shorter"):
            engine.load_checkpoint(GOLDEN / "stage2")
        with pytest.raises(ValueError, match="of an engine that is not loaded"):
            engine.backward(torch.ones(()))
        engine.comm.barrier()
        failing.clear()
        engine.comm.barrier()
        engine.load_checkpoint(GOLDEN / "stage2")
        train(engine, rank, 2)

    sim.run(2, job)


def test_groups_are_found_by_their_names(tmp_path: Path) -> None:
    turned = start(2, lambda model: groups(model)[::-1])
    turned.load_checkpoint(GOLDEN / "stage1")
    assert [g["weight_decay"] for g in turned.optimizer.param_groups] == [0.0, DECAY]
    engine = start(2, one_group)
    with pytest.raises(CheckpointError, match=r"group 0 .* had different weight_decay .*\(0.0, 0.1\)"):
        engine.load_checkpoint(GOLDEN / "stage1")
    with pytest.raises(CheckpointError, match="has 2 parameter groups without names, the optimizer 1"):
        engine.load_checkpoint(GOLDEN / "stage2", "universal")
    engine.load_checkpoint(GOLDEN / "stage1", load_optimizer_states=False)
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert engine.global_steps == 3


def test_options_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / "stage2" / "universal", folder / "universal")
    file = folder / "universal" / "zero" / "optimizer_state.pt"
    common = plain(load_torch(file).value, "it")
    for key, value in (("lr", "much"), ("betas", (0.9,)), ("eps", True), ("weight_decay", float("inf"))):
        odd = [{**group, key: value, "names": 5} for group in common["param_groups"]]
        torch.save({**common, "param_groups": odd}, file)
        with pytest.raises(CheckpointError, match=f"has {key} = .* among the options of a parameter group; the optim"):
            start(0).load_checkpoint(folder, "universal")
    fine = [{**group, "lr": torch.tensor(0.25), "names": 5, "fused": True} for group in common["param_groups"]]
    torch.save({**common, "param_groups": fine}, file)
    engine = start(0)
    engine.load_checkpoint(folder, "universal")
    assert engine.get_lr() == [0.25, 0.25]
    assert not {"names", "fused"} & set(engine.optimizer.param_groups[0])


def test_a_model_that_it_does_not_fit_is_refused_on_all_ranks() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 8)

    def job(rank: int) -> None:
        engine = initialize({"train_batch_size": 2, "optimizer": {"type": "AdamW"}}, Other())[0]
        with pytest.raises(
            CheckpointError, match=r"'first\.weight' has shape \(8, 5\); checkpoint 'step' has \(7, 5\)"
        ):
            engine.load_checkpoint(GOLDEN / "stage1", load_optimizer_states=False)

    sim.run(2, job)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_evaluates_takes_the_weights(stage: int) -> None:
    def job(rank: int) -> float:
        config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
        engine = initialize(config, Net())[0]
        engine.load_checkpoint(GOLDEN / "stage2")
        with torch.no_grad():
            return float(loss_of(engine, batches(rank)[BEFORE]))

    for mine, expected in zip(sim.run(2, job), theirs("stage2"), strict=True):
        assert mine == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "tag"), [("stage0", "step"), ("stage3", "step"), ("stage2", "universal")])
def test_imported_it_is_the_same(tmp_path: Path, name: str, tag: str) -> None:
    named = [[n for n, p in Net().named_parameters() if p.requires_grad and (p.dim() > 1) is matrix]
             for matrix in (True, False)]  # fmt: skip
    import_checkpoint(load_deepspeed(GOLDEN / name, tag, groups=named), tmp_path, "new")

    def job(rank: int) -> None:
        first, second = start(3), start(3)
        assert first.load_checkpoint(GOLDEN / name, tag)[1] == second.load_checkpoint(tmp_path)[1]
        assert train(first, rank, 2) == train(second, rank, 2)
        assert first.record == second.record or first.record.loss == second.record.loss
        states = ({(s.name, s.role, s.start): s.tensor for s in e.optimizer.state_slices()} for e in (first, second))
        for (place, one), (other, two) in zip(*(found.items() for found in states), strict=True):
            assert place == other
            assert torch.equal(one, two)

    sim.run(2, job)
