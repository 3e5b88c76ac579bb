"""The real runtime on many simulated ranks, and its time on a machine: ``python -m benchmarks.sim.many RANKS [role]``,
prints JSON. With ``role`` one rank runs in the place of all, which do the same."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import benchmarks.sim.job as job

from zoo import sim
from zoo.cost import cost_on, read_hardware, simulate_events

SPEC = {"stage": 3, "layers": 6, "width": 64, "seconds": 1e-3, "steps": 2}


def _peak_mib() -> float:
    """The most memory that this process had; ``ru_maxrss`` would be that of whoever started it, if that is more."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def main() -> None:
    """One measurement: a process of its own, so that its memory is its own."""
    ranks = int(sys.argv[1])
    programs = sim.Programs()
    imported = _peak_mib()
    begun = time.process_time()
    role_of = (lambda rank: 0) if sys.argv[2:] == ["role"] else None
    sim.run(ranks, lambda rank: job.steps(SPEC, rank, lambda step: None), programs=programs, role_of=role_of)
    ran = time.process_time()
    timeline = simulate_events(programs.programs(), cost_on(read_hardware("h100")), ranks=programs.ranks)
    figures = {
        "ranks": ranks, "run_s": ran - begun, "events_s": time.process_time() - ran,
        "items": sum(map(len, programs.programs())), "makespan_ms": 1e3 * timeline.makespan_s,
        "mib": _peak_mib() - imported,
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
