"""A search from a configuration to its report, with trials that are made up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.tuning.fakes import FakeRunner
from tests.tuning.tasks import document, registry
from typer.testing import CliRunner

from zoo.cli import app
from zoo.config import ConfigError, load
from zoo.train import read_config
from zoo.tuning import Candidate, JournalError, NothingRanError, Outcome, Processes, resume, tune

TASK = "tests.tuning.tasks:MlpTask"


def searched(values: dict[str, Any], runner: Any = None, **options: Any) -> Any:
    return tune(values, registry=registry(), runner=runner or FakeRunner(), **options)


def test_it_leaves_journal_report_picture_and_a_configuration(tmp_path: Path) -> None:
    lines: list[str] = []
    found = searched(document(tmp_path, batch=16), say=lines.append)
    report = json.loads((tmp_path / "results" / "report.json").read_text())
    assert report["best"] == found.best.candidate.to_dict()
    assert report["stopped"] == found.stopped
    assert {p.name for p in (tmp_path / "results").iterdir()} == {
        "journal.jsonl", "report.json", "best.json", "forecast.png",
    }  # fmt: skip
    best = read_config(tmp_path / "results" / "best.json", registry=registry())
    assert best.train_micro_batch_size_per_gpu == found.best.candidate.micro
    assert best.train_batch_size == 16
    assert "autotuning" not in json.loads((tmp_path / "results" / "best.json").read_text())
    assert lines[0].startswith(f"{len(found.needs)} candidates for 1 rank (cpu, ")
    assert lines[-1].startswith("the best configuration is in ")


def test_the_fast_form_has_stages_and_the_largest_micro_batches(tmp_path: Path) -> None:
    found = searched(document(tmp_path, batch=64))
    assert {c.micro for c in found.needs} == {16, 32, 64}
    assert {c.stage for c in found.needs} == {0, 1, 2, 3}
    assert {c.checkpointing for c in found.needs} == {False}
    values = document(tmp_path / "full", batch=64)
    values["autotuning"] |= {
        "fast": False,
        "max_train_micro_batch_size_per_gpu": 8,
        "min_train_micro_batch_size_per_gpu": 2,
    }
    full = searched(values)
    assert {c.micro for c in full.needs} == {2, 4, 8}
    assert {c.checkpointing for c in full.needs} == {False, True}


def test_a_search_that_was_interrupted_goes_on_with_what_it_began_with(tmp_path: Path) -> None:
    class Interrupted(FakeRunner):
        def run(self, number: int, candidate: Candidate, timeout_s: float) -> Outcome:
            if number == 3:
                raise KeyboardInterrupt
            return super().run(number, candidate, timeout_s)

    values = document(tmp_path, batch=16)
    values["autotuning"] |= {"tuner_num_trials": 5, "tuner_type": "gridsearch", "tuner_early_stopping": None}
    first, second = Interrupted(), FakeRunner()
    with pytest.raises(KeyboardInterrupt):
        searched(values, first)
    assert len(json.loads((tmp_path / "results" / "report.json").read_text())["trials"]) == 2
    found = resume(tmp_path / "results", registry=registry(), runner=second)
    assert len(found.trials) == 5
    assert not set(first.ran) & set(second.ran)
    assert found.stopped == "5 trials, as many as were allowed"
    again = resume(tmp_path / "results", registry=registry(), runner=FakeRunner())
    assert [t.outcome for t in again.trials] == [t.outcome for t in found.trials]


def test_a_second_search_is_refused_or_puts_the_first_aside(tmp_path: Path) -> None:
    values = document(tmp_path)
    searched(values)
    before = (tmp_path / "results" / "journal.jsonl").read_bytes()
    with pytest.raises(JournalError, match="there is a search in"):
        searched(values)
    values["autotuning"]["overwrite"] = True
    searched(values)
    assert (tmp_path / "results" / "journal-1.jsonl").read_bytes() == before


def test_nothing_that_can_run_is_a_sentence(tmp_path: Path) -> None:
    values = document(tmp_path)
    values["autotuning"]["memory_bytes"] = 100
    with pytest.raises(
        NothingRanError, match=r"no candidate can run\. Why: needs at least [\d,]+ bytes, and there are 100"
    ):
        searched(values)
    assert json.loads((tmp_path / "results" / "report.json").read_text())["rejected"] > 0


def test_mistakes_are_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device 'abacus'; allowed are cpu and cuda"):
        searched(document(tmp_path), device="abacus")
    values = document(tmp_path)
    values["autotuning"]["fsat"] = True
    with pytest.raises(ConfigError, match="fsat"):
        searched(values)
    values = document(tmp_path)
    values["autotuning"] |= {"start_profile_step": 5, "end_profile_step": 4}
    with pytest.raises(ConfigError, match=r"end_profile_step = 4 is before start_profile_step = 5"):
        searched(values)
    assert not (tmp_path / "results").exists()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"stage": [4]}, "it is 0, 1, 2 or 3"),
        ({"mesh": [{"data": "two"}]}, "whole numbers"),
        ({"schedule": ["1f2b"]}, "1f2b"),
        ({"optimizer.parms.lr": [1]}, r"no candidate can run\. Why: .*optimizer\.parms"),
        ({"optimizer.params.lr": [0.1, "much"]}, r'has "much" for optimizer\.params\.lr, with which no candidate'),
        ({"train.task.params.width": [8, -1]}, r"has -1 for train\.task\.params\.width, with which no candidate"),
        ({"train.task.params.size": [8]}, r"no candidate can run\. Why: .*size"),
    ],
)
def test_a_mistake_in_the_space_leaves_nothing_and_puts_nothing_aside(
    tmp_path: Path, space: dict[str, Any], said: str
) -> None:
    values = document(tmp_path)
    values["autotuning"]["space"] = space
    with pytest.raises(ValueError, match=said):
        searched(values)
    assert not (tmp_path / "results").exists()
    searched({**values, "autotuning": {**values["autotuning"], "space": {}}})
    before = (tmp_path / "results" / "journal.jsonl").read_bytes()
    values["autotuning"]["overwrite"] = True
    with pytest.raises(ValueError, match=said):
        searched(values)
    assert (tmp_path / "results" / "journal.jsonl").read_bytes() == before


def test_a_registry_that_trials_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trials are processes of their own, which have zoo\.registry\.DEFAULT"):
        tune(document(tmp_path), registry=registry())
    assert not (tmp_path / "results").exists()
    searched(document(tmp_path))
    with pytest.raises(ValueError, match="trials are processes of their own"):
        resume(tmp_path / "results", registry=registry())


@pytest.mark.dear
def test_searches_with_results_of_the_same_last_name_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def run(self: Processes, number: int, candidate: Candidate, timeout_s: float) -> Outcome:
        seen.append(self.folder)
        return FakeRunner().run(number, candidate, timeout_s)

    monkeypatch.setattr(Processes, "run", run)
    monkeypatch.chdir(tmp_path)
    values = document(tmp_path)
    for where in ("first/out", "second/out"):
        values["autotuning"] |= {"results_dir": where, "tuner_num_trials": 2}
        tune(values, task=TASK)
    values["autotuning"] |= {"results_dir": str(tmp_path / "first" / "out"), "overwrite": True}
    tune(values, task=TASK)
    first, second, again = seen[0], seen[2], seen[-1]
    assert first.parent == second.parent
    assert first != second
    assert first.name.startswith("out-")
    assert again == first


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(JournalError, match="cannot be written to: Permission denied"):
        searched(document(tmp_path))


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    with pytest.raises(JournalError, match="cannot be written to"):
        searched(document(tmp_path))


@pytest.mark.dear
def test_every_key_of_the_section_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, float]] = []

    def run(self: Processes, number: int, candidate: Candidate, timeout_s: float) -> Outcome:
        seen.append((self, timeout_s))
        return Outcome(status="measured", step_s=1.0 if number == 1 else 2.0, steps_s=(1.0,), took_s=1.0)

    monkeypatch.setattr(Processes, "run", run)

    def with_keys(**keys: Any) -> Any:
        seen.clear()
        values = document(tmp_path / str(len(list(tmp_path.iterdir()))), batch=64)
        plain = {"tuner_type": "gridsearch", "tuner_early_stopping": None}
        values["autotuning"] |= {**plain, **keys}
        return tune(values, task=TASK)

    (tmp_path / "none").mkdir()
    found = with_keys(start_profile_step=4, end_profile_step=7, least_s=0.25, timeout_s=9.0, ranks=2)
    runner, timeout_s = seen[0]
    assert (runner.measuring.first, runner.measuring.last, runner.measuring.least_s) == (4, 7, 0.25)
    assert (timeout_s, runner.job.ranks, runner.folder.parent.name) == (9.0, 2, "trials")
    assert len(found.trials) == len(found.needs) == 12
    assert len(with_keys(tuner_num_trials=5).trials) == 5
    assert len(with_keys(tuner_early_stopping=3).trials) == 4
    assert len(with_keys(minutes=0.1).trials) == 6
    assert {c.micro for c in with_keys(num_tuning_micro_batch_sizes=2).needs} == {32, 64}
    assert {c.micro for c in with_keys(max_train_micro_batch_size_per_gpu=8).needs} == {2, 4, 8}
    assert {c.micro for c in with_keys(fast=False, min_train_micro_batch_size_per_gpu=16).needs} == {16, 32, 64}
    assert {c.stage for c in with_keys(space={"stage": [1, 3]}).needs} == {1, 3}
    assert 0 < len(with_keys(memory_bytes=40_000).rejected) < 12
    one, other = ([t.candidate for t in with_keys(tuner_type=kind).trials] for kind in ("gridsearch", "random"))
    assert one != other
    assert set(one) == set(other)
    for metric in ("latency", "flops", "throughput"):  # with one batch they agree
        assert with_keys(metric=metric, enabled=True).best.candidate == one[0]


def test_documented_keys_are_taken() -> None:
    asked = {"enabled": True, "metric": "latency", "mp_size": 1, "max_train_batch_size": 64, "tuner_num_trials": 7}
    with pytest.warns(UserWarning, match="max_train_batch_size=64 has no effect: the batch of a step is what"):
        section = load({"train_batch_size": 8, "autotuning": asked}).autotuning
    assert (section.metric, section.tuner_num_trials, section.fast) == ("latency", 7, True)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "takes a CONFIG for a new search, or --resume DIR"),
        (("{config}", "--resume", "x"), "takes a CONFIG for a new search, or --resume DIR"),
        (("--resume", "{here}/none"), "has no journal.jsonl"),
        (("--resume", "{here}", "--trials", "3"), "--resume goes on as the search began"),
        (("{config}", "--memory", "much"), "write a number of bytes"),
        (("{config}", "--device", "abacus"), "device 'abacus'; allowed are cpu and cuda"),
        (("{here}/none.json",), "none.json"),
        (("{config}", "--out", "{config}/below"), "cannot be written to"),
    ],
)
def test_the_command_says_what_is_wrong_in_a_sentence(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**document(tmp_path), "train": {"task": {"type": "byte_lm"}, "steps": 1}}))
    result = CliRunner().invoke(app, ["tune", *(a.format(config=config, here=tmp_path) for a in arguments)])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("line", "changes", "said"),
    [
        (0, {"ranks": "two"}, "line 1 of .*has ranks='two'; the file was changed"),
        (0, {"values": None}, "line 1 of .*has values=None"),
        (1, {"candidate": 7}, "line 3 of the journal is no end of a trial"),
        (1, {"number": 5}, "line 3 of the journal is no end of a trial .KeyError: 1"),
        (2, {"outcome": {}}, "line 3 of the journal is no end of a trial .KeyError: 'step_s'"),
        (2, {"outcome": {"status": "good", "step_s": 1}}, "status is 'good'; allowed are measured, memory"),
    ],
)
def test_a_journal_whose_values_were_changed_is_refused(
    tmp_path: Path, line: int, changes: dict[str, Any], said: str
) -> None:
    searched(document(tmp_path, batch=16))
    path = tmp_path / "results" / "journal.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[line].update(changes)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(JournalError, match=said):
        resume(tmp_path / "results", registry=registry(), runner=FakeRunner())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"minutes": -1}, "autotuning.minutes: given -1 (int); allowed: greater than 0"),
        ({"tuner_num_trials": "many"}, "autotuning.tuner_num_trials: given 'many' (str); allowed: int"),
        ({"space": {"stage": 1}}, "autotuning.space.stage: given 1 (int); allowed: a valid list"),
        ({"nothing": 1}, "autotuning.nothing: unknown key"),
    ],
)
def test_a_wrong_section_is_a_sentence_with_its_path(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    values = document(tmp_path, batch=16)
    values["autotuning"] |= given
    with pytest.raises(ConfigError) as caught:
        searched(values)
    assert said in str(caught.value)
    assert not (tmp_path / "results").exists()
