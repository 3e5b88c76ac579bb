"""``zoo tune``: the fastest way to run a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from zoo.cli.failure import one_sentence


def tune(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="As of zoo train: a file or an example.", show_default=False),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="the GPUs, or 1")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="The most real runs.", show_default="50")] = None,
    minutes: Annotated[float | None, typer.Option(help="The most minutes of them all.", show_default="any")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds of one at most.", show_default="600")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="What there is, such as 8GB: of all ranks on the CPU, of each GPU.", show_default="all"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="what there is")] = None,
    full: Annotated[bool, typer.Option("--full", help="Search everything, not stage and micro-batch alone.")] = False,
    out: Annotated[str | None, typer.Option(help="Where everything goes.", show_default="autotuning_results")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the search in DIR.", show_default=False)
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="MODULE:FUNCTION", help="A task of your own, as of zoo train.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and all else to stderr.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another value for a key.")
    ] = None,
) -> None:
    """Search for the configuration that trains CONFIG the fastest, with short real runs.

    A forecast rejects what cannot fit into memory, a model that is fitted to the runs says which is next. The section
    autotuning says more. Ctrl-C ends it with exit code 75; --resume goes on, and repeats no run that has ended.
    """
    with one_sentence(shared=True):
        if (config is None) == (resume is None):
            raise ValueError("zoo tune takes a CONFIG for a new search, or --resume DIR for one that was interrupted.")
        from zoo.tuning.limits import bytes_of

        given = {
            "ranks": ranks, "tuner_num_trials": trials, "minutes": minutes, "timeout_s": timeout,
            "memory_bytes": bytes_of(memory) if memory is not None else None,
            "results_dir": json.dumps(out) if out is not None else None, "fast": "false" if full else None,
        }  # fmt: skip
        overrides = [f"autotuning.{key}={value}" for key, value in given.items() if value is not None]
        if resume is not None and (overrides or set_ or task or device):
            raise ValueError("--resume goes on as the search began; leave the other options out.")
        _run(config, resume, (*(set_ or ()), *overrides), device, task, as_json)


def _run(
    config: str | None, resume: Path | None, overrides: tuple[str, ...], device: str | None, task: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    from zoo.cli.app import file_or_example
    from zoo.train import STOPPED
    from zoo.tuning import resume as go_on
    from zoo.tuning import tune as search
    from zoo.tuning.tuner import as_json as report

    def say(text: str) -> None:
        typer.echo(text, err=as_json)
        sys.stdout.flush()

    try:
        if resume is not None:
            found = go_on(resume, say=say)
        else:
            path = file_or_example(Path(config or ""))
            found = search(path, overrides, device=device, task=task, say=say)
    except KeyboardInterrupt:
        typer.echo("zoo: stopped; what has ended is in the journal, and zoo tune --resume DIR goes on.", err=True)
        raise SystemExit(STOPPED) from None
    if as_json:
        typer.echo(report(found))
