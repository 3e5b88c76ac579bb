"""A log of any length, read in one pass with bounded memory: a line of JSON a step."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from zoo.report.series import Buckets, Numbers

__all__ = ["Log", "read_log"]

BUCKETS = 1200
"""Most points of a curve: as many as a wide screen has pixels for it."""
CHUNK = 1 << 20
LONGEST_LINE = 1 << 20
RANKS = 8
"""Memory is drawn of so many ranks."""
SERIES = 40
"""More names than this are left out: a file may have any."""
PER_PROCESS = 32 << 20
"""Longer files are read by several processes."""

_NOT_NUMBERS = ("step", "skipped", "stop", "total_samples", "total_tokens")
_OF_RANKS = ("rss_bytes", "state_bytes")


@dataclass
class Log:
    """What a log says.

    Attributes:
        buckets: of each number.
        skipped_steps: whose gradient was not finite. broken: lines that are no records. cut: the last line was not
        complete. names_left_out: series beyond those that are kept.
    """

    buckets: Buckets
    skipped_steps: int = 0
    broken: int = 0
    cut: bool = False
    names_left_out: int = 0

    def merge(self, later: Log) -> None:
        """What comes after it in the file."""
        self.buckets.merge(later.buckets)
        self.skipped_steps += later.skipped_steps
        self.broken += later.broken
        self.names_left_out = max(self.names_left_out, later.names_left_out)
        # A line that is cut ends the file: the parts behind it have no line of their own.
        self.cut = self.cut or later.cut


def read_log(path: Path, *, processes: int | None = None) -> Log:
    """All of a file; with several processes where it is long.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    width = -(-_last_step(path, size) // BUCKETS)
    if processes is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = max(1, min(cores, 8, size // PER_PROCESS))
    if processes == 1:
        return read_part(path, 0, size, width)
    edges = [size * i // processes for i in range(processes + 1)]
    others = [_started(path, edges[i], edges[i + 1], width) for i in range(1, processes)]
    try:
        found = read_part(path, edges[0], edges[1], width)
        for i, other in enumerate(others, start=1):
            out, _ = other.communicate()
            # A process that did not come to its end is no reason to have no report.
            whole = other.returncode == 0
            found.merge(_from_text(out) if whole else read_part(path, edges[i], edges[i + 1], width))
    finally:
        for other in others:
            other.kill()
            other.wait()
    return found


def _started(path: Path, begin: int, end: int, width: int) -> subprocess.Popen[str]:
    program = "import sys; sys.path[:] = sys.argv[5:]; from zoo.report.reading import main; main(sys.argv[1:5])"
    words = [sys.executable, "-c", program, str(path), str(begin), str(end), str(width), *sys.path]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def main(words: Sequence[str]) -> None:
    """A part of a file, for :func:`read_log` in another process."""
    path, begin, end, width = words
    found = read_part(Path(path), int(begin), int(end), int(width))
    json.dump({**asdict(found), "buckets": found.buckets.to_dict()}, sys.stdout, default=lambda _: None)


def _from_text(text: str) -> Log:
    given = json.loads(text)
    return Log(**{**given, "buckets": Buckets.from_dict(given["buckets"])})


def _last_step(path: Path, size: int) -> int:
    """Of the last line that is whole; a guess, by which the width of buckets begins."""
    with open(path, "rb") as file:
        file.seek(max(0, size - (64 << 10)))
        lines = file.read().split(b"\n")[-2::-1]
    for line in lines:
        record = _record(line)
        if record is not None:
            return int(record["step"])
    return 1


def read_part(path: Path, begin: int, end: int, width: int) -> Log:
    """The lines that begin at bytes ``begin`` ≤ b < ``end``."""
    log = Log(Buckets(BUCKETS, width))
    with open(path, "rb") as file, _without_collector():
        if begin:
            file.seek(begin - 1)
            _skip_line(file)
        for body, is_whole in _pieces(file, end):
            if not is_whole:
                log.cut = bool(body.strip()) and _record(body) is None
                if log.cut:
                    break
            rows = _rows(body, log)
            if rows:
                _take(log, rows)
    return log


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Records are in no cycles, and to look for some takes a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _pieces(file: Any, end: int) -> Iterator[tuple[bytes, bool]]:
    """Whole lines that begin before ``end``, about a megabyte at a time; then what follows the last line's end."""
    rest = b""
    at = file.tell()
    while at < end or rest:
        chunk = file.read(CHUNK)
        if not chunk:
            yield rest, False
            return
        block = rest + chunk
        begins = at - len(rest)
        at += len(chunk)
        if at >= end:  # the last line that begins before the end may go on behind it
            stop = block.find(b"\n", max(0, end - begins - 1))
            if stop >= 0:
                yield block[: stop + 1] if end > begins else b"", True
                return
        cut = block.rfind(b"\n")
        rest = block[cut + 1 :]
        if cut >= 0:
            yield block[: cut + 1], True
        if len(rest) > LONGEST_LINE:  # no record is as long
            yield b"-\n", True
            at += _skip_line(file)
            rest = b""


def _skip_line(file: Any) -> int:
    """Go behind the next end of a line; how many bytes that was."""
    count = 0
    while True:
        piece = file.readline(CHUNK)
        count += len(piece)
        if not piece or piece.endswith(b"\n"):
            return count


_OF_NO_STEP = b'{"step": null,'
"""How ``jsonl_monitor`` begins a line of events that a program gave for an x of its own (``engine.monitor``)."""


def _rows(body: bytes, log: Log) -> list[dict[str, Any]]:
    """The records among these lines. All at once where all of them are, else line by line."""
    try:
        rows: Any = from_json(b"[" + body.rstrip(b"\n").replace(b"\n", b",") + b"]", cache_strings="keys")
        steps = list(map(itemgetter("step"), rows))
        if set(map(type, steps)) == {int} and min(steps) > 0 and max(steps) < 2**53:
            return rows  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        pass
    found = []
    for line in body.split(b"\n"):
        if line.strip() and not line.startswith(_OF_NO_STEP):
            record = _record(line)
            if record is None:
                log.broken += 1
            else:
                found.append(record)
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = from_json(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(step := record.get("step")) is not int or not 0 < step < 2**53:
        return None
    return record


def _take(log: Log, rows: list[dict[str, Any]]) -> None:
    """The numbers of some records go into buckets."""
    steps = np.fromiter(map(itemgetter("step"), rows), np.int64, len(rows))
    columns: dict[str, Numbers] = {}
    kinds = sorted(set(map(tuple, rows)), key=len)  # of keys: there are few
    common = set(kinds[0]).intersection(*kinds[1:])
    # Most records have the shortest kind alone, and names that are not common are in the others.
    sparse = len(kinds[0]) == len(common)
    others = [i for i, row in enumerate(rows) if len(row) > len(common)] if sparse else range(len(rows))
    for name in dict.fromkeys(name for keys in kinds for name in keys):
        if name in _NOT_NUMBERS:
            continue
        at = None if name in common else [i for i in others if name in rows[i]]
        here = rows if at is None else [rows[i] for i in at]
        found = _of_ranks(name, here) if name in _OF_RANKS else {name: _column(name, here)}
        known = len(log.buckets.series) + len(columns)
        for key, values in found.items():
            if key not in log.buckets.series and known >= SERIES:
                log.names_left_out += 1
                continue
            columns[key] = values if at is None else _spread(values, at, len(rows))
    if "tokens_per_s" not in columns and {"tokens", "step_s"} <= columns.keys():  # a record of an engine
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["tokens_per_s"] = columns["tokens"] / columns["step_s"]
    log.skipped_steps += [row.get("skipped") for row in rows].count(True)
    log.buckets.add(steps, columns)


def _column(name: str, rows: Sequence[Mapping[str, Any]]) -> Numbers:
    try:
        return np.fromiter(map(itemgetter(name), rows), np.float64, len(rows))
    except (KeyError, TypeError, ValueError, OverflowError):
        return np.fromiter((_number(row.get(name)) for row in rows), np.float64, len(rows))


def _spread(values: Numbers, at: Sequence[int], count: int) -> Numbers:
    found = np.full(count, np.nan)
    found[at] = values
    return found


def _of_ranks(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """One column a rank, "rss_bytes.0"."""
    values = [found if isinstance(found := row[name], list) else [] for row in rows]
    ranks = min(RANKS, max(map(len, values)))
    return {
        f"{name}.{rank}": np.array([_number(v[rank]) if rank < len(v) else np.nan for v in values])
        for rank in range(ranks)
    }


def _number(value: Any) -> float:
    """NaN where it is none. A record of ``jsonl_monitor`` has "NaN" and "Infinity" as texts, and a list of learning
    rates, one a group: the first is taken."""
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return float("nan")
    try:
        return float(value) if not isinstance(value, str) or len(value) < 10 else float("nan")
    except (ValueError, OverflowError):
        return float("nan")
