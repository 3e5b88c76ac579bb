"""What a run records: one JSON line and one CSV line a step."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from pathlib import Path
from typing import IO, Any

COLUMNS = (
    "step", "loss", "validation_loss", "lr", "grad_norm", "skipped", "tokens_per_s", "elapsed_s", "step_s",
    "wire_bytes", "rss_bytes", "state_bytes",
)  # fmt: skip


class History:
    """The records of a run, in memory and on disk; a rank other than 0 keeps them in memory only.

    ``rss_bytes`` and ``state_bytes`` are lists with one entry a rank in JSON, their maximum in CSV.

    Args:
        directory: where ``log.jsonl`` and ``log.csv`` are written; None to write nothing.
        resume_from: keep the records that are there up to this step and go on after them; None to begin anew.
    """

    def __init__(self, directory: Path | None, resume_from: int | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self._files: list[IO[str]] = []
        if directory is None:
            return
        path = directory / "log.jsonl"
        if resume_from is not None and path.is_file():
            self.records = [r for r in read_lines(path) if r["step"] <= resume_from]
        # Beside the old ones first: whatever ends this in the middle, no line is lost.
        self._json = open(directory / "log.jsonl.new", "w", encoding="utf-8")  # noqa: SIM115  (closed by close)
        self._csv = open(directory / "log.csv.new", "w", encoding="utf-8", newline="")  # noqa: SIM115
        self._files = [self._json, self._csv]
        self._table = csv.DictWriter(self._csv, COLUMNS, extrasaction="ignore")
        self._table.writeheader()
        for record in self.records:
            self._write(record)
        for name in ("log.jsonl", "log.csv"):
            os.replace(directory / f"{name}.new", directory / name)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record and write it."""
        self.records.append(record)
        if self._files:
            self._write(record)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of the records that have ``key``."""
        found = [(int(r["step"]), float(r[key])) for r in self.records if r.get(key) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
        self._files = []

    def _write(self, record: dict[str, Any]) -> None:
        self._json.write(json.dumps(record) + "\n")
        self._table.writerow({k: max(v) if isinstance(v, list) else v for k, v in record.items()})
        for file in self._files:
            file.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a ``log.jsonl``; what is none is left out."""
    # A crash may have cut the last line, a full disk one in the middle; what follows a checkpoint is written again.
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append(record)
    return records
