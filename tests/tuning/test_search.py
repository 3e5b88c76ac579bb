"""Which trials are run, and what is kept of them, with a machine that is made up."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.tuning.fakes import BASE, FakeRunner, job, need, search, true_seconds

from zoo.tuning import Budget, Candidate, Found, Journal, Model, Need, Outcome, Search, candidates
from zoo.tuning.journal import read
from zoo.tuning.outcome import representative
from zoo.tuning.proposals import Proposals
from zoo.tuning.report import draw, summary, table
from zoo.tuning.search import rejected

MEMORY = Outcome(status="memory", why="MemoryError: no memory", took_s=1.0)
BROKEN = Outcome(status="failed", why="rank 0: no such thing", took_s=1.0)
machine = st.fixed_dictionaries(
    {"pass_s": st.floats(0, 0.05), "sample_s": st.floats(0.005, 0.05), "sent_s": st.floats(0, 0.05)}
)


@pytest.mark.dear
@examples(times=1)
@given(machine=machine, cut=st.booleans())
@example(machine={"pass_s": 0.046875, "sample_s": 0.0078125, "sent_s": 0.0}, cut=True)
@example(machine={"pass_s": 0.031, "sample_s": 0.005, "sent_s": 0.0}, cut=True)
def test_the_choice_is_within_5_percent_of_the_best_at_a_tenth_of_the_grid(
    tmp_path_factory: pytest.TempPathFactory, machine: dict[str, float], cut: bool
) -> None:
    made = job(batch=32, base=Candidate(stage=1, micro=4, accumulation=4, mesh=(1, 2, 1)), tensor=cut, pipe=cut)
    runner = FakeRunner(seconds=lambda c: true_seconds(c, **machine))
    found = search(
        tmp_path_factory.mktemp("s"), runner, of=made, early_stopping=None, trials=len(candidates(made)) // 10
    )
    best = min(true_seconds(c, **machine) for c in found.needs)
    assert found.best.outcome.step_s <= 1.05 * best
    assert found.judged_without_a_run >= 0.9


@given(tuner=st.sampled_from(["model_based", "random", "gridsearch"]), after=st.integers(0, 12), seed=st.integers(0, 3))
def test_a_search_that_was_interrupted_goes_on_as_if_it_was_not(
    tmp_path_factory: pytest.TempPathFactory, tuner: str, after: int, seed: int
) -> None:
    whole = FakeRunner()
    expected = search(tmp_path_factory.mktemp("a"), whole, trials=14, early_stopping=None, tuner=tuner, seed=seed)

    class Interrupted(FakeRunner):
        def run(self, number: int, candidate: Candidate, timeout_s: float) -> Outcome:
            if len(self.ran) == after:
                raise KeyboardInterrupt
            return super().run(number, candidate, timeout_s)

    folder = tmp_path_factory.mktemp("b")
    first, second = Interrupted(), FakeRunner()
    options: dict[str, Any] = {"trials": 14, "early_stopping": None, "tuner": tuner, "seed": seed}
    if after < len(whole.ran):
        with pytest.raises(KeyboardInterrupt):
            search(folder, first, **options)
        found = search(folder, second, resumes=True, **options)
    else:
        found = search(folder, first, **options)
    assert first.ran + second.ran == whole.ran
    assert [t.candidate for t in found.trials] == [t.candidate for t in expected.trials]
    assert len(set(first.ran + second.ran)) == len(whole.ran)
    ended = [event for event in read(folder / "journal.jsonl") if event["event"] == "end"]
    assert [event["outcome"]["step_s"] for event in ended] == [t.outcome.step_s for t in expected.trials]


@given(st.integers(1, 60_000_000))
def test_what_is_rejected_needs_more_than_there_is_and_nothing_else_is(limit: int) -> None:
    made = job(batch=16)
    needs = {c: need(c) for c in candidates(made)}
    gone = rejected(needs, made, limit)
    assert {c for c in needs if c not in gone} == {c for c in needs if needs[c].job_bytes <= limit}
    assert rejected(needs, made, None) == {}
    on_devices = job(batch=16, device="cuda")
    assert set(rejected(needs, on_devices, limit)) == {c for c in needs if needs[c].job_bytes > 2 * limit}


def test_a_rejected_candidate_is_never_run(tmp_path: Path) -> None:
    runner = FakeRunner()
    found = search(tmp_path, runner, limit_bytes=30_000_000, tuner="gridsearch", trials=1000, early_stopping=None)
    assert 0 < len(found.rejected) < len(found.needs)
    assert set(runner.ran) == set(found.needs) - set(found.rejected)
    assert found.stopped == "every candidate has been run"
    assert "rejected: needs at least" in table(found)


def test_what_was_measured_and_is_refused_by_now_is_not_the_best(tmp_path: Path) -> None:
    first = search(tmp_path, FakeRunner(), trials=3)
    fastest = first.best.candidate
    needs = {c: Need(refused="too few samples") if c == fastest else n for c, n in first.needs.items()}
    with Journal(tmp_path, resumes=True) as journal:
        options = {"job": first.job, "needs": needs, "journal": journal, "budget": Budget(trials=4)}
        found = Search(runner=FakeRunner(), **options).run()
    assert found.best.candidate != fastest
    assert {trial.candidate for trial in found.trials} <= set(found.predictions)
    draw(found, tmp_path / "forecast.png")


def test_out_of_memory_is_a_result_and_smaller_ones_are_tried(tmp_path: Path) -> None:
    runner = FakeRunner(fails=lambda c: MEMORY if need(c).job_bytes > 24_000_000 else None)
    found = search(tmp_path, runner, trials=8)
    assert found.trials[0].outcome.status == "memory"
    assert found.best is not None
    assert found.best.outcome.status == "measured"
    assert ": MemoryError: no memory" in table(found)


def test_what_failed_is_not_tried_in_another_guise_first(tmp_path: Path) -> None:
    made = job(batch=16, tensor=True, pipe=True)
    runner = FakeRunner(fails=lambda c: BROKEN if c.pipe > 1 else None, seconds=lambda c: 0.1 / c.pipe)
    found = search(tmp_path, runner, of=made, trials=10, early_stopping=None)
    assert [c.pipe for c in runner.ran].count(2) <= 3
    assert found.best is not None


def test_every_trial_failing_ends_soon_with_the_reason(tmp_path: Path) -> None:
    runner = FakeRunner(fails=lambda c: BROKEN)
    found = search(tmp_path, runner)
    assert found.best is None
    assert len(runner.ran) == 3
    assert found.stopped == "the first 3 trials failed alike: rank 0: no such thing"
    assert [event["event"] for event in read(tmp_path / "journal.jsonl")].count("end") == 3
    assert summary(found)["best"] is None


def test_failures_of_several_kinds_end_it_before_everything_was_tried(tmp_path: Path) -> None:
    made = job(batch=16, tensor=True, pipe=True)
    runner = FakeRunner(fails=lambda c: BROKEN if c.pipe > 1 else Outcome(status="memory", why=f"none for {c.micro}"))
    found = search(tmp_path, runner, of=made)
    assert found.best is None
    assert 3 <= len(runner.ran) <= 8
    assert "in common what failed" in found.stopped


@pytest.mark.parametrize(
    ("options", "ran", "said"),
    [
        ({"trials": 2}, 2, "2 trials, as many as were allowed"),
        ({"minutes": 0.05}, 3, "0.05 minutes of trials, as many as were allowed"),
        ({"early_stopping": 4, "tuner": "gridsearch"}, 5, "4 trials in a row brought nothing faster"),
    ],
)
def test_the_budget_bounds_it(tmp_path: Path, options: dict[str, Any], ran: int, said: str) -> None:
    runner = FakeRunner(seconds=lambda c: 1.0 if c == BASE else 2.0)
    found = search(tmp_path, runner, **{"early_stopping": None, "tuner": "random", **options})
    assert len(runner.ran) == ran or "tuner" in options
    assert found.stopped == said


def test_it_ends_where_nothing_can_be_faster(tmp_path: Path) -> None:
    runner = FakeRunner()
    found = search(tmp_path, runner, early_stopping=None)
    assert found.stopped == "no further candidate is likely to be faster"
    assert len(runner.ran) < len(found.needs) / 3


def test_the_model_learns_what_it_is_told() -> None:
    made = job(batch=32, base=Candidate(stage=0, micro=16, accumulation=1, mesh=(1, 2, 1)), tensor=True)
    needs = {c: need(c) for c in candidates(made)}
    model = Model(made, needs)
    assert not model.fitted
    every = [(c, true_seconds(c)) for c in needs]
    model.fit(every[:1])
    wide = model.predict(every[0][0])
    assert wide.seconds == pytest.approx(every[0][1], rel=0.02)
    errors = []
    for number in (1, 8, len(every)):
        model.fit(every[:: max(1, len(every) // number)][:number])
        errors.append(max(abs(model.predict(c).seconds / s - 1) for c, s in every))
        spread = model.predict(every[-1][0]).spread
    assert errors[2] < errors[0]
    assert errors[2] < 0.1
    assert spread < wide.seconds


def test_a_setting_of_the_user_has_a_term_of_its_own(tmp_path: Path) -> None:
    made = job(space={"comm.check": [False, True], "stage": [0, 1]})
    runner = FakeRunner(seconds=lambda c: 2.0 if ("comm.check", "true") in c.extra else 1.0)
    found = search(tmp_path, runner, of=made, trials=6, early_stopping=None)
    assert found.best.candidate.extra == (("comm.check", "false"),)


def test_the_sampler_chooses_among_those_that_are_alike() -> None:
    every = candidates(job(batch=16))
    proposals = Proposals(0)
    trials = [(c, float(c.micro)) for c in every[:6]] + [(every[7], None)]
    chosen = proposals.choose(every[8:], trials)
    assert chosen in every[8:]
    assert Proposals(0).choose(every[8:], trials) == chosen
    assert proposals.choose(every[8:9], trials) == every[8]


def test_without_optuna_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r'pip install "zoo-core\[tune\]"'):
        search(tmp_path / "a", FakeRunner())
    assert search(tmp_path / "b", FakeRunner(), tuner="random", trials=2).best is not None


def test_seconds_of_a_trial() -> None:
    assert representative([5.0, 1.0, 9.0, 3.0, 7.0]) == 3.0
    assert representative([4.0]) == 4.0
    for wrong in ([], [float("nan")], [-1.0], [0.0]):
        with pytest.raises(ValueError, match="the seconds of steps are"):
            representative(wrong)


def test_a_report_has_every_candidate_once(tmp_path: Path) -> None:
    found: Found = search(tmp_path, FakeRunner(), trials=4, limit_bytes=30_000_000)
    said = summary(found)
    assert said["candidates"] == len(said["trials"]) + len(said["not_run"])
    assert said["best_step_s"] == min(t["step_s"] for t in said["trials"])
    assert [t["step_s"] for t in said["trials"]] == sorted(t["step_s"] for t in said["trials"])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_takes_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="a step takes more than 0 seconds"):
        Outcome(status="measured", step_s=seconds)
    made = job()
    with pytest.raises(ValueError, match="it takes more than 0"):
        Model(made, {c: need(c) for c in candidates(made)}).fit([(BASE, seconds)])


@given(st.lists(st.floats(1e-300, 1e9), min_size=1, max_size=4))
@example([1e-300, 1e9])  # their quotient is no number
def test_a_forecast_is_a_number_however_far_trials_are_apart(seconds: list[float]) -> None:
    made = job()
    needs = {c: need(c) for c in candidates(made)}
    model = Model(made, needs)
    model.fit(zip(needs, seconds, strict=False))
    for c in needs:
        assert math.isfinite(model.predict(c).seconds)
        assert math.isfinite(model.predict(c).spread)
