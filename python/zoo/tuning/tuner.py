"""A whole search: from a configuration, or from the journal of one that was interrupted, to its report."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from zoo.config import read, read_section
from zoo.config.document import Document
from zoo.pipe.config import ScheduleChoice
from zoo.registry import DEFAULT, Registry
from zoo.train.config import read_document
from zoo.train.tasks import with_task
from zoo.tuning import report
from zoo.tuning.config import AutotuningConfig
from zoo.tuning.journal import NAME, Journal, JournalError, put_aside, refuse_begun
from zoo.tuning.journal import read as read_journal
from zoo.tuning.limits import device_named, memory_limit
from zoo.tuning.needs import Need, Needs, job_of
from zoo.tuning.outcome import Runner
from zoo.tuning.running import Measuring, Processes
from zoo.tuning.search import Budget, Found, Search
from zoo.tuning.space import Candidate, Job, SpaceError, candidates

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
        registry: what the configuration names; with one of your own, give a runner too: trials are processes, which
            have :data:`zoo.registry.DEFAULT`.
        runner: what runs trials; processes of this machine by default.
        say: gets lines about what is done.

    Raises:
        NothingRanError: nothing was measured; what is known is written all the same.
        ValueError: what the user can fix; before anything is written.
        JournalError: there is a search in the folder, or it cannot be written to.
        KeyboardInterrupt: the user's, or SIGTERM; :func:`resume` goes on.
    """
    _refuse_registry(registry, runner)
    with with_task(task, registry) as more:
        document = read_document(source, (*overrides, *more), registry=registry)
        where = device_named(device)
        ranks = _section(document).ranks or where.count
        document.load(ranks)
        section = _section(document)
        limit = section.memory_bytes if section.memory_bytes is not None else memory_limit(where)
        asked = _Asked(values=document.values, ranks=ranks, device=where.kind, task=task, limit_bytes=limit)
        folder = Path(section.results_dir)
        if not section.overwrite:
            refuse_begun(folder)
        job, needs, forecast = _prepared(document, asked, registry)  # every mistake, before anything is written
        if runner is None:
            _make_trials_folder(section)
        if section.overwrite:
            put_aside(folder)
        with Journal(folder) as journal:
            journal.write("begin", **asked.to_dict())
            return _search(document, asked, journal, job, needs, forecast, runner, say)


def resume(
    folder: Path, *, registry: Registry = DEFAULT, runner: Runner | None = None, say: Say = lambda text: None
) -> Found:
    """Go on with a search: trials that have ended are not run again. See :func:`tune`.

    Raises:
        JournalError: there is no search in the folder.
    """
    _refuse_registry(registry, runner)
    events = read_journal(folder / NAME)
    if not events or events[0]["event"] != "begin" or events[0].get("version") != VERSION:
        raise JournalError(f"{str(folder / NAME)!r} does not begin as that of a search does; begin a new one.")
    asked = _Asked.of(events[0], folder / NAME)
    with with_task(asked.task, registry):
        document = read(asked.values, registry=registry).override({"autotuning.results_dir": str(folder)})
        job, needs, forecast = _prepared(document, asked, registry)
        with Journal(folder, resumes=True) as journal:
            return _search(document, asked, journal, job, needs, forecast, runner, say)


def _section(document: Document) -> AutotuningConfig:
    found: AutotuningConfig = read_section(
        "autotuning", document.values, where=document.where, registry=document.tree.registry
    )  # fmt: skip
    return found


def _refuse_registry(registry: Registry, runner: Runner | None) -> None:
    if runner is None and registry is not DEFAULT:
        raise ValueError(
            "trials are processes of their own, which have zoo.registry.DEFAULT and not the registry that is given. "
            'Name a task of your own (task="module:function"), make what you register an entry point, or give a runner.'
        )


def _prepared(document: Document, asked: _Asked, registry: Registry) -> tuple[Job, Needs, dict[Candidate, Need]]:
    """The job, and what each of its candidates needs. Writes nothing.

    Raises:
        SpaceError: autotuning.space has what cannot be.
        NothingRanError: the configuration of every candidate is refused.
        ValueError: the configuration cannot be trained.
    """
    section = _section(document)
    job, model, task = job_of(
        document, asked.ranks, device=asked.device, registry=registry, space=section.space, fast=section.fast,
        num_micro=section.num_tuning_micro_batch_sizes, least_micro=section.min_train_micro_batch_size_per_gpu,
        most_micro=section.max_train_micro_batch_size_per_gpu,
    )  # fmt: skip
    needs = Needs(document, job, model, task, registry)
    everyone = candidates(job)
    for name in section.space.get("schedule", ()):
        if name:
            registry.entry(ScheduleChoice.kind, name)
    forecast = {candidate: needs.of(candidate) for candidate in everyone}
    _refuse_what_cannot_be(forecast)
    return job, needs, forecast


def _refuse_what_cannot_be(forecast: Mapping[Candidate, Need]) -> None:
    if all(need.refused for need in forecast.values()):
        whys = list(dict.fromkeys(need.refused for need in forecast.values()))
        raise NothingRanError(f"no candidate can run. Why: {'; '.join(whys[:3])}.")
    for path, value in dict.fromkeys(pair for candidate in forecast for pair in candidate.extra):
        having = [need.refused for candidate, need in forecast.items() if (path, value) in candidate.extra]
        if all(having):
            raise SpaceError(f"autotuning.space has {value} for {path}, with which no candidate can run: {having[0]}.")


def _search(
    document: Document, asked: _Asked, journal: Journal, job: Job, needs: Needs, forecast: Mapping[Candidate, Need],
    runner: Runner | None, say: Say,
) -> Found:  # fmt: skip
    section = _section(document)
    folder = Path(section.results_dir)
    trials = _trials_folder(section)
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
        _report(search.found, document, folder)
    say(report.table(search.found))
    say(f"stopped: {search.found.stopped}")
    if search.found.best is None:
        raise NothingRanError(
            f"nothing was measured: {search.found.stopped.rstrip('.')}. {_reasons(search.found)}What each trial said "
            f"is in {folder / NAME}, their logs are in {trials}."
        )
    say(f"the best configuration is in {folder / 'best.json'}; zoo train takes it")
    return search.found


def _trials_folder(section: AutotuningConfig) -> Path:
    """Of one search alone: two whose results folders have the same last name do not share it."""
    results = Path(section.results_dir).resolve()
    return Path(section.exps_dir) / f"{results.name}-{hashlib.sha256(os.fsencode(results)).hexdigest()[:8]}"


def _make_trials_folder(section: AutotuningConfig) -> None:
    """Raise JournalError where trials could not write: a search that has begun would have failed trials alone."""
    folder = _trials_folder(section)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refused = "" if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        refused = error.strerror or str(error)
    if refused:
        raise JournalError(
            f"autotuning.exps_dir = {section.exps_dir!r} cannot be written to: {refused}; choose another one."
        )


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


def _report(found: Found, document: Document, folder: Path) -> None:
    try:
        report.write(found, document, folder)
    except OSError as error:
        raise JournalError(
            f"the report in {str(folder)!r} cannot be written: {error.strerror}; make room, and go on with --resume "
            f"{folder}."
        ) from error


def _reasons(found: Found) -> str:
    whys = dict.fromkeys([*(t.outcome.why for t in found.trials), *found.rejected.values()])
    more = [why for why in whys if why not in found.stopped]
    return f"Why: {'; '.join(more[:3])}. " if more else ""


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
