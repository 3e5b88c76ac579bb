"""Where a run writes: an existing one is refused, continued or numbered, never overwritten."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.comm import Communicator
from zoo.train.config import TrainConfig

MARKS = ("config.json", "log.jsonl", "result.json", "checkpoints")
"""What a directory has in which a run has written."""
FACTS = "run.json"


@dataclass(frozen=True)
class Output:
    """The directory of a run, and whether it goes on there."""

    path: Path
    resumes: bool


def is_run(path: Path) -> bool:
    """Whether a run has written there."""
    return any((path / mark).exists() for mark in MARKS)


def choose(section: TrainConfig, *, resume: bool, comm: Communicator) -> Output:
    """The same on all ranks; rank 0 looks, and makes the directory. A collective.

    A launch that torchrun has restarted goes on in the directory that it has made, if it came so far.

    Raises:
        ExistsError: there is a run, and it is to be refused; or the directory cannot be made.
    """
    found: tuple[str, bool] | str = ""
    if comm.rank == 0:
        try:
            output = _choose(Path(section.out), section.if_exists, resume=resume)
            found = str(output.path), output.resumes
        except (OSError, ValueError) as error:
            found = str(error)
    found = comm.broadcast_object(found)
    if isinstance(found, str):
        raise ExistsError(found)
    path, resumes = found
    return Output(Path(path), resumes)


class ExistsError(ValueError):
    """The directory cannot be written to, or has a run; said on all ranks."""

    everywhere = True


def _restarted() -> bool:
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return count.isdigit() and int(count) > 0


def _choose(path: Path, if_exists: str, *, resume: bool) -> Output:
    if path.exists() and not path.is_dir():
        raise ValueError(f"train.out = {str(path)!r} is a file; name a directory.")
    if _restarted():
        for mine in (path, *_numbers(path)):
            if mine.is_dir() and _launch_of(mine) == launch():
                return Output(mine, True)
    if not is_run(path):
        return Output(_made(path), resume)
    if resume or if_exists == "resume":
        return Output(path, True)
    if if_exists == "number":
        return Output(_made(next(p for p in _numbers(path) if not is_run(p))), False)
    raise ValueError(
        f'there is a run in {str(path)!r} already. Go on with it (--resume, or train.if_exists = "resume"), write '
        'beside it (train.if_exists = "number"), or choose another directory (--out).'
    )


def _numbers(path: Path) -> Iterator[Path]:
    """``<path>-2``, ``<path>-3``, … as far as there are some, and the first that is not there."""
    number = 2
    path = path if path.name not in ("", "..") else path.resolve()  # "." has no name to number
    while True:
        candidate = path.with_name(f"{path.name}-{number}")
        yield candidate
        if not candidate.exists():
            return
        number += 1


def _made(path: Path) -> Path:
    """The directory is there, and says which launch made it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / FACTS).write_text(json.dumps({"launch": launch()}) + "\n", encoding="utf-8")
    return path


def launch() -> str:
    """The same for a launch and its restarts by torchrun's agent or ``zoo launch``, another one for each launch."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # zoo launch makes a new name for each launch, and rank 0 may come to be beneath the agent of another host.
    return name if name.startswith("zoo-") else f"{name}/{os.getppid()}"


def facts_of(path: Path) -> dict[str, Any]:
    """What ``run.json`` says; {} where it cannot be read."""
    try:
        found = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _launch_of(path: Path) -> Any:
    return facts_of(path).get("launch")
