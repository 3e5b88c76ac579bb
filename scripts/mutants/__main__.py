"""Which mistakes would the tests not notice? Makes small changes to the code, one at a time, and runs the tests.

    make mutants ARGS="--minutes 15 zoo.layout zoo.checkpointing"

1. The tests run once under coverage, which keeps for every line which tests execute it, and how long each takes.
2. Mutants are drawn: places first, then one change at each, from cosmic-ray's operators and from one of our own (a call
   that is left out). The same seed draws the same ones.
3. Each is tried in a forked process by the tests that execute the changed line, the fastest first, until one fails.

Files are never changed: the process that tries a mutant compiles the changed text where the file would be read. So
several can run side by side, and an interrupted run leaves nothing behind. Results are kept in build/mutants/ by the
text of the file: what was tried is not tried again. Properties run under the quick profile, always the same examples.

Why a driver of our own: mutmut copies the sources into a folder, which a namespace package spread over four installed
distributions is not found in; cosmic-ray's runner starts an interpreter for every mutant and all tests for each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import difflib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
os.chdir(ROOT)
# One thread a process, and a fork server without zoo: every process that is forked imports its own, changed one.
os.environ.update(OMP_NUM_THREADS="1", ZOO_TEST_PROFILE="quick")
os.environ["ZOO_TEST_PRELOAD"] = "numpy torch torch.distributed torch._dynamo pydantic hypothesis pytest safetensors"

from scripts.mutants.drawing import Mutant, draw  # noqa: E402
from scripts.mutants.recording import Record, record  # noqa: E402
from tests import processes  # noqa: E402

HOME = ROOT / "build" / "mutants"
TRIAL = Path(__file__).with_name("trial.py")
MODULES = ["zoo.zero", "zoo.shard", "zoo.comm", "zoo.layout", "zoo.checkpointing"]
NO_TEST_FAILS, KILLED, NO_TEST, SLOW = "survived", "killed", "no test executes it", "killed by the time limit"
SURVIVED = (NO_TEST_FAILS, NO_TEST)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description="Mutation testing of parts of zoo.")
    parser.add_argument(
        "modules", nargs="*", default=MODULES, help=f"packages and modules (default: {' '.join(MODULES)})"
    )
    parser.add_argument("--count", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after that time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for one mutant, as long as none fails")
    parser.add_argument("--tests", default="tests", help="folders and files of tests, separated by spaces")
    parser.add_argument("--report", action="store_true", help="try nothing; print what is known")
    return parser.parse_args()


def attempt(mutant: Mutant, known: Record, seconds: float) -> dict[str, object]:
    """Try one mutant; what happened, to be kept."""
    tests = known.tests_of(mutant.file, mutant.line, seconds)
    began = time.monotonic()
    found: dict[str, object] = {"id": mutant.id, "file": mutant.file, "line": mutant.line, "operator": mutant.operator}
    if not tests:
        return {**found, "outcome": NO_TEST}
    # Ten times what they take, because others may be using the machine; and what importing takes.
    limit_s = 60 + 10 * sum(known.seconds.get(test, 1.0) for test in tests)
    job = json.dumps({"file": str(ROOT / mutant.file), "text": mutant.mutated, "tests": tests})
    environment = {k: v for k, v in os.environ.items() if k != processes.FOLDER}
    try:
        done = processes.run(TRIAL, job, env=environment, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {**found, "outcome": SLOW, "seconds": time.monotonic() - began}
    outcome = NO_TEST_FAILS if done.returncode == 0 else KILLED
    by = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return {**found, "outcome": outcome, "by": by[:200], "tests": len(tests), "seconds": time.monotonic() - began}


def report(mutants: list[Mutant], results: dict[str, dict[str, object]]) -> None:
    """Print the survivors as diffs, then the score by package."""
    tried = [mutant for mutant in mutants if mutant.id in results]
    alive = [mutant for mutant in tried if results[mutant.id]["outcome"] in SURVIVED]
    for mutant in sorted(alive, key=lambda m: (m.file, m.line)):
        print(f"\n# {mutant.operator}: {results[mutant.id]['outcome']} ({results[mutant.id].get('tests', 0)} tests)")
        before, after = mutant.source.splitlines(), mutant.mutated.splitlines()
        print("\n".join(difflib.unified_diff(before, after, mutant.file, mutant.file, n=1, lineterm="")))
    print(f"\n{'package':<20} {'drawn':>6} {'tried':>6} {'killed':>6} {'score':>6}")
    packages = sorted({mutant.package for mutant in mutants})
    for name in [*packages, "all"]:
        of = [m for m in tried if name in (m.package, "all")]
        dead = sum(results[m.id]["outcome"] not in SURVIVED for m in of)
        drawn = sum(name in (m.package, "all") for m in mutants)
        print(f"{name:<20} {drawn:>6} {len(of):>6} {dead:>6} {dead / len(of) if of else 0:>6.0%}")


def main() -> None:
    options = arguments()
    HOME.mkdir(parents=True, exist_ok=True)
    mutants = draw(ROOT, options.modules, options.count, options.seed)
    log = HOME / "results.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    results = {found["id"]: found for found in map(json.loads, lines)}
    end = time.monotonic() + 60 * options.minutes
    todo = [mutant for mutant in mutants if mutant.id not in results] if not options.report else []
    if todo:
        known = record(ROOT, HOME, options.modules, options.tests.split())
        remove = processes.make_folder()
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool, open(log, "a", encoding="utf-8") as file:

            def one(mutant: Mutant) -> dict[str, object] | None:
                return attempt(mutant, known, options.seconds) if time.monotonic() < end else None

            for found in filter(None, pool.map(one, todo)):
                results[str(found["id"])] = found
                print(json.dumps(found), file=file, flush=True)
                print(f"{found['outcome']:<24} {found['file']}:{found['line']} {found['operator']}", flush=True)
        remove()
    report(mutants, results)


if __name__ == "__main__":
    main()
