"""The section ``jsonl_monitor``: a step's whole record as one line of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from zoo.monitor.places import AppendedFile, open_folder, tell_if_shared
from zoo.monitor.section import FolderSection
from zoo.parts import Environment, StepRecord

__all__ = ["JsonlMonitor", "JsonlSection"]


class JsonlSection(FolderSection):
    """Everything that is known of a step, one JSON object a line, in ``<output_path>/<job_name>/records.jsonl``."""


class JsonlMonitor:
    """Appends ``record.to_dict()`` to ``records.jsonl``.

    JSON has no word for a number that is not finite: such a one is the string "NaN", "Infinity" or "-Infinity", as in
    the JSON mapping of protocol buffers; Python's ``float()`` and JavaScript's ``Number()`` read them.

    A resumed run appends. The last of several lines of one step is the one that counts.
    """

    def __init__(self, section: JsonlSection, environment: Environment) -> None:
        self.path = open_folder("jsonl_monitor", section, environment) / "records.jsonl"
        self._file = AppendedFile(self.path, b'{"step": ')
        tell_if_shared("jsonl_monitor", self._file)

    def write(self, record: StepRecord) -> None:
        """Append a line."""
        line = json.dumps({key: _plain(value) for key, value in record.to_dict().items()}, allow_nan=False)
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
