"""``zoo doctor``: what is here, what is missing, and the command that adds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zoo.cli.failure import FAILURE, one_sentence


def doctor(
    folder: Annotated[
        Path | None,
        typer.Option(help="Try direct transfers in it.", exists=True, file_okay=False, show_default="the current one"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="How long torch may take to answer.")] = 120.0,
) -> None:
    """Print what zoo finds on this machine, and for each thing missing the command that adds it.

    Exit code 1 if something that zoo needs is broken. Nothing is compiled, installed or changed.
    """
    with one_sentence(shared=True):
        from zoo.cli.doctor.examining import examine

        found = examine(folder, patience_s=timeout_s)
        typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else found.text())
    if not found.healthy:
        raise typer.Exit(FAILURE)
