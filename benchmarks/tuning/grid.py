"""The tuner's choice beside the best of the whole grid, on small real jobs.

For each configuration every candidate of a space is measured (the grid), and the tuner searches the same space with a
tenth of as many trials, which it runs itself. Then its choice and the grid's three fastest are measured again in turns,
and the fastest turn of each counts: on a machine that others use, the fastest of many single measurements is fast by
luck, and would make every choice look bad.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import facts, keep, machine, table, write_page

from zoo.train.config import read_document
from zoo.tuning import Budget, Journal, Measuring, Needs, Processes, Search, candidates, job_of
from zoo.tuning.search import rejected

HERE = Path(__file__).parent
PAGE, RAW = HERE / "RESULTS.md", HERE.parents[1] / "build" / "benchmarks" / "tuning.json"
TEXT = str(HERE.parents[1] / "LICENSE")
TURNS, FINALISTS = 5, 3


def configuration(ranks: int, batch: int, layers: int, width: int, context: int, **more: Any) -> dict[str, Any]:
    """A byte model of some size; on two ranks its mesh is searched too."""
    micro = [1, 2, 4, 8, 16, 32, 64] if ranks == 1 else [4, 8, 16]
    space: dict[str, Any] = {"stage": [0, 1, 2, 3], "micro": [m for m in micro if m <= batch]}
    if ranks > 1:
        space |= {"mesh": [{"data": ranks}, {"tensor": ranks}], "bucket": [0]}
    values: dict[str, Any] = {
        "train_batch_size": batch, "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "comm": {"timeout_s": 60},
        "train": {
            "task": {"type": "byte_lm", "params": {
                "layers": layers, "width": width, "heads": 2, "context": context, "text": TEXT, "num_segments": 4,
                "held_out": 0.1, "num_validation_windows": 4,
            }},
            "steps": 100, "threads": 1,
        },
        "autotuning": {"space": space, "fast": False, "ranks": ranks},
    }  # fmt: skip
    return {**values, **more}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "1 rank, 2 layers of 64, batch 32": configuration(1, 32, 2, 64, 64),
    "1 rank, 4 layers of 32, batch 64": configuration(1, 64, 4, 32, 32),
    "1 rank, 2 layers of 128, batch 16": configuration(1, 16, 2, 128, 64),
    "1 rank, 6 layers of 32, batch 16": configuration(1, 16, 6, 32, 64),
    "1 rank, 2 layers of 64 in bf16, batch 16": configuration(1, 16, 2, 64, 64, bf16={"enabled": True}),
    "1 rank, 2 layers of 64 clipped, batch 32, SGD": configuration(
        1, 32, 2, 64, 32, optimizer={"type": "SGD", "params": {"lr": 0.01}}, gradient_clipping=1.0
    ),
    "2 ranks, 2 layers of 64, batch 32": configuration(2, 32, 2, 64, 64),
    "2 ranks, 4 layers of 32, batch 32": configuration(2, 32, 4, 32, 32),
    "2 ranks, 2 layers of 128, batch 16": configuration(2, 16, 2, 128, 32),
    "2 ranks, 2 layers of 256, batch 16": configuration(2, 16, 2, 256, 16),
    "2 ranks, 2 layers of 64 clipped, batch 32": configuration(2, 32, 2, 64, 32, gradient_clipping=1.0),
    "2 ranks, 6 layers of 32, batch 16": configuration(2, 16, 6, 32, 64),
}


def compared(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """One configuration: the grid, the search, and the last turns."""
    document = read_document(values)
    section = values["autotuning"]
    job, model, task = job_of(document, section["ranks"], space=section["space"])
    needs = Needs(document, job, model, task)
    every = {candidate: needs.of(candidate) for candidate in candidates(job)}
    runs = [c for c in every if c not in rejected(every, job, None)]
    trials = len(runs) // 10
    measuring = Measuring(first=2, last=4, least_s=0.3)
    with Processes(document=document, job=job, folder=folder / "trials", measuring=measuring) as processes:
        processes.run(0, job.base, 60.0)  # starts the process that trials are forked from, which the grid needs too
        with Journal(folder) as journal:
            found = Search(job=job, needs=every, runner=processes, journal=journal,
                           budget=Budget(trials=trials, early_stopping=None, timeout_s=60.0)).run()  # fmt: skip
        if found.best is None:
            raise RuntimeError(f"no trial of the search was measured: {found.stopped}")
        grid = {c: processes.run(1000 + number, c, 60.0) for number, c in enumerate(runs)}
        seconds = {c: outcome.step_s for c, outcome in grid.items() if outcome.step_s is not None}
        chosen = found.best.candidate
        finalists = list(dict.fromkeys([chosen, *sorted(seconds, key=lambda c: seconds[c])[:FINALISTS]]))
        again: dict[Any, list[float]] = {c: [] for c in finalists}
        for turn in range(TURNS):
            for c in finalists:
                outcome = processes.run(9000 + turn, c, 60.0)
                again[c] += [outcome.step_s] if outcome.step_s is not None else []
    fastest = {c: min(taken) for c, taken in again.items() if taken}
    best = min(fastest, key=lambda c: fastest[c])
    return {
        "candidates": len(runs), "trials": len(found.trials), "stopped": found.stopped,
        "judged_without_a_run": found.judged_without_a_run,
        "cost": sum(t.outcome.took_s for t in found.trials) / sum(o.took_s for o in grid.values()),
        "slower": fastest[chosen] / fastest[best] - 1, "chosen": chosen.label(), "best": best.label(),
        "chosen_s": fastest[chosen], "best_s": fastest[best], "worst_s": max(seconds.values()),
        "failed": len(grid) - len(seconds),
    }  # fmt: skip


def page(found: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    header = ["configuration", "candidates", "trials", "of the grid's cost", "choice slower", "worst slower", "chosen"]
    rows: list[Sequence[str]] = [
        [name, str(r["candidates"]), str(r["trials"]), f"{r['cost']:.1%}", f"{r['slower']:.1%}",
         f"{r['worst_s'] / r['best_s'] - 1:.0%}", r["chosen"]]
        for name, r in found.items()
    ]  # fmt: skip
    good = sum(r["slower"] <= 0.05 and r["trials"] <= r["candidates"] // 10 for r in found.values())
    judged = min(r["judged_without_a_run"] for r in found.values())
    return f"""# The tuner's choice beside the best of the whole grid

Written by `python -m benchmarks.tuning`. Every candidate of a space was measured (the grid), and the tuner had a tenth
as many trials. Its choice and the grid's {FINALISTS} fastest were then measured again in {TURNS} turns, and the fastest
turn of each counts.

{facts(about)}

{table(header, rows)}

{good} of {len(found)} choices are within 5 % of the best with a tenth of the trials; of the candidates at least
{judged:.0%} were judged without a run. The cost is that of the trials, without the process that they are forked from,
which starts once.
"""


def main() -> None:
    """Run those that are asked for, keep their results, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of configurations, from 1")
    chosen = parser.parse_args().only or range(1, len(CONFIGURATIONS) + 1)
    raw: dict[str, Any] = json.loads(RAW.read_text(encoding="utf-8")) if RAW.is_file() else {}
    found = raw.get("configurations", {})
    for number, (name, values) in enumerate(CONFIGURATIONS.items(), 1):
        if number in chosen:
            with tempfile.TemporaryDirectory() as folder:
                found[name] = compared(values, Path(folder))
            print(name, found[name], flush=True)
            keep({"machine": machine(["torch", "optuna"]), "configurations": found}, RAW)
    ordered = {name: found[name] for name in CONFIGURATIONS if name in found}
    write_page(PAGE, page(ordered, machine(["torch", "optuna"])))
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
