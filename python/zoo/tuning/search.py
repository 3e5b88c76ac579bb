"""The search: which candidate is run next, and what is known after it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from zoo.tuning.journal import Journal, JournalError
from zoo.tuning.model import Model, Prediction
from zoo.tuning.needs import Need
from zoo.tuning.outcome import Outcome, Runner
from zoo.tuning.proposals import Proposals
from zoo.tuning.space import Candidate, Job

__all__ = ["Budget", "Found", "Search", "Trial", "rejected"]

ALIKE = 0.01
"""Candidates whose hopes differ by less than this part are alike to the model."""
SAME_FAILURES = 3
"""So many trials may fail for one reason before there is anything to compare."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What bounds real runs: their number, their minutes in all, trials in a row that bring nothing better, and the
    seconds of one."""

    trials: int = 50
    minutes: float | None = None
    early_stopping: int | None = 5
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Trial:
    """One that has ended."""

    number: int
    candidate: Candidate
    outcome: Outcome
    forecast_s: float | None = None
    """What the model said of it before it ran."""


@dataclass(kw_only=True)
class Found:
    """What a search came to."""

    job: Job
    needs: Mapping[Candidate, Need]
    rejected: Mapping[Candidate, str]
    """Candidates that were not run, because they cannot: why."""
    trials: list[Trial] = field(default_factory=list)
    predictions: dict[Candidate, Prediction] = field(default_factory=dict)
    """Of all candidates that could run, by the model as it is at the end."""
    stopped: str = ""
    """Why it ended."""

    @property
    def best(self) -> Trial | None:
        """The fastest that was measured."""
        measured = [t for t in self.trials if t.outcome.step_s is not None]
        return min(measured, key=lambda t: (t.outcome.step_s, t.number), default=None)

    @property
    def judged_without_a_run(self) -> float:
        """The part of the candidates that no trial was spent on."""
        return 1.0 - len({t.candidate for t in self.trials}) / max(1, len(self.needs))


class _Chooses(Protocol):
    def __call__(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """One of those that may run; None when no further one is worth it."""


def rejected(needs: Mapping[Candidate, Need], job: Job, limit_bytes: int | None) -> dict[Candidate, str]:
    """Candidates that cannot run, and why: a lower bound of what they need is compared with the limit.

    Args:
        limit_bytes: of all ranks together on the CPU, of each device elsewhere; None for none.
    """
    found: dict[Candidate, str] = {}
    limit = None if limit_bytes is None else limit_bytes * (1 if job.device == "cpu" else job.ranks)
    for candidate, need in needs.items():
        if need.refused:
            found[candidate] = need.refused
        elif limit is not None and need.job_bytes > limit:
            found[candidate] = f"needs at least {need.job_bytes:,} bytes, and there are {limit:,}"
    return found


@dataclass(kw_only=True)
class Search:
    """One search. :meth:`run` it once.

    Args:
        needs: of every candidate, in the order of the candidates.
        journal: open; trials that are in it are not run again.
        tuner: "model_based", "gridsearch" (in order) or "random".
        say: gets a line about each trial.
    """

    job: Job
    needs: Mapping[Candidate, Need]
    runner: Runner
    journal: Journal
    budget: Budget = Budget()
    limit_bytes: int | None = None
    tuner: Literal["model_based", "gridsearch", "random"] = "model_based"
    seed: int = 0
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        out = rejected(self.needs, self.job, self.limit_bytes)
        # What was measured may be none of the candidates, or be refused, by now: its data set was changed, say.
        trials = [t for t in trials_of(self.journal.events) if t.candidate in self.needs and t.candidate not in out]
        self.found = Found(job=self.job, needs=self.needs, rejected=out, trials=trials)
        self.model = Model(self.job, self.needs)
        self._proposals = Proposals(self.seed) if self.tuner == "model_based" else None

    def run(self) -> Found:
        """Run trials until the budget is spent or no further one is worth it.

        Raises:
            KeyboardInterrupt: the user's; all that has ended is in the journal.
            JournalError: the journal cannot be written.
        """
        choose: _Chooses = {"model_based": self._modelled, "random": self._random, "gridsearch": _first}[self.tuner]
        self._refit()
        while not self.found.stopped:
            self.found.stopped = self._spent()
            done = {trial.candidate for trial in self.found.trials}
            candidates = [c for c in self.needs if c not in self.found.rejected and c not in done]
            if self.found.stopped:
                break
            candidate = choose(candidates) if candidates else None
            if candidate is None:
                self.found.stopped = self._nothing_left(candidates)
                break
            self._try(candidate)
        self.journal.write("stop", why=self.found.stopped)
        return self.found

    def _try(self, candidate: Candidate) -> None:
        number = 1 + max((event["number"] for event in self.journal.events if event["event"] == "start"), default=0)
        forecast_s = self.model.predict(candidate).seconds if self.model.fitted else None
        self.journal.write("start", number=number, candidate=candidate.to_dict(), forecast_s=forecast_s)
        left = self._left_s()
        timeout_s = self.budget.timeout_s if left is None else min(self.budget.timeout_s, max(1.0, left))
        outcome = self.runner.run(number, candidate, timeout_s)
        self.journal.write("end", number=number, outcome=outcome.to_dict())
        trial = Trial(number, candidate, outcome, forecast_s)
        self.found.trials.append(trial)
        self._refit()
        self.say(line_of(trial))

    def _refit(self) -> None:
        measured = [(t.candidate, t.outcome.step_s) for t in self.found.trials if t.outcome.step_s is not None]
        self.model.fit(measured)
        if self.model.fitted:
            alive = [c for c in self.needs if c not in self.found.rejected]
            self.found.predictions = {c: self.model.predict(c) for c in alive}

    def _left_s(self) -> float | None:
        if self.budget.minutes is None:
            return None
        return 60 * self.budget.minutes - sum(t.outcome.took_s for t in self.found.trials)

    def _spent(self) -> str:
        trials, best, left = self.found.trials, self.found.best, self._left_s()
        if len(trials) >= self.budget.trials:
            return f"{self.budget.trials} trials, as many as were allowed"
        if left is not None and left <= 0:
            return f"{self.budget.minutes:g} minutes of trials, as many as were allowed"
        since = len(trials) - 1 - trials.index(best) if best is not None else 0
        if best is not None and self.budget.early_stopping is not None and since >= self.budget.early_stopping:
            return f"{since} trials in a row brought nothing faster"
        if best is None and len(trials) >= SAME_FAILURES and len({t.outcome.why for t in trials}) == 1:
            return f"the first {len(trials)} trials failed alike: {trials[0].outcome.why}"
        return ""

    def _nothing_left(self, candidates: Sequence[Candidate]) -> str:
        if candidates and self.found.best is None:
            return f"{len(self.found.trials)} trials failed, and the others have in common what failed"
        if candidates:
            return "no further candidate is likely to be faster"
        return "every candidate has been run" if self.found.trials else "no candidate can run"

    # -- which is next ----------------------------------------------------------------------------------------------

    def _random(self, candidates: Sequence[Candidate]) -> Candidate:
        return random.Random(f"{self.seed} {len(self.found.trials)}").choice(list(candidates))

    def _modelled(self, candidates: Sequence[Candidate]) -> Candidate | None:
        trials = self.found.trials
        hopeful = [c for c in candidates if not self._doubtful(c)]
        likely = hopeful or list(candidates)
        best = self.found.best
        if best is None or best.outcome.step_s is None:
            if not hopeful and len(trials) >= SAME_FAILURES:
                return None
            if self.job.base in likely:
                return self.job.base
            short = any(t.outcome.status == "memory" for t in trials)
            return min(likely, key=self._likely_bytes) if short else likely[0]
        hopes = {c: self.found.predictions[c].hopeful for c in likely}
        least = min(hopes.values())
        if least >= best.outcome.step_s:
            return None
        alike = [c for c in likely if hopes[c] <= least * (1 + ALIKE)]
        if len(alike) == 1 or self._proposals is None:
            return alike[0]
        return self._proposals.choose(alike, [(t.candidate, t.outcome.step_s) for t in trials])

    def _likely_bytes(self, candidate: Candidate) -> int:
        """What it may take; not the lower bound, which is alike for many."""
        need = self.needs[candidate]
        return need.state_bytes + need.activation_bytes * candidate.data

    def _doubtful(self, candidate: Candidate) -> bool:
        """Whether it has something with which trials have failed and none has succeeded, or needs more memory than one
        that had too little. Such candidates wait until there are no others."""
        trials = self.found.trials
        short = [self._likely_bytes(t.candidate) for t in trials if t.outcome.status == "memory"]
        if short and self._likely_bytes(candidate) >= min(short):
            return True
        failed = {trait for t in trials if t.outcome.status in ("failed", "timeout") for trait in _traits(t.candidate)}
        worked = {trait for t in trials if t.outcome.status == "measured" for trait in _traits(t.candidate)}
        return bool((failed - worked) & set(_traits(candidate)))


def _first(candidates: Sequence[Candidate]) -> Candidate:
    return candidates[0]


def _traits(candidate: Candidate) -> Iterator[tuple[str, Any]]:
    yield "mesh", candidate.mesh
    yield "schedule", candidate.schedule
    yield "offload", candidate.offload
    yield "checkpointing", candidate.checkpointing
    yield "stage", candidate.stage
    yield from candidate.extra


def trials_of(events: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """Those of a journal that have ended; one that has begun only is run again.

    Raises:
        JournalError: what a line says is no trial.
    """
    begun: dict[int, Mapping[str, Any]] = {}
    found: list[Trial] = []
    for line, event in enumerate(events, 1):
        try:
            if event["event"] == "start":
                begun[int(event["number"])] = event
            elif event["event"] == "end":
                start = begun[event["number"]]
                candidate, outcome = Candidate.from_dict(start["candidate"]), Outcome.from_dict(event["outcome"])
                hash(candidate)
                found.append(Trial(event["number"], candidate, outcome, start["forecast_s"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise JournalError(
                f"line {line} of the journal is no {event['event']} of a trial ({type(error).__name__}: {error}); the "
                "file was changed."
            ) from error
    return found


def line_of(trial: Trial) -> str:
    """What is said of a trial when it has ended."""
    forecast = f" (forecast {trial.forecast_s:.4f} s)" if trial.forecast_s is not None else ""
    seconds = trial.outcome.step_s
    came = (
        f"{seconds:.4f} s a step{forecast}" if seconds is not None else f"{trial.outcome.status}: {trial.outcome.why}"
    )
    return f"trial {trial.number}: {trial.candidate.label()}: {came}"
