"""The real runtime on many simulated ranks, and its time on a machine: ``python -m benchmarks.sim.many RANKS``, prints
JSON."""

from __future__ import annotations

import json
import resource
import sys
import time

import benchmarks.sim.job as job

from zoo import sim
from zoo.cost import cost_on, read_hardware, simulate_events

SPEC = {"stage": 3, "layers": 6, "width": 64, "seconds": 1e-3, "steps": 2}


def main() -> None:
    """One measurement: a process of its own, so that its memory is its own."""
    ranks = int(sys.argv[1])
    job.SIMULATED = True
    programs = sim.Programs()
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begun = time.process_time()
    sim.run(ranks, lambda rank: job.steps(SPEC, rank, lambda step: None), programs=programs)
    ran = time.process_time()
    timeline = simulate_events(programs.programs(), cost_on(read_hardware("h100")))
    figures = {
        "ranks": ranks, "run_s": ran - begun, "events_s": time.process_time() - ran,
        "items": sum(map(len, programs.programs())), "makespan_ms": 1e3 * timeline.makespan_s,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - imported,
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
