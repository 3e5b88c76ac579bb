"""A whole search: from a configuration, or from the journal of one that was interrupted, to its report."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from zoo.config import read
from zoo.config.document import Document
from zoo.registry import DEFAULT, Registry
from zoo.train.config import read_document
from zoo.train.tasks import with_task
from zoo.tuning import report
from zoo.tuning.config import AutotuningConfig
from zoo.tuning.journal import NAME, Journal, JournalError, put_aside
from zoo.tuning.journal import read as read_journal
from zoo.tuning.limits import device_named, memory_limit
from zoo.tuning.needs import Needs, job_of
from zoo.tuning.outcome import Runner
from zoo.tuning.running import Measuring, Processes
from zoo.tuning.search import Budget, Found, Search
from zoo.tuning.space import candidates

__all__ = ["NothingRanError", "resume", "tune"]

VERSION = 1
Say = Callable[[str], None]


class NothingRanError(ValueError):
    """No candidate could run, or every trial failed."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the journal's first line says, so that a search can go on."""

    values: Mapping[str, Any]
    ranks: int
    device: str
    task: str | None
    limit_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION, "values": dict(self.values), "ranks": self.ranks, "device": self.device,
            "task": self.task, "limit_bytes": self.limit_bytes,
        }  # fmt: skip

    @classmethod
    def of(cls, event: Mapping[str, Any], path: Path) -> _Asked:
        """What :meth:`to_dict` gave, as the journal at ``path`` has it."""
        kinds = {"values": dict, "ranks": int, "device": str, "task": str | None, "limit_bytes": int | None}
        for name, kind in kinds.items():
            if name not in event or not isinstance(event[name], kind):
                raise JournalError(f"line 1 of {str(path)!r} has {name}={event.get(name)!r}; the file was changed.")
        return cls(**{name: event[name] for name in kinds})


def tune(
    source: str | Path | Mapping[str, Any], overrides: tuple[str, ...] = (), *, device: str | None = None,
    task: str | None = None, registry: Registry = DEFAULT, runner: Runner | None = None, say: Say = lambda text: None,
) -> Found:  # fmt: skip
    """Search as the section ``autotuning`` of a configuration says, and leave everything in its ``results_dir``.

    ``journal.jsonl``, ``report.json``, and where something was measured ``best.json``, a configuration that ``zoo
    train`` takes, and ``forecast.png``.

    Args:
        source: a file, or its values; with a section ``train``.
        device: "cpu" or "cuda"; None for what there is.
        task: of the user's own, ``module:function``.
        runner: what runs trials; processes of this machine by default.
        say: gets lines about what is done.

    Raises:
        NothingRanError: nothing was measured; what is known is written all the same.
        ValueError: what the user can fix.
        KeyboardInterrupt: the user's, or SIGTERM; :func:`resume` goes on.
    """
    with with_task(task, registry) as more:
        document = read_document(source, (*overrides, *more), registry=registry)
        where = device_named(device)
        ranks = _section(document).ranks or where.count
        document.load(ranks)  # every mistake, before anything is written
        section = _section(document)
        limit = section.memory_bytes if section.memory_bytes is not None else memory_limit(where)
        asked = _Asked(values=document.values, ranks=ranks, device=where.kind, task=task, limit_bytes=limit)
        folder = Path(section.results_dir)
        if section.overwrite:
            put_aside(folder)
        with Journal(folder) as journal:
            journal.write("begin", **asked.to_dict())
            return _search(document, asked, journal, registry, runner, say)


def resume(
    folder: Path, *, registry: Registry = DEFAULT, runner: Runner | None = None, say: Say = lambda text: None
) -> Found:
    """Go on with a search: trials that have ended are not run again. See :func:`tune`.

    Raises:
        JournalError: there is no search in the folder.
    """
    events = read_journal(folder / NAME)
    if not events or events[0]["event"] != "begin" or events[0].get("version") != VERSION:
        raise JournalError(f"{str(folder / NAME)!r} does not begin as that of a search does; begin a new one.")
    asked = _Asked.of(events[0], folder / NAME)
    with with_task(asked.task, registry):
        document = read(asked.values, registry=registry).override({"autotuning.results_dir": str(folder)})
        with Journal(folder, resumes=True) as journal:
            return _search(document, asked, journal, registry, runner, say)


def _section(document: Document) -> AutotuningConfig:
    return AutotuningConfig.model_validate(document.values.get("autotuning") or {})


def _search(
    document: Document, asked: _Asked, journal: Journal, registry: Registry, runner: Runner | None, say: Say
) -> Found:
    section = _section(document)
    job, model, task = job_of(
        document, asked.ranks, device=asked.device, registry=registry, space=_space(section, document, asked.ranks),
        fast=section.fast, num_micro=section.num_tuning_micro_batch_sizes,
    )  # fmt: skip
    needs = Needs(document, job, model, task, registry)
    everyone = candidates(job)
    forecast = {candidate: needs.of(candidate) for candidate in everyone}
    folder = Path(section.results_dir)
    trials = Path(section.exps_dir) / folder.name
    processes = Processes(
        document=document, job=job, folder=trials, limit_bytes=asked.limit_bytes if asked.device == "cpu" else None,
        measuring=Measuring(first=section.start_profile_step, last=section.end_profile_step, least_s=section.least_s,
                            task=asked.task),
    )  # fmt: skip
    search = Search(
        job=job, needs=forecast, runner=runner or processes, journal=journal, limit_bytes=asked.limit_bytes, say=say,
        tuner=section.tuner_type, seed=int(document.values.get("seed") or 0),
        budget=Budget(trials=section.tuner_num_trials, minutes=section.minutes, timeout_s=section.timeout_s,
                      early_stopping=section.tuner_early_stopping),
    )  # fmt: skip
    _introduce(search, needs, asked, say)
    try:
        with _terminated_as_interrupted(), processes:
            search.run()
    finally:
        report.write(search.found, document, folder)
    say(report.table(search.found))
    say(f"stopped: {search.found.stopped}")
    if search.found.best is None:
        raise NothingRanError(
            f"nothing was measured: {search.found.stopped.rstrip('.')}. {_reasons(search.found)}What each trial said "
            f"is in {folder / NAME}, their logs are in {trials}."
        )
    say(f"the best configuration is in {folder / 'best.json'}; zoo train takes it")
    return search.found


def _introduce(search: Search, needs: Needs, asked: _Asked, say: Say) -> None:
    found = search.found
    memory = "no known limit" if asked.limit_bytes is None else f"{asked.limit_bytes:,} bytes"
    say(
        f"{len(found.needs)} candidates for {asked.ranks} rank{'s' if asked.ranks > 1 else ''} ({asked.device}, "
        f"{memory}); {len(found.rejected)} cannot run"
        + (f"; {len(found.trials)} trials are in the journal already" if found.trials else "")
    )
    for note in needs.notes:
        say(note)


def _reasons(found: Found) -> str:
    whys = dict.fromkeys([*(t.outcome.why for t in found.trials), *found.rejected.values()])
    more = [why for why in whys if why not in found.stopped]
    return f"Why: {'; '.join(more[:3])}. " if more else ""


def _space(section: AutotuningConfig, document: Document, ranks: int) -> dict[str, list[Any]]:
    """The section's, with micro-batches between its bounds."""
    space = dict(section.space)
    most, least = section.max_train_micro_batch_size_per_gpu, section.min_train_micro_batch_size_per_gpu
    if "micro" not in space and (most is not None or least > 1):
        batch = document.load(ranks).train_batch_size
        sizes = [n for n in range(least, (most or batch) + 1) if batch % n == 0]
        space["micro"] = sizes[-section.num_tuning_micro_batch_sizes :] if section.fast else sizes
    return space


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C is, so that trials are ended and the report is written."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def as_json(found: Found) -> str:
    """The report, as text."""
    return json.dumps(report.summary(found), indent=1)
