"""The host time of AdamW, this tree beside another one: ``python -m benchmarks.kernels.host --before FOLDER``.

Processor time of one thread, with caches that hold something else before every step, as they do after a backward. One
process a tree; they take turns within a round, and a ratio is of one round. ``ZOO_KERNELS_ISA=avx2`` holds both to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT, remarks, table
from benchmarks.kernels import contenders, layers, report, yardstick

from zoo.kernels import loading
from zoo.optim import AdamW

PAGE = Path(__file__).with_name("HOST.md")
FLUSHED_BYTES = 64 * 2**20
LAYOUTS = {"10 of 64": [64] * 10, "168 of 64": [64] * 168, "4,807 of 64": [64] * 4807, "4,807 of 4,160": [4160] * 4807}
GROUPS = {"48 groups of 2, of 64": [64] * 96}
LOOP = "4,807 of 4,160"
"""The layout that the C loop of the same bytes runs on too."""


def steps_of(dtype: torch.dtype, sizes: list[int], groups: int) -> tuple[Callable[[], Any], list[Any]]:
    """A step, and the lists of tensors that it works on."""
    params = contenders.parameters(sizes, dtype)
    size = len(params) // groups
    optimizer = AdamW([{"params": params[i * size : (i + 1) * size]} for i in range(groups)], **contenders.OPTIONS)
    optimizer.step()
    names = ("exp_avg", "exp_avg_sq") if dtype is torch.float32 else ("master", "exp_avg", "exp_avg_sq")
    states = [[optimizer.state[p][name] for p in params] for name in names]
    return optimizer.step, [[p.detach() for p in params], [p.grad for p in params], *states]


def scatter(draw: random.Random) -> list[torch.Tensor]:
    """Small tensors in a number of their own, between the gaps that others have left.

    What an allocator has free decides how far apart the objects of thousands of tensors come to lie, and with it up to
    15 % of a step: it must not be the same in every process of a tree.
    """
    made = [torch.zeros(draw.choice((1, 16, 64, 200))) for _ in range(draw.randrange(20_000))]
    draw.shuffle(made)
    return made[len(made) // 2 :]


def work(seed: int) -> None:
    """Answer the name of a case on a line with the seconds of one step, as JSON, until there are no more."""
    torch.set_num_threads(1)
    draw, kept = random.Random(seed), list[torch.Tensor]()
    cases: dict[str, Callable[[], Any]] = {}
    loops = yardstick.Yardstick()
    kinds = {"fp32": torch.float32, "mixed": torch.bfloat16}
    order = [(kind, name, sizes) for kind in kinds for name, sizes in {**LAYOUTS, **GROUPS}.items()]
    names = [f"{kind}, {name}" for kind, name, _ in order]
    for kind, name, sizes in draw.sample(order, len(order)):
        kept += scatter(draw)
        step, lists = steps_of(kinds[kind], sizes, 48 if name in GROUPS else 1)
        cases[f"{kind}, {name}"] = step
        if name == LOOP:
            cases[f"{kind}, loop"] = loops.fp32(lists) if kind == "fp32" else loops.mixed(lists)
    cases = {name: cases[name] for name in [*names, *(f"{kind}, loop" for kind in kinds)]}
    if not loading.native():
        raise SystemExit("zoo: the operations do not run natively here")
    other = torch.zeros(FLUSHED_BYTES, dtype=torch.uint8)
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        other.add_(1)
        began = time.thread_time()
        cases[line.strip()]()
        print(json.dumps(time.thread_time() - began), flush=True)


class Worker:
    """A process that runs the optimizers of one tree."""

    def __init__(self, tree: Path, seed: int) -> None:
        paths = [ROOT, *(tree / part for part in ("python", "cuda", "moe", "compression"))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.kernels.host", "--work", str(seed)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.cases: list[str] = self._read()

    def _read(self) -> Any:
        if self.process.stdout is None:
            raise AssertionError("a process started with a pipe has no pipe")
        return json.loads(self.process.stdout.readline())

    def measure(self, case: str) -> float:
        """Seconds of one step."""
        if self.process.stdin is None:
            raise AssertionError("a process started with a pipe has no pipe")
        print(case, file=self.process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        """End it."""
        self.process.communicate()


Seconds = tuple[float, float, float]
"""Of one round: before, now, and before once more, in a process of its own."""


def compare(before: Path, rounds: int, launches: int) -> dict[str, list[Seconds]]:
    """Case → the seconds of every round, of new processes ``launches`` times.

    The tree before is there twice: what its two processes differ by, the code did not do.
    """
    found: dict[str, list[Seconds]] = {}
    for launch in range(launches):
        for case, triples in compare_once(before, rounds // launches, launch).items():
            found.setdefault(case, []).extend(triples)
    return found


def compare_once(before: Path, rounds: int, launch: int) -> dict[str, list[Seconds]]:
    """One process of each; which is launched first and which goes first changes."""
    trees, orders = (before, ROOT, before), list(itertools.permutations(range(3)))
    workers = {i: Worker(trees[i], 3 * launch + i) for i in orders[launch % len(orders)]}
    found: dict[str, list[Seconds]] = {case: [] for case in workers[0].cases}
    for turn in range(rounds + 1):
        for case in found:
            seconds = {i: workers[i].measure(case) for i in orders[(turn + launch) % len(orders)]}
            if turn > 0:  # the first makes what a step needs
                found[case].append((seconds[0], seconds[1], seconds[2]))
    for worker in workers.values():
        worker.close()
    return found


def rows(found: dict[str, list[Seconds]]) -> list[list[str]]:
    """The table: medians in microseconds, the ratio of both in a round, and the parts of the loop."""
    made = []
    for case, triples in found.items():
        old, new = (statistics.median(t[i] for t in triples) * 1e6 for i in (0, 1))
        # One of the two in turns: a mean of both would be above the median of one, since what disturbs only adds.
        ratios = [(t[0] if turn % 2 == 0 else t[2]) / t[1] for turn, t in enumerate(triples)]
        least, control = layers.bound(ratios), statistics.median(a / c for a, _, c in triples)
        row = [case, f"{old:,.0f}", f"{new:,.0f}", f"{statistics.median(ratios):.2f}", f"{least:.2f}" if least else "–"]
        row.append(f"{control:.2f}")
        loop = found.get(f"{case.partition(',')[0]}, loop")
        if loop is not None and case.endswith(LOOP):
            row += [f"{statistics.median(a[i] / b[i] for a, b in zip(loop, triples, strict=True)):.2f}" for i in (0, 1)]
        made.append(row + ["–"] * (8 - len(row)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.host")
    parser.add_argument("--before", type=Path, default=ROOT, help="another tree, such as a git worktree")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--launches", type=int, default=12, help="triples of processes that share the rounds")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.work)
        return
    loading.native()
    facts = report.about("")
    isa = os.environ.get("ZOO_KERNELS_ISA") or loading.isas()[-1]
    header = ["tensors", "before, µs", "now, µs", "before / now", "at least", "before / before"]
    header += ["of the loop before", "of the loop now"]
    text = f"## {isa}\n\n{facts['date']}, {facts['processor']}, torch {torch.__version__}, {args.rounds} rounds "
    text += f"of {args.launches} triples of processes.\n\n"
    text += table(header, rows(compare(args.before, args.rounds, args.launches))) + "\n"
    print(text)
    PAGE.write_text(page(text, isa))


def page(section: str, isa: str) -> str:
    """The page with the section of this instruction set replaced, and the remarks as they are."""
    head = (
        "# The host time of a step of AdamW\n\nWritten by `python -m benchmarks.kernels.host --before FOLDER`: "
        "processor time of one thread, caches cold, this tree and the one before it in turns; medians. At least: the "
        "bound of the median ratio at 95 %. Before / before: of two processes of the tree before, what chance does.\n\n"
    )
    old = PAGE.read_text().partition("## Remarks")[0] if PAGE.exists() else ""
    others = ["## " + part for part in old.split("\n## ")[1:] if not part.startswith(f"{isa}\n")]
    sections = sorted([section.strip(), *(part.strip() for part in others)])
    return head + "\n\n".join(sections) + "\n\n" + remarks(PAGE)


if __name__ == "__main__":
    main()
