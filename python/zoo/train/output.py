"""Where a run writes: an existing one is refused, continued or numbered, never overwritten."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zoo.comm import Communicator
from zoo.train.config import TrainConfig

MARKS = ("config.json", "log.jsonl", "result.json", "checkpoints")
"""What a directory has in which a run has written."""


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

    A launch that torchrun has restarted goes on where it wrote before: in the newest of the numbered directories that
    it may have made.

    Raises:
        ExistsError: there is a run, and it is to be refused; or the directory cannot be made.
    """
    found: tuple[str, bool] | str = ""
    if comm.rank == 0:
        try:
            output = _choose(Path(section.out), section.if_exists, resume=resume or _restarted())
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
    if resume and if_exists == "number" and _restarted():
        path = _newest(path)
    if not is_run(path):
        path.mkdir(parents=True, exist_ok=True)
        return Output(path, resume)
    if resume or if_exists == "resume":
        return Output(path, True)
    if if_exists == "number":
        return Output(_numbered(path), False)
    raise ValueError(
        f'there is a run in {str(path)!r} already. Go on with it (--resume, or train.if_exists = "resume"), write '
        'beside it (train.if_exists = "number"), or choose another directory (--out).'
    )


def _numbered(path: Path) -> Path:
    number = 2
    while True:
        candidate = path.with_name(f"{path.name}-{number}")
        if not is_run(candidate):
            candidate.mkdir(parents=True, exist_ok=True)
            return candidate
        number += 1


def _newest(path: Path) -> Path:
    number, newest = 2, path
    while is_run(candidate := path.with_name(f"{path.name}-{number}")):
        newest, number = candidate, number + 1
    return newest
