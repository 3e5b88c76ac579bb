"""A step of a run once more, compared bit by bit with what the run's log and checkpoints say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing import CheckpointError, load
from zoo.registry import DEFAULT, Registry
from zoo.train.config import read_config
from zoo.train.history import read_lines
from zoo.train.job import CHECKPOINTS, Job, tag_of
from zoo.train.output import facts_of

COMPARED = ("loss", "lr", "grad_norm", "skipped")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay came to; the same on all ranks."""

    step: int
    began_at: int
    """The step of the checkpoint from which it ran; 0 for the beginning."""
    compared: int
    """Steps whose lines of the log were compared."""
    differences: tuple[str, ...]
    """A sentence for each number, or state, that is another one."""
    states_compared: int
    """Tensors of the checkpoint of the step that were compared, on all ranks; 0 where there is none."""

    def verdict(self) -> str:
        """One line."""
        ran = f"steps {self.began_at + 1} to {self.step}" if self.compared != 1 else f"step {self.step}"
        states = f", and {self.states_compared} states of its checkpoint" if self.states_compared else ""
        if not self.differences:
            return f"{ran} again: the same bits in loss, learning rate and norm{states}"
        return f"{ran} again: {len(self.differences)} differences; the first: {self.differences[0]}"


def replay(
    run: str | Path, step: int, *, overrides: tuple[str, ...] = (), registry: Registry = DEFAULT,
    say: Callable[[str], None] | None = None,
) -> Replay:  # fmt: skip
    """Run ``step`` of a run again, from the nearest checkpoint before it or from the beginning. A collective.

    Loss, learning rate and norm of each step on the way are compared with the run's log, and where the run has a
    checkpoint of the step, parameters and optimizer states with it. Nothing of the run is written to. At the number of
    ranks of the run and with the same torch they are the same to the last bit, unless something is not deterministic.

    Args:
        run: the directory of the run.
        step: 1 for the first.
        overrides: further values, for experiments; then differences are to be expected.
        say: gets lines about what is done, on rank 0.

    Raises:
        ValueError: there is no such run or step, or it had another number of ranks.
    """
    path = Path(run)
    log = read_log(path)
    if step not in log and step != max(log, default=0) + 1:  # the next one may be the one that ended the run
        known = f"{min(log)} to {max(log)}" if log else "no step"
        raise ValueError(f"replay of step {step}: the log of {str(path)!r} has {known}.")
    began = nearest(path, step)
    _check_ranks(path, began, step)
    config = read_config(path / "config.json", overrides, registry=registry)
    job = Job(config, registry, quiet=True, monitors=False)
    if began:
        job.load(path, tag_of(began))
    if say is not None and job.rank == 0:
        say(f"from step {began}{' (the beginning)' if not began else ''} to step {step}")
    differences: list[str] = []
    for _ in range(began, step):
        line = job.line_of(job.step())
        differences += differ(line, log[line["step"]]) if line["step"] in log else []
    states, wrong = _compare_states(job, path, step)
    found = Replay(
        step=step,
        began_at=began,
        compared=sum(began < s <= step for s in log),
        differences=(*differences, *wrong),
        states_compared=states,
    )
    job.engine.destroy()
    return found


def differ(line: Mapping[str, Any], logged: Mapping[str, Any]) -> list[str]:
    """A sentence for each number of a step that is not the one of the log."""
    return [
        f"step {line['step']}: {key} is {line[key]!r}, and {logged.get(key)!r} in the log"
        for key in COMPARED
        if repr(line[key]) != repr(logged.get(key))  # NaN is NaN
    ]


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a run's log by step.

    Raises:
        ValueError: there is none.
    """
    file = path / "log.jsonl"
    if not file.is_file() or not (path / "config.json").is_file():
        raise ValueError(f"{str(path)!r} is no directory of a run: it has no log.jsonl and config.json.")
    return {line["step"]: line for line in read_lines(file)}


def nearest(path: Path, step: int) -> int:
    """The step of the newest checkpoint that is older than ``step``; 0 where there is none."""
    names = [p.parent.name for p in (path / CHECKPOINTS).glob("step_*/manifest.json")]
    steps = [int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdigit()]
    return max((found for found in steps if found < step), default=0)


def _check_ranks(path: Path, began: int, step: int) -> None:
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    parts = facts_of(path).get("ranks") or [[0, ranks]]  # [step before the first, ranks from then on], in order
    now = [size for after, size in parts if after <= began][-1:]
    had = [*now, *(size for after, size in parts if began < after < step)] or [ranks]
    if len(set(had)) > 1:
        raise ValueError(
            f"steps {began + 1} to {step} of the run in {str(path)!r} were run by {' and then '.join(map(str, had))} "
            "ranks; there is no checkpoint between, so they cannot be run again as they were."
        )
    if had[0] != ranks:
        raise ValueError(
            f"the run in {str(path)!r} had {had[0]} ranks, and there are {ranks} here; start with "
            f"torchrun --nproc-per-node={had[0]}."
        )


def _compare_states(job: Job, path: Path, step: int) -> tuple[int, list[str]]:
    """How many states of the checkpoint of ``step`` were compared, and which are others. A collective."""
    if not (path / CHECKPOINTS / tag_of(step) / "manifest.json").is_file():
        return 0, []
    found = load(path / CHECKPOINTS, tag_of(step), job.engine.comm)
    compared, wrong = 0, []
    for item in job.engine.optimizer.state_slices():
        here = item.tensor.detach().reshape(-1).cpu()
        try:
            # Of a matrix that is cut over tensor ranks it is a box.
            there = found.read(item.name, item.role, item.start if item.box is None else item.box, item.length)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        compared += 1
        if here.dtype != there.dtype or not torch.equal(_bits(here), _bits(there)):
            number = int((here != there).sum())
            wrong.append(f"after step {step} {number} elements of {item.role} {item.name!r} are others")
    everyone = job.engine.comm.all_gather_object((compared, wrong[:20]))
    return sum(count for count, _ in everyone), [text for _, said in everyone for text in said]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor
