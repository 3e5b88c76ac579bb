"""Asking torch from outside: a process whose end, whatever it is, becomes a finding."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zoo.cli.doctor.report import Finding, State

PATIENCE_S = 120.0


def ask_torch(folder: Path, *, patience_s: float = PATIENCE_S, command: Sequence[str] | None = None) -> list[Finding]:
    """The findings of ``torch_side.py``, and one more where it did not come to its end.

    Args:
        folder: where direct transfers are tried.
        patience_s: it is ended after this long.
        command: another program, which writes the same lines.
    """
    full = [*(command or (sys.executable, "-m", "zoo.cli.doctor.torch_side")), str(folder)]
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        ended = ""
        try:
            code = subprocess.run(
                full, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=patience_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code, ended = -1, f"no answer in {patience_s:g} s"
        out.seek(0)
        err.seek(0)
        lines, errors = out.read().splitlines(), err.read()
    asked, findings = read(lines)
    if code == 0 and asked == "":
        return findings
    return [*findings, _failure(asked or "torch", ended or how_it_ended(code, errors))]


def read(lines: Sequence[str]) -> tuple[str | None, list[Finding]]:
    """(What was asked last, None if nothing; the findings); what is no line of ours is left out."""
    asked: str | None = None
    findings: list[Finding] = []
    for line in lines:
        try:
            given = json.loads(line)
            if set(given) == {"asks"}:
                asked = given["asks"]
            else:
                findings.append(Finding.from_dict(given))
        except (ValueError, TypeError):
            continue
    return asked, findings


def how_it_ended(code: int, errors: str) -> str:
    """A sentence of an exit status and what was written beside it: the last line of a traceback is its error."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the interpreter was ended by {name}"
    told = [line.strip() for line in errors.splitlines() if line.strip()]
    return told[-1] if told else f"the interpreter ended with status {code}"


def _failure(asked: str, how: str) -> Finding:
    if asked == "torch":
        return Finding(
            section="versions", name="torch", value=f"cannot be imported: {how}", state=State.BROKEN,
            remedy="pip install --force-reinstall torch",
        )  # fmt: skip
    return Finding(
        section="devices", name=asked, value=f"while they were asked for: {how}", state=State.BROKEN,
        remedy="python -m zoo.cli.doctor.torch_side .  # shows what it says",
    )  # fmt: skip
