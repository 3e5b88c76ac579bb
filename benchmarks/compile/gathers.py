"""CPU time of a gather inside of a compiled graph: an event that asks zoo's runtime, or torch's functional collectives.

::

    python -m benchmarks.compile.gathers                    # 1 and 2 ranks
    python -m benchmarks.compile.gathers --quick            # does it run
    python -m benchmarks.compile.gathers --write-results    # also write GATHERS.md

20 layers of 64 × 64, each a unit whose parameters are split over the ranks; evaluation of two rows by torch.compile's
"aot_eager", with one gather ahead. zoo: ``compile_whole`` at stage 3. functional: a graph with
``_c10d_functional.all_gather_into_tensor``, ``wait_tensor`` and views in the place of the parameters. Both, and the
same graph of whole parameters, run in turns in the same processes and give the same bits. A figure is microseconds of
CPU time of a rank for each unit, beyond the graph of whole parameters: median over turns, then over ranks. zoo's
include what a functional collective does not do: releases, the record, the check of what ranks are about to do.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.common import facts, machine, remarks, table
from benchmarks.launch import run_ranks

RESULTS = Path(__file__).with_name("GATHERS.md")


def main() -> None:
    """See the file's docstring."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile.gathers", description=about)
    parser.add_argument("--quick", action="store_true", help="one turn")
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    spec = {"turns": 1, "steps": 2} if args.quick else {"turns": 15, "steps": 40}
    rows = []
    for size in (1, 2):
        found = run_ranks("benchmarks.compile.gathers_worker", dict(spec), size, timeout_s=600)
        mine, other = (statistics.median(one[name] for one in found) for name in ("zoo", "functional"))
        rows.append([str(size), f"{mine:.0f}", f"{other:.0f}", f"{mine / other:.2f}"])
    made = table(["ranks", "zoo, µs a unit", "functional, µs a unit", "zoo / functional"], rows)
    print(made)
    if args.write_results:
        told = (__doc__ or "").partition("::")[2].rpartition("GATHERS.md\n")[2].strip()
        RESULTS.write_text(
            f"# Gathers inside of graphs\n\nWritten by `python -m benchmarks.compile.gathers`. {about}\n\n"
            f"{facts(machine(('torch',)))}\n\n{told}\n\n{made}\n\n{remarks(RESULTS)}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
