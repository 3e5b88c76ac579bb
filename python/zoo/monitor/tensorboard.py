"""The section ``tensorboard``: event files for TensorBoard."""

from __future__ import annotations

import io
import itertools
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from zoo.monitor.events import events, scales_loss
from zoo.monitor.places import AppendedFile, open_folder, package
from zoo.monitor.section import FolderSection
from zoo.parts import Environment, StepRecord

__all__ = ["TensorBoardMonitor", "TensorBoardSection"]


class TensorBoardSection(FolderSection):
    """Event files in ``<output_path>/<job_name>``, which ``tensorboard --logdir <output_path>`` shows. Needs the
    package tensorboard."""


class TensorBoardMonitor:
    """Writes each step's events as scalars of one event, at the step ``record.total_samples``.

    Messages and framing are those of the package tensorboard; neither tensorflow nor torch is imported. TensorBoard's
    scalars are float32.

    A resumed run writes a further file into the folder, which begins by saying from which step on what older files have
    is void (a session's start, which TensorBoard carries out); where training goes back to a checkpoint, the same file
    says so. A killed process loses at most the step that is being
    written.
    """

    def __init__(self, section: TensorBoardSection, environment: Environment) -> None:
        self._messages = package("tensorboard.compat.proto.event_pb2", "tensorboard", "tensorboard")
        self._summaries = package("tensorboard.compat.proto.summary_pb2", "tensorboard", "tensorboard")
        framing = package("tensorboard.summary.writer.record_writer", "tensorboard", "tensorboard")
        self._scaled = scales_loss(environment.config)
        folder = open_folder("tensorboard", section, environment)
        names = (re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.iterdir())
        older = [int(name[1]) for name in names if name]
        self._continues = bool(older)
        self._latest = 0
        self.path = _new_path(folder, max([int(time.time()), *(second + 1 for second in older)]))
        self._file = AppendedFile(self.path)
        self._frame = framing.RecordWriter
        self._append(file_version="brain.Event:2")

    def write(self, record: StepRecord) -> None:
        """Append a step."""
        of_a_step: bool = record.step is not None  # a program's own events are of none, and their x is the program's
        if of_a_step and (self._continues or record.total_samples < self._latest):
            self._continues = False
            start = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._append(step=record.total_samples, session_log=start)
        if of_a_step:
            self._latest = record.total_samples
        scalars = events(record, scaled=self._scaled)
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in scalars.items()]
        self._append(step=record.total_samples, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        framed = io.BytesIO()
        self._frame(framed).write(self._messages.Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.write(framed.getvalue())


def _new_path(folder: Path, second: int) -> Path:
    """TensorBoard reads the files of a folder in the order of their names, so the newest has the latest second."""
    host = socket.gethostname()
    for number in itertools.count():
        path = folder / f"events.out.tfevents.{second:010d}.{host}.{os.getpid()}.{number}"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")
