"""The simulated time of real jobs beside the clock's: ``python -m benchmarks.sim [--write-results]``.

Two ranks of gloo in network namespaces, a cable of limited rate between them, layers that sleep. The simulated ranks
run the same program; the cable's rate is what it is set to, nothing is fitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import benchmarks.sim.job as job
from benchmarks.common import ROOT, machine, table
from benchmarks.launch import start
from benchmarks.onebit.link import LinkError, cable

from zoo import sim
from zoo.cost.events import Start, simulate_events

RESULTS = Path(__file__).with_name("RESULTS.md")
LATENCY_S = 2e-4
WIRE = 1.05
"""Of what is sent, with the headers of Ethernet, IP and TCP at 1,500 bytes a packet: 1,538 / 1,448 = 1.062 at most."""
JOBS = [
    {"stage": stage, "layers": 6, "width": 512, "seconds": seconds, "steps": 5, "mbit": mbit}
    for stage in (1, 2, 3) for mbit, seconds in ((100, 0.1), (100, 0.02), (500, 0.02))
]  # fmt: skip
PIPELINES = [
    {
        "schedule": schedule, "micro_batches": 4, "rows": 256, "layers": 6, "width": 512, "seconds": seconds,
        "steps": 5, "mbit": mbit,
    }
    for schedule in ("gpipe", "1f1b") for mbit, seconds in ((100, 0.05), (100, 0.02), (500, 0.02))
]  # fmt: skip


def clocked(spec: dict[str, Any]) -> tuple[float, float]:
    """Of the median step of those after two: its seconds, and those in which threads were ready and had no core.

    What the clock would say of a machine that does nothing else lies between the seconds without these and all of them.
    """
    with cable(spec["mbit"]) as prefixes:
        found = start("benchmarks.sim.job", [json.dumps(spec)], prefixes, "10.77.0.1", "cable")
    seconds, waited = sorted(found[2:])[len(found[2:]) // 2]
    return seconds, waited


def simulated(spec: dict[str, Any], trace: Path | None = None) -> tuple[float, dict[str, float]]:
    """The same, simulated; and what the last step's critical path is made of. ``trace``: a file for Perfetto."""
    programs = sim.Programs()
    sim.run(2, lambda rank: job.steps(spec, rank, lambda step: sim.compute(1e-9, f"step {step}")), programs=programs)
    rate = spec["mbit"] * 1e6 / 8 / WIRE

    def cost(begun: Start) -> float:
        # Of two ranks each sends the other its part of a gather, or half of what is to be reduced.
        sent = begun.num_bytes if "gather" in begun.op or begun.op == "send" else begun.num_bytes / 2
        sent *= 2 if begun.op == "all_reduce" else 1
        return LATENCY_S + sent / rate

    timeline = simulate_events(programs.programs(), cost)
    if trace is not None:
        trace.write_text(json.dumps(timeline.to_chrome()))
    marks = [s.start_s for s in timeline.spans if s.rank == 0 and s.name.startswith("step ")]
    gaps = [b - a for a, b in itertools.pairwise(marks)]
    path: dict[str, float] = {}
    for span in timeline.critical_path():
        if marks[-2] <= span.start_s < marks[-1]:
            path[span.name] = path.get(span.name, 0.0) + span.end_s - span.start_s
    return statistics.median(gaps[2:]), path


def _mark(step: int) -> None:
    sim.compute(1e-9, f"step {step}")


def _many() -> str:
    """The same program on more ranks, in a process for each number."""
    rows = []
    for ranks, role in (*((n, False) for n in (16, 64, 256, 1024)), *((n, True) for n in (64, 1024, 10_000, 100_000))):
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.sim.many", str(ranks), *["role"] * role],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        found = json.loads(ended.stdout)
        rows.append(
            [
                f"{ranks:,}", "1" if role else "all", f"{found['items']:,}", f"{found['run_s']:.1f}",
                f"{found['events_s']:.2f}", f"{found['mib']:,.0f}", f"{found['makespan_ms']:.2f}",
            ]
        )  # fmt: skip
    return (
        "ZeRO-3, two steps of six layers of 64 x 64 which take 1 ms forward and 2 back; H100s, eight a node. Ranks "
        "run the real runtime: all of them, or one in the place of all, which do the same (`role_of`). CPU seconds of "
        "one core, MiB after imports (asked: 1,024 ranks in 120 s and 2 GB).\n\n"
        + table(["ranks", "run", "program items", "run s", "time s", "MiB", "simulated ms"], rows) + "\n"
    )  # fmt: skip


def main() -> None:
    """Print a table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-results", action="store_true")
    parser.add_argument("--trace", type=Path, help="write the last job's timeline here, for Perfetto")
    given = parser.parse_args()
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    errors = []
    for spec in (*JOBS, *PIPELINES):
        piped = "schedule" in spec
        try:
            real, _ = clocked(spec)
        except LinkError as error:
            sys.exit(f"no cable: {error}")
        found, path = simulated(spec, given.trace)
        errors.append(found / real - 1)
        most = sorted(path.items(), key=lambda item: -item[1])[:3]
        rows[piped].append(
            [
                str(spec["schedule" if piped else "stage"]), f"{spec['mbit']}", f"{1e3 * spec['seconds']:.0f}",
                f"{1e3 * real:.0f}", f"{1e3 * found:.0f}", f"{errors[-1]:+.1%}",
                ", ".join(f"{n} {1e3 * s:.0f}" for n, s in most if s > 1e-4),
            ]
        )  # fmt: skip
        print(rows[piped][-1], flush=True)
    facts = "\n".join(f"- {k}: {v}" for k, v in machine(["torch"]).items())
    page = (
        "# Simulated time beside the clock's\n\nWritten by `python -m benchmarks.sim`. Two ranks of gloo in network "
        "namespaces with a cable between them; six layers of 512 x 512 that sleep: forward as long as the third column "
        "says, backward twice. Below, the same layers (diagonal ones, so that products take no time) as a pipeline of "
        "two stages, with four micro-batches of 256 rows: 512 KiB a message. Milliseconds of a step, the median after "
        "two. Nothing is fitted: the simulation knows "
        f"the seconds of a layer, the cable's rate, {WIRE} bytes on the wire for each and {1e3 * LATENCY_S} ms a "
        "message.\n\n"
        f"{facts}\n\n"
        + table(["stage", "Mbit/s", "layer ms", "clock", "simulated", "error", "critical path, ms"], rows[False])
        + "\n\n"
        + table(["schedule", "Mbit/s", "layer ms", "clock", "simulated", "error", "critical path, ms"], rows[True])
        + f"\n\nMean error {statistics.mean(map(abs, errors)):.1%}, worst {max(map(abs, errors)):.1%} (asked: 5 %).\n"
    )
    page += "\n## Many ranks\n\n" + _many()
    print(page)
    if given.write_results:
        RESULTS.write_text(page)
