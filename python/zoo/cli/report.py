"""``zoo report``: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zoo.cli.failure import one_sentence


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, such as runs/bytes.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.", show_default="report.html in the directory")
    ] = None,
) -> None:
    """Write a run as one page of HTML: curves, memory, traffic, one step in time, forecast, configuration.

    It needs no network, and has at most 1 MB.
    """
    with one_sentence(shared=True):
        from zoo.report import write_report

        typer.echo(f"the report is in {write_report(run, out)}")
