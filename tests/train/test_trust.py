"""What a run promises: nothing is overwritten, nothing bad is saved, a step can be run again, a signal saves."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.train.tiny import Net, config, registry

from zoo import sim
from zoo.checkpointing import latest_tag, prune
from zoo.comm import Communicator
from zoo.train import DataEndError, NotFiniteError, StoppedError, replay, train
from zoo.train.output import Output, choose
from zoo.train.stopping import Signals


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines(out)]


def run(out: Path, *, resume: bool = False, **more: Any) -> Any:
    return train(config(out, **more), resume=resume, registry=registry())


# -- where a run writes -----------------------------------------------------------------------------------------------


@pytest.mark.dear
def test_a_run_that_is_there_is_refused_resumed_or_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    out = tmp_path / "out"
    run(out, steps=4)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    with pytest.raises(ValueError, match=r"there is a run in .*out' already. Go on with it \(--resume"):
        run(out)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    assert run(out, if_exists="number", steps=4).out == f"{out}-2"
    assert run(out, if_exists="number", steps=4).out == f"{out}-3"
    assert run(out, if_exists="resume", steps=8).steps == 8
    assert [line["step"] for line in lines(out)] == list(range(1, 9))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another launch")
    assert run(out, if_exists="number", steps=4).out == f"{out}-4"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run(out, if_exists="number", steps=10).out == f"{out}-4"
    assert run(tmp_path / "out-4", steps=12).out == f"{out}-4"
    assert [len(lines(tmp_path / name)) for name in ("out", "out-2", "out-3", "out-4")] == [8, 4, 4, 12]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one that was refused, or died before it wrote")
    with pytest.raises(ValueError, match="already"):
        run(out, steps=10)
    assert run(out, if_exists="number", steps=4).out == f"{out}-5"


def test_the_folder_where_one_is_can_be_numbered_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    section = config(Path("."), if_exists="number").train
    assert section is not None
    comm = Communicator.alone()
    assert choose(section, resume=False, comm=comm) == Output(Path("."), False)
    Path("config.json").write_text("{}")
    assert choose(section, resume=False, comm=comm) == Output(tmp_path / "out-2", False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # died before it wrote
    assert choose(section, resume=False, comm=comm) == Output(tmp_path / "out-2", False)


def test_a_restart_goes_on_where_rank_0_is_on_another_host_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = config(tmp_path / "out").train
    assert section is not None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "zoo-0123456789ab")
    choose(section, resume=False, comm=Communicator.alone())
    (tmp_path / "out/config.json").write_text("{}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert choose(section, resume=False, comm=Communicator.alone()) == Output(tmp_path / "out", True)


@pytest.mark.dear
@pytest.mark.parametrize("latest", ["", None, "nowhere"])
def test_resuming_takes_the_newest_checkpoint_whatever_latest_says(tmp_path: Path, latest: str | None) -> None:
    first = run(tmp_path, steps=4)
    path = tmp_path / "checkpoints/latest"
    path.unlink()
    if latest is not None:
        path.write_text(latest)
    (tmp_path / "log.jsonl").open("a").write('{"step": null}\n')
    found = run(tmp_path, steps=6, resume=True)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 7))
    assert (first.tokens, found.tokens, first.total_tokens, found.total_tokens) == (32, 16, 32, 48)


def test_an_empty_folder_is_no_run_and_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run(tmp_path / "out", steps=1)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file' is a file; name a directory"):
        run(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.matrix
@pytest.mark.parametrize("keep", [1, 2, None])
def test_the_last_checkpoints_are_kept(tmp_path: Path, keep: int | None) -> None:
    run(tmp_path, keep_checkpoints=keep, checkpoint_every=3)
    kept = sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*"))
    every = [f"step_{step:08d}" for step in (3, 6, 9, 12)]
    assert kept == (every if keep is None else every[-keep:])


def test_what_is_pruned_is_never_the_latest_nor_half_there(tmp_path: Path) -> None:
    run(tmp_path, checkpoint_every=3)
    root = tmp_path / "checkpoints"
    os.utime(root / "step_00000012" / "manifest.json", ns=(0, 0))  # a clock that was set back
    assert prune(root, 2) == ["step_00000003", "step_00000006"]
    assert latest_tag(root) == "step_00000012"
    (root / "step_00000009" / "manifest.json").unlink()  # as if it had ended in the middle
    (root / "notes").mkdir()
    prune(root, 1)
    found = sorted(p.name for p in root.iterdir())
    assert found == ["latest", "notes", "step_00000009", "step_00000012", "zero_to_fp32.py"]
    prune(root, 1, rest_age_s=0.0)
    assert sorted(p.name for p in root.iterdir()) == ["latest", "notes", "step_00000012", "zero_to_fp32.py"]
    with pytest.raises(ValueError, match="keep=0"):
        prune(root, 0)


# -- the end of the data ----------------------------------------------------------------------------------------------


@pytest.mark.dear
def test_data_that_ends_for_good_ends_the_run_with_what_was_trained(tmp_path: Path) -> None:
    packed = {"enabled": True, "max_tokens": 12, "lr_scaling_method": "none"}  # 4 samples of 3: 16 micro-batches

    def job(rank: int, epochs: int, resume: bool) -> str:
        sampling = json.dumps({"enabled": True, "num_epochs": epochs, "dynamic_batching": packed})
        changes = {"data_efficiency.enabled": "true", "data_efficiency.data_sampling": sampling}
        made = config(tmp_path, 2, {**changes, "gradient_accumulation_steps": 3, "train_batch_size": 24}, steps=20)
        with pytest.raises(DataEndError) as caught:
            train(made, resume=resume, registry=registry())
        return str(caught.value)

    for epochs, steps, resume in ((1, 2, False), (1, 2, True), (3, 7, True)):
        texts = sim.run(2, functools.partial(job, epochs=epochs, resume=resume))
        assert texts[0] == texts[1]
        assert f"ended for good after step {steps} of 20; the checkpoint is written." in texts[0]
        assert latest_tag(tmp_path / "checkpoints") == f"step_{steps:08d}"
        assert [line["step"] for line in lines(tmp_path)] == list(range(1, steps + 1))


# -- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_unit(tmp_path: Path, stage: int) -> None:
    def job(rank: int) -> str:
        made = config(
            tmp_path, 2, {"zero_optimization.stage": stage}, task={"type": "tiny", "params": {"bad": 20}}, steps=50,
            checkpoint_every=1,
        )  # fmt: skip
        with pytest.raises(NotFiniteError) as caught:
            train(made, registry=registry())
        return str(caught.value)

    first, second = sim.run(2, job)
    assert first == second
    assert "the first output that is not finite is that of 'log' (Log); its inputs are finite" in first
    step = len(lines(tmp_path)) + 1
    assert f"the loss is nan and the gradient's norm nan at step {step}; the run has stopped" in first
    tag = latest_tag(tmp_path / "checkpoints")
    assert tag == (f"step_{step - 1:08d}" if step > 1 else None)


def test_a_bad_batch_and_a_bad_parameter_are_told_apart(tmp_path: Path) -> None:
    class Bad(Net):
        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                self.last.bias.fill_(float("inf"))

    own = registry()
    task = own.get("task", "tiny")

    class Tiny(task):  # type: ignore[misc, valid-type]
        def model(self) -> Any:
            return Bad()

    own.register("task", "bad", Tiny)
    with pytest.raises(NotFiniteError, match=r"the parameter last.bias is not finite"):
        train(config(tmp_path / "a"), registry=_as(None, "tiny", Tiny))

    class Data(task):  # type: ignore[misc, valid-type]
        def training_data(self) -> Any:
            found = super().training_data()
            found.tensors[0][:] = float("nan")
            return found

    with pytest.raises(NotFiniteError, match="micro-batch 1 of 2: the batch itself has values that are not finite"):
        train(config(tmp_path / "b"), registry=_as(None, "tiny", Data))


def _as(registry_: Any, name: str, factory: Any) -> Any:
    from zoo.registry import CORE, Registry

    found = Registry(CORE, origin="core")
    found.register("task", name, factory)
    return found


# -- a step again -----------------------------------------------------------------------------------------------------


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, 3])
def test_every_step_runs_again_to_the_same_bits(tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    changes = {"zero_optimization.stage": stage}
    sim.run(2, lambda rank: train(config(tmp_path, 2, changes), registry=registry()))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for step in (1, 4, 6, 12):
        first, second = sim.run(2, lambda rank, step=step: replay(tmp_path, step, registry=registry()))
        assert first == second
        assert first.differences == ()
        assert first.began_at == (step - 1) // 4 * 4
        assert (first.states_compared > 0) == (step % 4 == 0)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    changed = ("optimizer.params.lr=0.02",)
    found = sim.run(2, lambda rank: replay(tmp_path, 4, overrides=changed, registry=registry()))[0]
    assert any("step 1: lr is 0.02, and 0.01 in the log" in text for text in found.differences)
    assert any("elements of parameter" in text for text in found.differences)
    assert "differences; the first: step 1: lr" in found.verdict()


def test_what_cannot_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is no directory of a run"):
        replay(tmp_path, 1)
    run(tmp_path / "out", steps=2)
    with pytest.raises(ValueError, match=r"replay of step 4: the log of .* has 1 to 2"):
        replay(tmp_path / "out", 4, registry=registry())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="had 1 ranks, and there are 2 here; start with torchrun"):
        replay(tmp_path / "out", 1, registry=registry())


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.dear
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_and_resuming_is_never_having_stopped(tmp_path: Path, number: signal.Signals) -> None:
    run(tmp_path / "whole")
    own = registry()
    task = own.get("task", "tiny")

    class Sends(task):  # type: ignore[misc, valid-type]
        def training_data(self) -> Any:
            data, count = super().training_data(), 0

            class Data(torch.utils.data.Dataset[Any]):
                def __len__(self) -> int:
                    return len(data)

                def __getitem__(self, index: int) -> Any:
                    nonlocal count
                    count += 1
                    if count == 8 * 5 + 3:  # in the sixth step
                        os.kill(os.getpid(), number)
                    return data[index]

            return Data()

    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(StoppedError):
        train(config(tmp_path / "out"), registry=_as(None, "tiny", Sends))
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before
    assert latest_tag(tmp_path / "out" / "checkpoints") == "step_00000006"
    run(tmp_path / "out", resume=True)
    assert curve(tmp_path / "out") == curve(tmp_path / "whole")
    mine, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_second_interrupt_is_one() -> None:
    stops: list[int] = []
    with Signals(lambda: stops.append(1)) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert stops == [1]
        assert signals.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stops == [1]


# -- forecast beside measurement --------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_ends_with_the_forecast_beside_what_was_measured(
    tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    made = config(tmp_path, 2, {"zero_optimization.stage": stage}, steps=3)
    result = sim.run(2, lambda rank: train(made, registry=registry()))[0]
    assert result.kept_bytes == result.forecast_kept_bytes
    assert min(result.kept_bytes) > 0
    # Five sums of the record and the number of micro-batches; at stage 0 the options of groups go with these.
    told = [8 * (5 + 1 + (16 if stage == 0 else 0))] * 2
    assert [a - b for a, b in zip(result.wire_bytes, result.forecast_wire_bytes, strict=True)] == told
    assert result.beside()[1] in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["forecast_wire_bytes"] == result.forecast_wire_bytes


# -- weights to begin with, and those that are left -------------------------------------------------------------------


@pytest.mark.dear
def test_the_model_that_is_left_loads_with_safetensors(tmp_path: Path) -> None:
    sim.run(2, lambda rank: train(config(tmp_path, 2), registry=registry()))
    net = Net()
    net.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["model"] == "model/model.safetensors"


@pytest.mark.dear
def test_a_warm_start_from_a_file_with_other_names_and_rows(tmp_path: Path) -> None:
    run(tmp_path / "first", steps=3)
    weights = load_file(tmp_path / "first" / "model" / "model.safetensors")
    foreign = {f"net.{name}".replace("last", "head"): value for name, value in weights.items()}
    foreign["net.first.weight"] = torch.cat([weights["first.weight"], torch.ones(2, 3)])  # ten rows
    foreign["net.extra"] = torch.zeros(2)
    save_file(foreign, tmp_path / "foreign.safetensors")
    start = {"path": str(tmp_path / "foreign.safetensors"), "key_map": {r"^net\.": "", "^head": "last"}}
    with pytest.raises(ValueError, match=r"'first.weight' has shape \(8, 3\), and \(10, 3\) in"):
        run(tmp_path / "second", warm_start=start)
    run(tmp_path / "second", warm_start={**start, "resized": ["first.weight"]}, steps=2)
    run(tmp_path / "third", warm_start={"path": str(tmp_path / "first" / "checkpoints")}, steps=2)
    assert curve(tmp_path / "second") == curve(tmp_path / "third")
    one = {"path": str(tmp_path / "first" / "checkpoints" / "step_00000003")}
    run(tmp_path / "fourth", warm_start=one, steps=2)
    assert curve(tmp_path / "fourth") == curve(tmp_path / "third")
    assert curve(tmp_path / "third") != curve(tmp_path / "first")[:2]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"path": "nowhere.safetensors"}, "it is a .safetensors file or a directory of checkpoints that exists"),
        ({"path": "FILE"}, r"has nothing for first.weight, first.bias, middle.0.weight, .* and 1 more of the model"),
        ({"path": "FILE", "key_map": {"(": ""}}, "train.warm_start.key_map: '\\(' is no regular expression"),
        ({"path": "FILE", "key_map": {"^.*$": "x"}}, "key_map makes 'x' of 'other' and of 'thing'"),
        ({"path": "BROKEN"}, "cannot be read"),
    ],
)
def test_a_warm_start_that_cannot_be(tmp_path: Path, start: dict[str, Any], said: str) -> None:
    save_file({"other": torch.zeros(1), "thing": torch.zeros(1)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 50)
    paths = {"FILE": str(tmp_path / "a.safetensors"), "BROKEN": str(tmp_path / "b.safetensors")}
    with pytest.raises(ValueError, match=said):
        run(tmp_path / "out", warm_start={**start, "path": paths.get(start["path"], start["path"])})
    assert not (tmp_path / "out").exists()


def test_a_partial_warm_start(tmp_path: Path) -> None:
    save_file({"last.bias": torch.full((1,), 7.0)}, tmp_path / "a.safetensors")
    start = {"path": str(tmp_path / "a.safetensors"), "partial": True}
    run(tmp_path / "out", warm_start=start, steps=1)
    found = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert 6.9 < float(found["last.bias"]) < 7.1


# -- what a reader found ----------------------------------------------------------------------------------------------


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, 3])
def test_a_finished_run_can_be_resumed(tmp_path: Path, stage: int) -> None:
    changes = {"zero_optimization.stage": stage}
    first = sim.run(2, lambda rank: train(config(tmp_path, 2, changes, steps=4), registry=registry()))
    again = sim.run(2, lambda rank: train(config(tmp_path, 2, changes, steps=4), resume=True, registry=registry()))
    assert [result.validation_loss for result in again] == [result.validation_loss for result in first]


@pytest.mark.parametrize("stage", [0, 3])
def test_one_ranks_bad_batch_hangs_nobody(tmp_path: Path, stage: int) -> None:
    task = registry().get("task", "tiny")

    class Data(task):  # type: ignore[misc, valid-type]
        def training_data(self) -> Any:
            found = super().training_data()
            found.tensors[0][11] = float("nan")
            return found

    def job(rank: int) -> str:
        with pytest.raises(NotFiniteError) as caught:
            train(config(tmp_path, 2, {"zero_optimization.stage": stage}), registry=_as(None, "tiny", Data))
        return str(caught.value)

    first, second = sim.run(2, job)
    assert first == second
    assert "the batch itself has values that are not finite" in first


def test_a_signal_in_the_last_save_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.train.job import Job

    save = Job._save

    def interrupted(self: Job) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        save(self)

    monkeypatch.setattr(Job, "_save", interrupted)
    run(tmp_path, steps=3, checkpoint_every=None)
    assert latest_tag(tmp_path / "checkpoints") == "step_00000003"
    assert (tmp_path / "result.json").exists()


def test_the_step_that_ended_a_run_can_be_run_again(tmp_path: Path) -> None:
    task = {"type": "tiny", "params": {"bad": 20}}
    with pytest.raises(NotFiniteError):
        train(config(tmp_path, task=task, steps=50, checkpoint_every=1), registry=registry())
    with pytest.raises(NotFiniteError, match="'log'"):
        replay(tmp_path, len(lines(tmp_path)) + 1, registry=registry())


def test_a_replay_writes_into_no_monitor_and_takes_nan_for_nan(tmp_path: Path) -> None:
    changes = {
        "fp16.enabled": "true", "fp16.auto_cast": "true", "fp16.initial_scale_power": 40, "fp16.hysteresis": 1,
        "jsonl_monitor.enabled": "true", "jsonl_monitor.output_path": str(tmp_path / "monitor"),
    }  # fmt: skip
    train(config(tmp_path / "out", changes=changes, steps=3), registry=registry())
    written = {p: p.read_bytes() for p in (tmp_path / "monitor").rglob("*") if p.is_file()}
    assert written
    assert any(line["skipped"] for line in lines(tmp_path / "out"))
    assert replay(tmp_path / "out", 3, registry=registry()).differences == ()
    assert {p: p.read_bytes() for p in (tmp_path / "monitor").rglob("*") if p.is_file()} == written


@pytest.mark.dear
def test_pythons_and_numpys_random_numbers_come_from_the_seed(tmp_path: Path) -> None:
    import random

    import numpy as np

    task = registry().get("task", "tiny")

    class Data(task):  # type: ignore[misc, valid-type]
        def training_data(self) -> Any:
            data = super().training_data()

            class Noisy(torch.utils.data.Dataset[Any]):
                def __len__(self) -> int:
                    return len(data)

                def __getitem__(self, index: int) -> Any:
                    x, y = data[index]
                    return x + random.random() + np.random.rand(), y

            return Noisy()

    own = _as(None, "tiny", Data)
    train(config(tmp_path / "a"), registry=own)
    train(config(tmp_path / "b"), registry=own)
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    for step in (3, 7):
        assert replay(tmp_path / "a", step, registry=own).differences == ()


@pytest.mark.dear
def test_steps_of_another_number_of_ranks_are_told(tmp_path: Path) -> None:
    sim.run(2, lambda rank: train(config(tmp_path, 2, steps=4), registry=registry()))
    run(tmp_path, steps=12, resume=True)
    assert replay(tmp_path, 7, registry=registry()).differences == ()
    with pytest.raises(ValueError, match="had 2 ranks, and there are 1 here"):
        replay(tmp_path, 3, registry=registry())


def test_a_broken_line_of_the_log_loses_no_other(tmp_path: Path) -> None:
    run(tmp_path, steps=8)
    log = tmp_path / "log.jsonl"
    kept = log.read_text().splitlines()
    log.write_text("\n".join([kept[0], kept[1][:9], *kept[2:]]) + "\n")
    run(tmp_path, steps=12, resume=True)
    assert [line["step"] for line in lines(tmp_path)] == [1, *range(3, 13)]
