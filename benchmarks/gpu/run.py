"""``python -m benchmarks.gpu``: build, check every operation against its reference, time, write RESULTS.md.

Ends within ``--minutes``: what does not fit is skipped, with a line that says so. Exit status: 0; 1, an operation
differs from its reference, cannot be built or failed; 2, there is no GPU; 3, something was skipped for want of time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import report
from benchmarks.gpu.timing import Timer

OK, FAILED, NO_GPU, SKIPPED = 0, 1, 2, 3
CHECK_RESERVE_S, STAGE_RESERVE_S = 60.0, 15.0
"""What must be left to begin a check, which is not interrupted, and a stage."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    made.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run of the same code on small tensors")
    made.add_argument("--params", type=int, help="elements of the timed tensors (100,000,000; on the CPU 100,000)")
    made.add_argument("--rounds", type=int, default=50, help="rounds of a stage at most")
    made.add_argument("--minutes", type=float, default=8.0, help="what the whole run may take")
    made.add_argument("--only", choices=["checks", "times"], help="one half of the run")
    made.add_argument("--page", type=Path, help="where the page goes (RESULTS.md; a dry run writes none unless told)")
    return made


class Clock:
    """Time left of the budget."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def left_s(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


def say(text: str) -> None:
    print(text, flush=True)


def run_checks(device: str, clock: Clock, *, large: bool, skipped: list[str]) -> tuple[dict[str, str], bool]:
    """The result of each check in words, and whether all that ran passed."""
    from benchmarks.gpu import checks

    results, passed = {}, True
    for check in checks.CHECKS:
        if clock.left_s() < (CHECK_RESERVE_S if large else 0.0):
            skipped.append(f"- check of {check.name}: skipped, the time was used up.")
            say(skipped[-1])
            continue
        began = time.monotonic()
        try:
            text = f"{checks.run(check, device, large=large)} comparisons, equal"
        except (checks.Mismatch, RuntimeError, ValueError) as error:
            text, passed = f"FAILED: {error}", False
        results[check.name] = text
        say(f"check {check.name}: {text} ({time.monotonic() - began:.1f} s)")
    return results, passed


def run_stages(
    timer: Timer, clock: Clock, elements: int, rounds: int, bandwidth: float, *, reserve_s: float, skipped: list[str]
) -> tuple[list[dict[str, Any]], bool]:
    """A record of each stage, and whether none failed."""
    from benchmarks.gpu.stages import STAGES

    records: list[dict[str, Any]] = []
    fine = True
    for i, stage in enumerate(STAGES):
        if clock.left_s() < reserve_s:
            skipped.append(f"- {stage.name}: skipped, the time was used up.")
            say(skipped[-1])
            continue
        try:
            contenders, num_bytes = stage.make(timer.device, elements)
            share = max(0.0, clock.left_s() - reserve_s) / (len(STAGES) - i)
            seconds = timer.rounds(contenders, most=rounds, limit_s=min(10.0, share))
        except RuntimeError as error:  # out of memory too
            fine = False
            skipped.append(f"- {stage.name}: FAILED: {str(error).partition(chr(10))[0]}")
            say(skipped[-1])
            continue
        finally:
            contenders = {}
            gc.collect()
            if timer.cuda:
                torch.cuda.empty_cache()
        records.append({"name": stage.name, "note": stage.note, "bytes": num_bytes, "seconds": seconds})
        cells = (f"{n} {1e3 * statistics.median(s):.3f} ms ({num_bytes / statistics.median(s) / bandwidth:.2f})"
                 for n, s in seconds.items())  # fmt: skip
        say(f"{stage.name}: {', '.join(cells)}")
    return records, fine


def elements_for(device: str, asked: int | None) -> int:
    """How many elements the timed tensors have: what a GPU of little memory can hold of three AdamW contenders."""
    if asked is not None:
        return asked
    if not device.startswith("cuda"):
        return 100_000
    free, _ = torch.cuda.mem_get_info(device)
    return min(100_000_000, free // 100)


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole run; returns the exit status."""
    args = parser().parse_args(arguments)
    cuda = args.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        say(
            "zoo: benchmarks.gpu: torch sees no GPU here, so nothing was checked or timed; "
            "--device cpu makes a dry run."
        )
        return NO_GPU
    from zoo.kernels import loading

    with loading.use_mode("native"):  # nothing may run in the reference unnoticed
        return measure(args, cuda)


def measure(args: argparse.Namespace, cuda: bool) -> int:
    """Check and time everything that is asked for; returns the exit status."""
    from zoo.kernels import loading
    from zoo.kernels.building import BuildError

    clock, timer, skipped = Clock(args.minutes), Timer(args.device), list[str]()
    began = time.monotonic()
    try:
        native = loading.native_cuda() if cuda else loading.native()
    except BuildError as error:
        say(f"zoo: benchmarks.gpu: {error}")
        return FAILED
    say(f"built and loaded in {time.monotonic() - began:.0f} s: {native}")
    raw: dict[str, Any] = {
        "about": report.about(args.device),
        "checks": {},
        "records": [],
        "skipped": skipped,
        "bandwidth": 0.0,
    }
    passed = fine = True
    if args.only != "times":
        raw["checks"], passed = run_checks(args.device, clock, large=cuda, skipped=skipped)
    if args.only != "checks" and passed:
        raw["bandwidth"] = timer.copy_bandwidth(2**30 if cuda else 2**20)
        say(f"copy: {raw['bandwidth'] / 1e9:.0f} GB/s")
        raw["records"], fine = run_stages(
            timer, clock, elements_for(args.device, args.params), args.rounds, raw["bandwidth"],
            reserve_s=STAGE_RESERVE_S if cuda else 0.0, skipped=skipped,
        )  # fmt: skip
    page = args.page or (report.PAGE if cuda else None)
    if page is not None:
        report.write(raw, page)
        say(f"written: {page}")
    if not (passed and fine):
        return FAILED
    return SKIPPED if skipped else OK


if __name__ == "__main__":
    sys.exit(main())
