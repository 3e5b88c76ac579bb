"""Trials as processes: what they come to, and that none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.tuning.tasks import document, registry

from zoo.train.config import read_document
from zoo.tuning import Candidate, Found, Job, NothingRanError, Processes, resume, tune
from zoo.tuning.journal import JournalError, read
from zoo.tuning.running import collect
from zoo.tuning.trial import _waited_s, is_memory_error

TASK = "tests.tuning.tasks:MlpTask"
TUNE = ("-m", "zoo.cli", "tune")


def ranks_left(folder: Path) -> list[int]:
    """Processes that work in a folder of trials: their log is there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in os.readlink(process / "fd" / "1"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def searched(tmp_path: Path, **autotuning: Any) -> Found:
    params = autotuning.pop("params", {})
    values = document(tmp_path, batch=8, **params)
    values["autotuning"] |= {"space": {"stage": [0, 2], "micro": [4, 8]}, "fast": False, **autotuning}
    return tune(values, task=TASK)


def said(folder: Path, rank: int, **values: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(values))


def test_what_ranks_come_to(tmp_path: Path) -> None:
    said(tmp_path, 0, steps_s=[1.0, 2.0, 3.0, 4.0], waits_s=[0.0, 0.0, 0.5, 0.0], peak_bytes=10)
    said(tmp_path, 1, steps_s=[2.0, 1.0, 3.0, 4.0], waits_s=[0.0, 0.0, 1.0, 0.0], peak_bytes=20)
    good = collect(tmp_path, [0, 0], timeout_s=None, took_s=1.0)
    assert (good.status, good.steps_s, good.step_s, good.peak_bytes) == ("measured", (2, 2, 2, 4), 2.0, (10, 20))
    above = collect(tmp_path, [0, 0], timeout_s=None, took_s=1.0, limit_bytes=29)
    assert (above.status, above.why) == ("memory", "30 bytes were resident at most, and there are 29")
    said(tmp_path, 0, status="failed", why="RuntimeError: Connection closed by peer", at=1.0)
    said(tmp_path, 1, status="failed", why="the shapes do not fit", at=2.0)
    assert collect(tmp_path, [1, 1], timeout_s=None, took_s=1.0).why == "the shapes do not fit"
    late = collect(tmp_path, [-9, -9], timeout_s=5.0, took_s=1.0, killed=[0, 1])
    assert (late.status, late.why) == ("timeout", "did not end within 5 s")
    said(tmp_path, 1, status="memory", why="MemoryError: no room", at=2.0)
    assert collect(tmp_path, [1, 1], timeout_s=5.0, took_s=1.0).status == "memory"


def test_a_step_that_was_waiting_all_the_time_took_its_wall_time(tmp_path: Path) -> None:
    said(tmp_path, 0, steps_s=[1.0, 2.0], waits_s=[1.0, 2.5], peak_bytes=10)
    assert collect(tmp_path, [0], timeout_s=None, took_s=1.0).steps_s == (1.0, 2.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_trials_on_the_cpu_see_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    made = read_document(document(tmp_path), registry=registry())
    base = Candidate(stage=0, micro=8, accumulation=1)
    of = Job(ranks=1, batch=8, base=base, num_parameters=1, device=device)
    started = tmp_path / "server"  # in the place of Python: it keeps what it was given
    started.write_text(f"#!/bin/sh\nenv > {tmp_path}/env\n")
    started.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(started))
    with Processes(document=made, job=of, folder=tmp_path / "trials") as processes:
        assert "is gone" in processes.run(1, base, 5.0).why
    lines = (tmp_path / "env").read_text().splitlines()
    assert f"CUDA_VISIBLE_DEVICES={'' if device == 'cpu' else '0,1'}" in lines


def test_a_rank_that_says_nothing(tmp_path: Path) -> None:
    said(tmp_path, 0, steps_s=[1.0], waits_s=[0.0], peak_bytes=10)
    (tmp_path / "rank1.log").write_text("one\nFatal Python error: it is over\n\n")
    assert collect(tmp_path, [0, 3], timeout_s=None, took_s=1.0).why == "rank 1: Fatal Python error: it is over"
    (tmp_path / "rank1.log").write_text("")
    assert collect(tmp_path, [0, -11], timeout_s=None, took_s=1.0).why == "rank 1 ended with signal 11 and said nothing"
    killed = collect(tmp_path, [0, -9], timeout_s=None, took_s=1.0)
    assert killed.status == "memory"
    assert "rank 1 was ended by SIGKILL" in killed.why
    assert collect(tmp_path, [0, -9], timeout_s=None, took_s=1.0, killed=[1]).status == "failed"


def test_a_folder_of_trials_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("")
    with pytest.raises(JournalError, match=r"autotuning.exps_dir = .*trials' cannot be written to"):
        searched(tmp_path)
    assert not (tmp_path / "results").exists()
    job = Job(ranks=1, batch=8, base=Candidate(stage=0, micro=8, accumulation=1), num_parameters=1)
    with Processes(document=read_document(document(tmp_path), registry=registry()), job=job,
                   folder=tmp_path / "trials") as processes:  # fmt: skip
        found = processes.run(1, job.base, 1.0)
    assert (found.status, found.step_s) == ("failed", None)
    assert "trials' cannot be written to: Not a directory" in found.why or "File exists" in found.why


def test_what_is_out_of_memory() -> None:
    assert is_memory_error(MemoryError())
    assert is_memory_error(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_memory_error(OSError(12, "Cannot allocate memory"))
    assert not is_memory_error(ValueError("out of memory of what was said"))
    assert not is_memory_error(RuntimeError("shapes"))


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system does not tell")
def test_waiting_for_a_core_that_others_have_is_measured() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            waited, until = _waited_s(), time.monotonic() + 1.0
            while time.monotonic() < until:
                pass
            waited = _waited_s() - waited
        finally:
            other.kill()
            other.wait()
    finally:
        os.sched_setaffinity(0, cores)
    assert 0.2 < waited < 1.1


@pytest.mark.slow
def test_two_ranks_are_measured_and_the_best_is_a_configuration_that_trains(tmp_path: Path) -> None:
    found = searched(tmp_path, ranks=2, params={"width": 32})
    assert found.best is not None
    assert all(t.outcome.status == "measured" for t in found.trials)
    assert all(len(t.outcome.peak_bytes) == 2 for t in found.trials)
    results = tmp_path / "results"
    assert {p.name for p in results.iterdir()} == {"journal.jsonl", "report.json", "best.json", "forecast.png"}
    assert (results / "forecast.png").read_bytes().startswith(b"\x89PNG")
    best = json.loads((results / "best.json").read_text())
    assert best["zero_optimization"]["stage"] == found.best.candidate.stage
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "zoo.cli", "train",
         str(results / "best.json"), "--task", TASK],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    assert not ranks_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "why"),
    [
        ("memory", "memory", "MemoryError: no room for the activations"),
        ("killed", "memory", "was ended by SIGKILL"),
        ("wrong", "failed", "the shapes do not fit"),
        ("hangs", "timeout", "did not end within 3 s"),
    ],
)
def test_every_trial_fails_with_its_reason(tmp_path: Path, fault: str, status: str, why: str) -> None:
    with pytest.raises(NothingRanError, match=why):
        searched(tmp_path, ranks=2, params={"fault": fault}, timeout_s=3.0 if fault == "hangs" else 60.0,
                 space={"stage": [0], "micro": [4, 2], "mesh": [{"data": 2}]})  # fmt: skip
    events = read(tmp_path / "results" / "journal.jsonl")
    outcomes = [event["outcome"] for event in events if event["event"] == "end"]
    assert outcomes
    assert {outcome["status"] for outcome in outcomes} == {status}
    assert all(why in outcome["why"] for outcome in outcomes)
    assert json.loads((tmp_path / "results" / "report.json").read_text())["best"] is None
    assert not ranks_left(tmp_path)


@pytest.mark.slow
def test_too_little_memory_for_some_leads_to_those_that_fit(tmp_path: Path) -> None:
    found = searched(tmp_path, ranks=1, params={"fault": "memory above 4"})
    assert found.best is not None
    assert found.best.candidate.micro == 4
    assert "memory" in {t.outcome.status for t in found.trials}


@pytest.mark.slow
def test_kill_9_loses_nothing_and_no_trial_is_repeated(tmp_path: Path) -> None:
    values = document(tmp_path, batch=8, fault="slow")
    values["autotuning"] |= {
        "tuner_type": "gridsearch", "tuner_early_stopping": None, "ranks": 2, "least_s": 0.5,
        "space": {"stage": [0, 1, 2], "micro": [2, 4]},
    }  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(values))
    journal = tmp_path / "results" / "journal.jsonl"
    process = subprocess.Popen([sys.executable, *TUNE, str(config), "--task", TASK], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 240
    while time.monotonic() < until and (not journal.exists() or journal.read_bytes().count(b'"start"') < 3):
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = read(journal)
    ended = [event["number"] for event in before if event["event"] == "end"]
    assert len(ended) == 2
    deadline = time.monotonic() + 20
    while ranks_left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not ranks_left(tmp_path)
    found = resume(tmp_path / "results")
    after = read(journal)
    assert after[: len(before)] == before
    begun = [json.dumps(event["candidate"]) for event in after if event["event"] == "start"]
    assert len(found.trials) == 6
    assert len(begun) == 7  # that of the third began twice, and was not measured before
    assert len(set(begun)) == 6
    assert [t.number for t in found.trials][:2] == ended


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_processes_and_can_be_resumed(tmp_path: Path, number: signal.Signals) -> None:
    values = document(tmp_path, batch=8, fault="hangs")
    values["autotuning"] |= {"ranks": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(values))
    process = subprocess.Popen([sys.executable, *TUNE, str(config), "--task", TASK], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 240
    while time.monotonic() < until and len(ranks_left(tmp_path)) < 2:
        time.sleep(0.05)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert "--resume" in text
    assert not ranks_left(tmp_path)
    assert (tmp_path / "results" / "report.json").exists()
    assert [event["event"] for event in read(tmp_path / "results" / "journal.jsonl")] == ["begin", "start"]
