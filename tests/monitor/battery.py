"""Every sink, in one line each: what all of them must do is in test_battery.py."""

from __future__ import annotations

import csv
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zoo.monitor import events
from zoo.parts import StepRecord

Row = tuple[str, int, float]
"""Name, x, value."""


@dataclass(frozen=True)
class Entry:
    read: Callable[[Path], list[Row]]  # with the ecosystem's own reader: all rows in a folder, each name's in order
    rows: Callable[[StepRecord], list[Row]]  # what a record comes to
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""  # the package it is made for
    costly: bool = False  # starts processes
    appends: bool = True  # a second run in the same place continues the first
    streams: bool = True  # what was written is there when the process is killed; else its package holds some back


def events_of(record: StepRecord) -> list[Row]:
    return [(name, record.total_samples, value) for name, value in events(record).items()]


def in_float32(record: StepRecord) -> list[Row]:
    with np.errstate(over="ignore"):
        return [(name, x, float(np.float32(value))) for name, x, value in events_of(record)]


def fields_of(record: StepRecord) -> list[Row]:
    return [(name, record.step, value) for name, value in record.to_dict().items()]


def read_tensorboard(folder: Path) -> list[Row]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(tag, item.step, item.value) for tag in found.Tags()["scalars"] for item in found.Scalars(tag)]


def read_csv(folder: Path) -> list[Row]:
    """The rows of all files; a file's name stands for its event's, see ``file_names``."""
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with open(path, newline="", encoding="utf-8") as file:
            header, *lines = csv.reader(file)
        assert header[0] == "step"
        rows += [(f"{path.stem}:{header[1]}", int(x), float(value)) for x, value in lines]
    return rows


def file_of(record: StepRecord) -> list[Row]:
    """As ``events_of``, but with the names that ``read_csv`` gives to harmless events."""
    harmless = str.maketrans("/ ", "__")
    return [(f"{name.translate(harmless)}:{name.rpartition('/')[2]}", x, v) for name, x, v in events_of(record)]


def read_jsonl(folder: Path) -> list[Row]:
    def no_constants(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else value

    lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line, parse_constant=no_constants) for line in lines]
    return [(name, line["step"], plain(value)) for line in found for name, value in line.items()]


def printed(call: Callable[[], object]) -> str:
    """What a command's function prints, and the processes that it starts."""
    code: str | int | None = 0
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            call()
        except SystemExit as end:
            code = end.code
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        text = file.read()
    assert not code, f"the command ended with {code}, and printed: {text[-2000:]}"
    return text


def read_wandb(folder: Path) -> list[Row]:
    from wandb.cli.leet import leet  # `wandb leet`, without a new interpreter, which would take most of the time

    rows: list[Row] = []
    for path in sorted(folder.glob("wandb/offline-run-*")):
        text = printed(lambda path=path: leet.main(["inspect", "--json", str(path)]))
        for line in map(json.loads, text.splitlines()):
            if line["type"] == "history":
                item = line["history"]["item"]
                rows += [(k, item["_step"], float(v)) for k, v in item.items() if not k.startswith("_")]
    return rows


def read_comet(folder: Path) -> list[Row]:
    rows = []
    for path in sorted(folder.glob("comet/*.zip")):
        lines = zipfile.ZipFile(path).read("messages.json").decode().splitlines()
        found = [line["payload"]["metric"] for line in map(json.loads, lines) if line["type"] == "metric_msg"]
        ours = [metric for metric in found if "/" in metric["metricName"]]  # not those of the machine
        rows += [(metric["metricName"], metric["step"], float(metric["metricValue"])) for metric in ours]
    return rows


OFFLINE = {"samples_log_interval": 1, "online": False}
BATTERY = {
    "tensorboard": Entry(read_tensorboard, in_float32, needs="tensorboard"),
    "csv_monitor": Entry(read_csv, file_of),
    "jsonl_monitor": Entry(read_jsonl, fields_of),
    "wandb": Entry(read_wandb, events_of, needs="wandb", costly=True, streams=False),
    "comet": Entry(read_comet, events_of, OFFLINE, "comet_ml", costly=True, streams=False),
}
