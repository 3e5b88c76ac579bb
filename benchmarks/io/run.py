"""Runs the contenders in turns, round after round, and reports rates, CPU time and ratios to fio's best engine.

An operation at a time: its file is made, settings are searched, then every round runs every contender once, in shuffled
order and in fresh processes, so that what the device does meanwhile meets all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, keep, machine
from benchmarks.io import files, fio
from benchmarks.io.contenders import Contender, contenders
from benchmarks.io.points import Grid, Point, best_point
from benchmarks.io.report import CONTROL, console, write_page
from benchmarks.launch import ContenderError, run_ranks, threads_as_given

SECTIONS = ("write", "read", "new", "gil")
DEFAULT_RAW = ROOT / "build" / "benchmarks" / "io.json"
PROBE_TIMEOUT_S = 1800.0  # DeepSpeed compiles its extension on first use


def run_tasks(tasks: list[dict[str, Any]], timeout_s: float, *, go_on: bool = True) -> list[dict[str, Any]]:
    """One figure a task, of one fresh process with as many threads as it likes; see the worker for ``go_on``."""
    spec = {"tasks": tasks, "go_on": go_on}
    found: list[dict[str, Any]] = run_ranks("benchmarks.io.worker", spec, 1, timeout_s, threads_as_given())[0]
    return found


class Run:
    """One run: what was asked for, where its files are, what was found so far."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.random = random.Random(args.seed)
        self.salt = 0
        self.contenders: dict[str, Contender] = {
            name: c for name, c in contenders().items() if args.contenders is None or name in args.contenders
        }
        self.grid = Grid(
            block_sizes=tuple(args.block_sizes), queue_depths=tuple(args.depths), num_threads=tuple(args.threads)
        )
        self.raw: dict[str, Any] = {
            "machine": {
                **machine(["torch", "deepspeed"]), "kernel": platform.release(), "fio": fio.version(),
                "filesystem": files.filesystem(folder), "huge_pages": files.huge_pages(),
            },
            "settings": {
                "command": "python -m benchmarks.io " + " ".join(args.shown), "num_bytes": args.size,
                "grid_bytes": args.grid_size, "grid_passes": args.grid_passes, "rounds": args.rounds,
                "window_s": args.window,
            },
            "missing": {}, "failures": {}, "grid": {}, "points": {}, "rounds": {}, "gil": [], "load": {},
        }  # fmt: skip

    def say(self, text: str) -> None:
        """Where it is."""
        print(f"\r{text:<70}", end="", file=sys.stderr, flush=True)

    def failed(self, key: str, why: str) -> None:
        """Loudly, and in the report, which names no folder of the machine."""
        self.raw["failures"][key] = why.replace(str(self.folder), "…")
        print(f"\n{key} failed: {why}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """The raw figures so far."""
        keep(self.raw, self.args.raw)

    def probe(self) -> None:
        """Leave out who is not installed or does not work here, and say so."""
        asked = [name for name, c in self.contenders.items() if c.needs]
        self.say("looking for " + ", ".join(sorted({self.contenders[name].needs for name in asked})))
        tasks = [{"contender": name, "op": "probe", "point": Point().to_json()} for name in asked]
        figures = run_tasks(tasks, PROBE_TIMEOUT_S) if tasks else []
        wrong = {name: f["error"] for name, f in zip(asked, figures, strict=True) if "error" in f}
        if fio.find_fio() is None:
            wrong |= {name: fio.ABSENT for name, c in self.contenders.items() if c.engine is not None}
        for name, why in wrong.items():
            label = self.contenders.pop(name).label
            self.raw["missing"][label] = why
            print(f"\nMISSING: {label} is left out of everything: {why}", file=sys.stderr, flush=True)

    def task(self, name: str, op: str, point: Point, num_bytes: int) -> dict[str, Any]:
        """One measurement, for `measure`; every write has a salt of its own, so that old contents cannot pass."""
        self.salt += 1
        path = self.folder / ("torch.pt" if self.contenders[name].pt_file and op == "read" else op)
        return {
            "contender": name, "op": op, "point": point.to_json(), "path": str(path), "num_bytes": num_bytes,
            "salt": 0 if op == "read" else self.salt,
        }  # fmt: skip

    def measure(self, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One figure a task, or {"error": …}: fio's jobs one by one, the others in one fresh process."""
        os.sync()
        figures: dict[int, dict[str, Any]] = {}
        others = [i for i, task in enumerate(tasks) if self.contenders[task["contender"]].engine is None]
        for i in set(range(len(tasks))) - set(others):
            try:
                figures[i] = self.measure_fio(tasks[i])
            except ContenderError as error:
                figures[i] = {"error": str(error)}
        if others:
            try:
                found = run_tasks([tasks[i] for i in others], 120.0 + 60 * len(others), go_on=len(others) > 1)
            except ContenderError as error:
                found = [{"error": str(error)}] * len(others)
            figures |= dict(zip(others, found, strict=True))
        return [figures[i] for i in range(len(tasks))]

    def measure_fio(self, task: dict[str, Any]) -> dict[str, Any]:
        """One job of fio's."""
        contender, path = self.contenders[task["contender"]], Path(task["path"])
        if contender.engine is None:
            raise AssertionError(f"{task['contender']} is no job of fio's")
        if task["op"] != "new":
            files.drop_cache(path)
        return fio.run_fio(
            contender.engine, task["op"], Point(**task["point"]), path, task["num_bytes"],
            huge_pages=contender.huge_pages,
        )  # fmt: skip

    def prepare(self, op: str, num_bytes: int) -> None:
        """The files of one operation: what is overwritten, or what is read."""
        if op == "new":
            return
        files.create(self.folder / op, num_bytes, 0)
        if op == "read" and any(c.pt_file for c in self.contenders.values()):
            import torch

            tensor = torch.empty(num_bytes, dtype=torch.uint8)
            files.fill(tensor, 0)
            torch.save(tensor, self.folder / "torch.pt")
            files.drop_cache(self.folder / "torch.pt")

    def clean(self) -> None:
        """Delete the operation's files; the device may be told of it before the next one starts."""
        for path in self.folder.iterdir():
            path.unlink()
        os.sync()

    def search(self, op: str) -> None:
        """Each contender's best setting for ``op``, into ``raw["points"]``."""
        chosen = self.raw["points"].setdefault(op, {})
        if op == "new" and self.raw["points"].get("write"):
            chosen.update(self.raw["points"]["write"])
            return
        searched = {
            name: self.grid.points(() if self.args.quick else contender.varies)
            for name, contender in self.contenders.items()
            if contender.varies is not None
        }
        found: dict[str, list[dict[str, Any]]] = self.raw["grid"].setdefault(op, {})
        for number in range(self.args.grid_passes):
            names = list(searched)
            self.random.shuffle(names)
            for name in names:
                if len(points := searched[name]) == 1:
                    continue
                self.say(f"{op}: search {number + 1}/{self.args.grid_passes}, {name}")
                shuffled = self.random.sample(points, len(points))
                tasks = [self.task(name, op, point, min(self.args.grid_size, self.args.size)) for point in shuffled]
                found.setdefault(name, []).extend(
                    {**figure, "point": point.to_json()}
                    for figure, point in zip(self.measure(tasks), shuffled, strict=True)
                )
        for name, points in searched.items():
            good = [(Point(**f["point"]), f) for f in found.get(name, []) if "error" not in f]
            chosen[name] = (best_point(good) or points[0]).to_json()
        for name, contender in self.contenders.items():
            if contender.follows is not None:
                chosen[name] = chosen.get(contender.follows, Point().to_json())

    def round_tasks(self, op: str, names: list[str]) -> list[dict[str, Any]]:
        """One task a contender, at its chosen setting."""
        points = [Point(**self.raw["points"][op].get(name, {})) for name in names]
        return [self.task(name, op, point, self.args.size) for name, point in zip(names, points, strict=True)]

    def run_op(self, op: str) -> None:
        """Search, then the rounds of one operation."""
        self.prepare(op, self.args.size)
        self.search(op)
        rounds: list[dict[str, Any]] = self.raw["rounds"].setdefault(op, [])
        for number in range(self.args.rounds):
            rounds.append({})
            self.raw["load"].setdefault(op, []).append(os.getloadavg()[0])
            for name in self.random.sample(list(self.contenders), len(self.contenders)):
                self.say(f"{op}: round {number + 1}/{self.args.rounds}, {name}")
                self.keep(rounds[-1], [(f"{op} {name}", name)], self.measure(self.round_tasks(op, [name])))
                if op == "new":
                    self.clean()
        self.clean()

    def run_quick(self, ops: list[str]) -> None:
        """One round of all operations, all contenders in one process, so that Python starts once."""
        tasks, names = [], list(self.contenders)
        for op in ops:
            self.prepare(op, self.args.size)
            self.search(op)
            tasks += self.round_tasks(op, names)
        self.say(" ".join(ops))
        figures = self.measure(tasks)
        for number, op in enumerate(ops):
            self.raw["rounds"][op] = [{}]
            self.raw["load"][op] = [os.getloadavg()[0]]
            mine = figures[number * len(names) : (number + 1) * len(names)]
            self.keep(self.raw["rounds"][op][0], [(f"{op} {name}", name) for name in names], mine)
        self.clean()

    def keep(self, into: dict[str, Any], keys: list[tuple[str, str]], figures: list[dict[str, Any]]) -> None:
        """``keys`` are (what to call it when it failed, where it goes when it did not)."""
        for (title, name), figure in zip(keys, figures, strict=True):
            if "error" in figure:
                self.failed(title, figure["error"])
            else:
                into[name] = figure
        self.save()

    def gil_task(self, name: str, direction: str, path: Path) -> dict[str, Any]:
        """One pair of kinds of windows, at the setting found for this direction if there is one."""
        searched = "fio-uring" if name == CONTROL else name
        return {
            "contender": name, "op": CONTROL if name == CONTROL else "gil", "direction": direction, "path": str(path),
            "point": self.raw["points"].get(direction, {}).get(searched, Point().to_json()), "engine": "io_uring",
            "num_bytes": self.args.size, "num_windows": self.args.windows, "window_s": self.args.window,
        }  # fmt: skip

    def run_gil(self) -> None:
        """The GIL section: all directions of all contenders in shuffled order, a process each."""
        self.prepare("read", self.args.size)
        names = [n for n, c in self.contenders.items() if c.asynchronous]
        names += [CONTROL] if "fio-uring" in self.contenders else []
        for number in range(self.args.gil_rounds):
            self.raw["gil"].append({})
            todo = [(name, direction) for name in names for direction in ("write", "read")]
            self.random.shuffle(todo)
            for batch in [todo] if self.args.quick else [[one] for one in todo]:
                self.say(f"gil: round {number + 1}/{self.args.gil_rounds}, {' '.join(batch[0])}")
                tasks = [self.gil_task(name, direction, self.folder / "read") for name, direction in batch]
                try:
                    figures = run_tasks(tasks, 120.0 + 60 * len(tasks))
                except ContenderError as error:
                    figures = [{"error": str(error)}] * len(tasks)
                keys = [f"{name} {direction}" for name, direction in batch]
                self.keep(self.raw["gil"][-1], [(f"gil {key}", key) for key in keys], figures)
        self.clean()

    def run(self) -> dict[str, Any]:
        """All sections that were asked for."""
        started = time.monotonic()
        self.probe()
        ops = [section for section in self.args.sections if section != "gil"]
        if self.args.quick and ops:
            self.run_quick(ops)
        else:
            for op in ops:
                self.run_op(op)
        if "gil" in self.args.sections:
            self.run_gil()
        self.save()
        print(f"\r{'':<70}\r{time.monotonic() - started:.0f} s", file=sys.stderr)
        return self.raw


def size(text: str) -> int:
    """``256K``, ``64M``, ``1G`` or plain bytes; powers of 1024."""
    units = {"K": 10, "M": 20, "G": 30}
    number, shift = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 0)
    try:
        return int(number) << shift
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 256K, 64M, 1G or 4096") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = contenders()
    p = argparse.ArgumentParser(prog="python -m benchmarks.io", description=__doc__)
    p.add_argument("--quick", action="store_true", help="small, one round, no search: does it run, not what is it")
    p.add_argument("--rounds", type=int, help="default 5, 1 with --quick")
    p.add_argument("--size", type=size, help="bytes of a transfer, e.g. 2G; default 1G, 128M with --quick")
    p.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    p.add_argument("--contenders", nargs="+", choices=list(known), help="default all: " + " ".join(known))
    p.add_argument(
        "--directory", type=Path, default=ROOT / "runs",
        help="where the data files go, on the device to measure; never a filesystem in memory (default: runs/)",
    )  # fmt: skip
    p.add_argument("--block-sizes", nargs="+", type=size, help="searched; default 256K 1M 4M")
    p.add_argument("--depths", nargs="+", type=int, help="queue depths, searched; default 8 32")
    p.add_argument("--threads", nargs="+", type=int, help="zoo's and DeepSpeed's, searched; default 1 2")
    p.add_argument("--grid-size", type=size, default=512 << 20, help="bytes of a transfer of the search (512M)")
    p.add_argument("--grid-passes", type=int, default=2, help="times each setting is tried (2)")
    p.add_argument("--gil-rounds", type=int, help="processes a contender in the GIL section; default 3, 1 quick")
    p.add_argument("--windows", type=int, help="pairs of windows of each; default 5, 2 quick")
    p.add_argument("--window", type=float, help="seconds of a window; default 1, 0.3 quick")
    p.add_argument("--seed", type=int, default=0, help="of the order of contenders")
    p.add_argument("--raw", type=Path, default=DEFAULT_RAW, help="where the raw figures go, as JSON")
    p.add_argument("--report-only", action="store_true", help="measure nothing, report what --raw holds")
    p.add_argument("--write-results", action="store_true", help="write RESULTS.md (its remarks are kept)")
    return p


def main() -> None:
    """The command line."""
    p = parser()
    args = p.parse_args()
    hidden = {str(args.directory), str(args.raw)}  # the page names no folder of the machine
    args.shown = ["…" if word in hidden else word for word in sys.argv[1:]]
    defaults = {
        "rounds": (5, 1), "size": (1 << 30, 128 << 20), "block_sizes": ([256 << 10, 1 << 20, 4 << 20], [1 << 20]),
        "depths": ([8, 32], [8]), "threads": ([1, 2], [1]), "gil_rounds": (3, 1), "windows": (5, 2),
        "window": (1.0, 0.3),
    }  # fmt: skip
    for name, (full, quick) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    if args.size <= 0 or args.size % files.SPARE:
        p.error(f"--size {args.size}: whole MiB are needed, so that every contender can take the direct path")
    if args.report_only:
        raw = json.loads(args.raw.read_text())
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the data files go then too
        try:
            with files.data_folder(args.directory, (4 if args.quick else 2) * args.size + (256 << 20)) as folder:
                raw = Run(args, folder).run()
        except files.DirectoryError as error:
            p.error(str(error))
    print(console(raw))
    if args.write_results:
        print(f"written: {write_page(raw).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
