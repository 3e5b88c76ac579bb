"""All questions, and one report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from zoo.cli.doctor import machine, software
from zoo.cli.doctor.asking import PATIENCE_S, ask_torch
from zoo.cli.doctor.report import Finding, Report, State
from zoo.cli.doctor.transfers import transfers


def examine(folder: Path | None = None, *, patience_s: float = PATIENCE_S) -> Report:
    """Look at everything; takes some seconds, most of them to import torch in a process of its own.

    Args:
        folder: on the file system whose direct transfers are tried; by default the current one.
        patience_s: how long torch may take to answer.
    """
    where = folder or Path.cwd()
    asked = ask_torch(where, patience_s=patience_s)
    return Report(tuple(_without_doubles([*_beside_torch(), *asked, *_if_nobody_asked(where, asked)])))


def _beside_torch() -> Iterator[Finding]:
    yield software.python()
    yield from software.distributions()
    yield from software.dependencies()
    yield from software.plug_ins()
    yield from software.tools()
    yield from machine.processor()
    yield machine.shared_memory()
    yield from machine.resources()
    yield from machine.group_limits()
    yield from machine.variables()


def _if_nobody_asked(folder: Path, asked: Iterable[Finding]) -> Iterator[Finding]:
    """torch brings a CUDA runtime along, so transfers are asked for beside it; here where it did not come so far."""
    if not any(finding.section == "transfers" for finding in asked):
        yield from transfers(folder, gpus=False)


def _without_doubles(findings: Iterable[Finding]) -> list[Finding]:
    """Of a torch that cannot be imported there is one line: why it is not even installed, where that is known."""
    found = list(findings)
    about = [finding for finding in found if (finding.section, finding.name) == ("versions", "torch")]
    if len(about) < 2:
        return found
    kept = next((finding for finding in about if finding.state is State.BROKEN), about[0])
    return [finding for finding in found if finding is kept or finding not in about]
