"""A job without processes: candidates, needs, and a runner that knows how long each would take."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.tuning import Budget, Candidate, Job, Journal, Need, Outcome, Search, candidates

BASE = Candidate(stage=0, micro=4, accumulation=1, mesh=(1, 2, 1))


def job(**changes: Any) -> Job:
    values = {"ranks": 2, "batch": 8, "base": BASE, "num_parameters": 1_000_000, "blocks": True, **changes}
    return Job(**values)


def need(candidate: Candidate, batch: int = 8) -> Need:
    """Something like what a model of a million parameters needs: less with a higher stage, more with samples."""
    copies = {0: (1, 1, 1), 1: (1, 1, 2), 2: (1, 2, 2), 3: (2, 2, 2)}[candidate.stage]
    d = candidate.data
    states = sum(4_000_000 * k // (c if d > 1 else 1) for k, c in zip((1, 1, 2), copies, strict=True)) * d
    kept = candidate.micro * (100_000 if candidate.checkpointing else 1_000_000)
    return Need(
        job_bytes=states + kept * d, state_bytes=states, activation_bytes=kept, wire_bytes=4_000_000 if d > 1 else 0
    )


def true_seconds(candidate: Candidate, *, pass_s: float = 0.01, sample_s: float = 0.02, sent_s: float = 0.004) -> float:
    """Of a made-up machine."""
    samples = candidate.micro * candidate.accumulation * candidate.data / 2
    more = 1.3 if candidate.checkpointing else 1.0
    sent = sent_s * (candidate.accumulation if candidate.stage == 3 else 1) if candidate.data > 1 else 0.0
    cut = 0.3 * sample_s * samples if candidate.tensor > 1 else 0.0
    bubble = sample_s * samples * (candidate.pipe - 1) / candidate.accumulation
    return sample_s * samples * more + pass_s * candidate.accumulation + sent + cut + bubble + 0.005


@dataclass
class FakeRunner:
    """Measures :func:`true_seconds`, with noise; ``fails`` says which do not work, and why."""

    seconds: Callable[[Candidate], float] = true_seconds
    fails: Callable[[Candidate], Outcome | None] = lambda candidate: None
    noise: float = 0.0
    took_s: float = 1.0
    ran: list[Candidate] = field(default_factory=list)

    def run(self, number: int, candidate: Candidate, timeout_s: float) -> Outcome:
        self.ran.append(candidate)
        failed = self.fails(candidate)
        if failed is not None:
            return failed
        dice = random.Random(number)
        seconds = self.seconds(candidate) * (1 + self.noise * dice.uniform(-1, 1))
        return Outcome(status="measured", step_s=seconds, steps_s=(seconds,), peak_bytes=(1, 1), took_s=self.took_s)


def search(folder: Path, runner: Any, *, of: Job | None = None, resumes: bool = False, **options: Any) -> Any:
    """A search over the whole space of the job, run to its end."""
    made = of or job()
    needs = {candidate: need(candidate, made.batch) for candidate in candidates(made)}
    budget = Budget(**{key: options.pop(key) for key in ("trials", "minutes", "early_stopping") if key in options})
    with Journal(folder, resumes=resumes) as journal:
        if not journal.events:
            journal.write("begin")
        return Search(job=made, needs=needs, runner=runner, journal=journal, budget=budget, **options).run()
