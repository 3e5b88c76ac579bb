"""Whether a barrier or mask that is taken away or weakened is noticed: by which case of which check, in which order.

A trial is a process of its own (a fork): a kernel without a barrier may write anywhere, or never end.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import checks
from benchmarks.gpu.cases import Case, differing, flat, moved
from tests.kernels import emulator
from tests.kernels.emulator.places import Place, places

from zoo.kernels.building.cache import cache_dir, locked

Tensor = torch.Tensor
SECONDS = 300
"""How long one trial may take; one that takes longer never ends."""
ROUNDS = 4
"""How often a trial goes through its cases where warps run ahead of each other, with other seeds each time."""


def row_sums_cases(large: bool) -> Iterator[Case]:
    """Sums of more parts than a tile of the kernel has; through an operator that takes a tensor of 2^26 elements."""

    def operation(parts: Tensor, *counts: int) -> Tensor:
        first = (ctypes.c_int32 * (len(counts) + 1))(*accumulate(counts, initial=0))
        sums = torch.empty(len(counts), dtype=torch.float64)
        at, to = (ctypes.c_void_p(t.data_ptr()) for t in (parts, sums))
        emulator.load().zoo_row_sums(at, first, len(counts), to)
        return sums

    def reference(parts: Tensor, *counts: int) -> Tensor:
        return torch.tensor([sum(row.tolist()) for row in parts.split(counts)], dtype=torch.float64)

    for counts in ((0, 1, 1024), (1025,), (3000, 2048)):
        parts = torch.rand(sum(counts), dtype=torch.float64, generator=torch.Generator().manual_seed(len(counts)))
        yield Case(what=f"{counts} parts", args=(parts, *counts), operation=operation, reference=reference)


CHECKS = (*checks.CHECKS, checks.Check(name="sums of many parts", operators=(), cases=row_sums_cases))


def wrong(case: Case, order: int, seed: int = 0, mutant: emulator.Mutant | None = None, offset: int = 0) -> int:
    """How many elements of the results of the emulated kernels are not those of the reference."""
    expected = flat(case.reference(*moved(case.args, "cpu")))
    with emulator.emulated(order, seed, mutant=mutant):
        found = flat(case.operation(*moved(case.args, "cpu", offset)))
    if len(found) != len(expected):
        raise checks.Mismatch(f"{case.what}: {len(found)} results for {len(expected)}")
    return sum(differing(a, b) for a, b in zip(found, expected, strict=True))


# Which cases come to which place -----------------------------------------------------------------------------------

Reached = dict[int, list[tuple[str, int]]]


def reached() -> Reached:
    """Place → (check, number of the case) of the cases whose kernels come to it, the fastest of each check first.

    From one run of all cases, whose result is kept beside the library.
    """
    texts = [path.read_bytes() for path in (*sorted(Path(checks.__file__).parent.glob("*.py")), Path(__file__))]
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:20]
    path = cache_dir() / "emulated" / f"{emulator.plan().key}-{digest}.json"
    emulator.load()
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            path.write_text(json.dumps(_run_all()), encoding="utf-8")
    found: Reached = defaultdict(list)
    for name, number, _, hit in sorted(json.loads(path.read_text(encoding="utf-8")), key=lambda row: row[2]):
        for place in hit:
            found[place].append((name, number))
    return {place: _in_turns(cases) for place, cases in found.items()}


def _run_all() -> list[tuple[str, int, float, list[int]]]:
    rows, before = [], emulator.hits()
    for check in CHECKS:
        for number, case in enumerate(check.cases(False)):
            began = time.perf_counter()
            if wrong(case, emulator.RISING):
                raise checks.Mismatch(f"{check.name}, {case.what}: differs without any change; mend that first.")
            after = emulator.hits()
            hit = [place for place, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
            rows.append((check.name, number, time.perf_counter() - began, hit))
            before = after
    return rows


def _in_turns(cases: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The first case of each check, then the second of each, and so on."""
    turns: dict[str, int] = defaultdict(int)
    ordered = []
    for name, number in cases:
        ordered.append((turns[name], name, number))
        turns[name] += 1
    return [(name, number) for _, name, number in sorted(ordered)]


# Trials ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What became of a mutant in one order: ``by`` says what noticed it, and is empty where nothing did."""

    by: str
    cases: int
    seconds: float


def mutants() -> list[tuple[Place, emulator.Mutant]]:
    """All that are tried: barriers taken away and weakened to ``__syncwarp``, exchanges without waiting and with a
    lane that their mask does not name (another one at each place)."""
    found = []
    for number, place in enumerate(places()):
        changes = (emulator.TAKEN_AWAY, emulator.OF_WARP if place.is_barrier else emulator.WITHOUT_LANE)
        found += [(place, emulator.Mutant(number, change, number * 11 % 32)) for change in changes]
    return found


def attempt(mutant: emulator.Mutant, order: int, cases: Sequence[tuple[str, int]]) -> Trial:
    """Run the cases, one after the other, until one notices the mutant."""
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_child(writing, mutant, order, list(cases) * (ROUNDS if order >= emulator.AHEAD else 1))
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    tried = said.count("\n")
    by = said.rpartition("\n")[2]
    if os.WIFSIGNALED(status):
        ended = os.WTERMSIG(status)
        what = f"does not end in {SECONDS} s" if ended == signal.SIGALRM else f"killed by {signal.Signals(ended).name}"
        by = f"{cases[tried % len(cases)][0]}: {what}"
    return Trial(by, tried, time.monotonic() - began)


def _in_child(pipe: int, mutant: emulator.Mutant, order: int, cases: Sequence[tuple[str, int]]) -> None:
    """Write a line for each case that notices nothing, then what the first of the others says."""
    faulthandler.disable()  # that it is killed is what is to be found out
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    try:
        made: dict[str, list[Any]] = {}
        for seed, (name, number) in enumerate(cases):
            if name not in made:
                made[name] = list(next(check for check in CHECKS if check.name == name).cases(False))
            case = made[name][number]
            try:
                found = wrong(case, order, seed, mutant)
                what = f"{found} elements differ" if found else ""
            except Exception as error:
                what = str(error).partition("\n")[0]
            if what:
                os.write(pipe, f"{name}, {case.what}: {what}".encode())
                break
            os.write(pipe, b"\n")
    finally:
        os._exit(0)
