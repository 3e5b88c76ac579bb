"""The files of a run, read for its report. What is missing or cannot be read is told; nothing of it stops a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.report.reading import Log, read_log

__all__ = ["Run", "read_run"]

LOGS = ("log.jsonl", "records.jsonl")
"""What ``zoo train`` writes, and what the section ``jsonl_monitor`` of any engine does."""
LARGEST = 8 << 20
"""Bytes of any other file that is read."""
FILES = {
    "result": "result.json", "run": "run.json", "config": "config.json", "origins": "origins.json",
    "environment": "environment.json", "forecast": "forecast.json", "timeline": "timeline.json",
}  # fmt: skip


@dataclass
class Run:
    """What a run has left.

    Attributes:
        name: of its folder. log: None where there is none. log_name: of the file.
        files: by the keys of ``FILES`` what was read. problems: by the same keys why something was not.
    """

    name: str
    log: Log | None = None
    log_name: str = ""
    files: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def table(self, key: str) -> Mapping[str, Any]:
        """A file that is an object; empty where it is missing or something else."""
        found = self.files.get(key)
        return found if isinstance(found, dict) else {}

    def rows(self, key: str) -> list[Any]:
        """A file that is a list."""
        found = self.files.get(key)
        return found if isinstance(found, list) else []


def read_run(folder: Path, *, processes: int | None = None) -> Run:
    """What is in ``folder``.

    Raises:
        ValueError: it is no folder of a run.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        raise ValueError(f"{str(folder)!r} is {what}; name the directory of a run, such as runs/bytes (train.out).")
    found = Run(folder.resolve().name)
    for name in LOGS:
        if (folder / name).is_file():
            found.log, found.log_name = read_log(folder / name, processes=processes), name
            break
    for key, name in FILES.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size > LARGEST:
                found.problems[key] = f"{name} has {size:,} bytes, and {LARGEST:,} are read at most"
                continue
            found.files[key] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found.problems[key] = f"{name} is not there"
        except (OSError, ValueError, RecursionError) as error:
            found.problems[key] = f"{name} cannot be read ({type(error).__name__})"
    if found.log is None and not found.files:
        raise ValueError(
            f"there is no run in {str(folder)!r}: neither {' nor '.join(LOGS)}. Name the directory that a run writes "
            "into (train.out, or output_path/job_name of jsonl_monitor)."
        )
    return found
