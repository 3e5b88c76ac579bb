"""The section ``csv_monitor``: one CSV file for each event."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import OrderedDict

from zoo.monitor.events import events, scales_loss
from zoo.monitor.places import AppendedFile, open_folder, tell_if_shared
from zoo.monitor.section import FolderSection
from zoo.parts import Environment, StepRecord

__all__ = ["CsvMonitor", "CsvSection"]

OPEN_FILES = 64
"""Files that are held open; with more events the least recently written one is closed and opened again later."""
LONGEST = 120
"""Characters of a file's name before its ending; file systems take 255 bytes."""


class CsvSection(FolderSection):
    """A CSV file for each event, with one line a step, in ``<output_path>/<job_name>``."""


class CsvMonitor:
    """Appends a line to the file of each event: samples so far, value.

    The file of ``Train/Samples/lr`` is ``Train_Samples_lr.csv`` and begins with the line ``step,lr``, as DeepSpeed's
    do, whose column ``step`` counts samples. Numbers are written so that reading them gives the same float64; those
    that are not finite are ``nan``, ``inf`` and ``-inf``.

    A resumed run appends. The last of several lines with one number of samples is the one that counts.
    """

    def __init__(self, section: CsvSection, environment: Environment) -> None:
        self.folder = open_folder("csv_monitor", section, environment)
        self._scaled = scales_loss(environment.config)
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()
        self._told = False
        self._files: OrderedDict[str, AppendedFile] = OrderedDict()

    def write(self, record: StepRecord) -> None:
        """Append a line to each file."""
        for name, value in events(record, scaled=self._scaled).items():
            self._file(name).write(f"{record.total_samples},{value!r}\n".encode())

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, event: str) -> AppendedFile:
        file = self._files.get(event)
        if file is not None:
            self._files.move_to_end(event)
            return file
        if len(self._files) >= OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        header = _row("step", re.sub(r"[\r\n]", " ", event.rpartition("/")[2]))
        file = AppendedFile(self.folder / self._file_name(event), header)
        self._files[event] = file
        self._told = self._told or tell_if_shared("csv_monitor", file)
        if file.is_new:
            file.write(header + b"\n")
        return file

    def _file_name(self, event: str) -> str:
        """Two events never share a file, also where capitals and small letters are the same to the file system."""
        if event not in self._names:
            name = re.sub(r"[^\w.=+@-]", "_", event)
            name = f"_{name[1:]}" if name.startswith(".") else name
            cut = name.encode()[:LONGEST].decode(errors="ignore")
            apart = f"{cut}-{hashlib.sha256(event.encode()).hexdigest()[:12]}"
            taken = not name or len(name.encode()) > LONGEST or name.casefold() in self._taken
            if taken or (self.folder / f"{apart}.csv").exists():  # that of a run before, in which names came otherwise
                name = apart
            self._taken.add(name.casefold())
            self._names[event] = f"{name}.csv"
        return self._names[event]


def _row(*cells: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue().encode()
