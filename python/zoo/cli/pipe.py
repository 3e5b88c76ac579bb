"""``zoo pipe``: schedules of pipelines, in figures and as pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo.cli.failure import one_sentence

if TYPE_CHECKING:
    from zoo.cost.stages import StageCosts
    from zoo.pipe import Table

app = typer.Typer(no_args_is_help=True, help="Look at schedules of pipelines.")

Schedule = Annotated[str, typer.Option(help="A name, as `zoo components pipe_schedule` prints them.")]
Ranks = Annotated[int, typer.Option(min=1, help="Pipeline ranks.")]
MicroBatches = Annotated[int, typer.Option(min=1, help="Micro-batches of a batch.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="KEY=VALUE", help="Of the schedule, such as num_chunks=4, or path=my.csv for csv."
    ),
]
Forward = Annotated[float, typer.Option(help="Seconds of the whole model's forward of a micro-batch.")]
Input = Annotated[float, typer.Option("--input", help="Seconds of its input gradients.")]
Weight = Annotated[float, typer.Option(help="Seconds of its weight gradients.")]
Transfer = Annotated[float, typer.Option(help="Seconds of a message between ranks.")]
Blocking = Annotated[bool, typer.Option("--blocking", help="Ranks do not compute while messages are under way.")]


def _table(schedule: str, ranks: int, micro_batches: int, options: list[str] | None) -> Table:
    from zoo.pipe import build

    chosen: dict[str, Any] = {}
    for option in options or ():
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--option {option}: write KEY=VALUE, such as num_chunks=4.")
        chosen[key] = int(value) if value.isdecimal() else value
    return build(schedule, ranks, micro_batches, **chosen)


def _costs(forward: float, input_: float, weight: float, transfer: float, blocking: bool) -> StageCosts:
    from zoo.cost.stages import StageCosts

    return StageCosts(forward_s=forward, input_s=input_, weight_s=weight, latency_s=transfer, overlapped=not blocking)


@app.command()
def show(
    schedule: Schedule = "1f1b",
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    option: Options = None,
    forward: Forward = 1.0,
    input_: Input = 1.0,
    weight: Weight = 1.0,
    transfer: Transfer = 0.0,
    blocking: Blocking = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print the table as CSV, to be changed and used as a schedule.")
    ] = False,
) -> None:
    """Print the table of a schedule, what its ranks keep, and how long a batch takes."""
    with one_sentence(shared=True):
        from zoo.cost.stages import evenly
        from zoo.pipe import check
        from zoo.pipe.schedules import to_csv
        from zoo.pipe.simulate import simulate

        table = _table(schedule, ranks, micro_batches, option)
        report = check(table)
        if as_csv:
            typer.echo(to_csv(table), nl=False)
            return
        found = simulate(table, evenly(_costs(forward, input_, weight, transfer, blocking))(table.num_stages))
        typer.echo(table)
        typer.echo(f"time of a batch        {found.makespan_s:.4g} s")
        typer.echo(f"bubble                 {found.bubble:.2%}")
        typer.echo(f"exposed communication  {' '.join(f'{s:.4g}' for s in found.exposed_s)} s, by rank")
        typer.echo(
            f"kept for backwards     {' '.join(map(str, report.peak_activations))} micro-batches of a stage, by rank"
        )
        typer.echo(f"messages waiting       {max(report.waiting.values(), default=0)} on a channel, at most")


@app.command()
def plot(
    schedule: Schedule = "1f1b",
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    option: Options = None,
    forward: Forward = 1.0,
    input_: Input = 1.0,
    weight: Weight = 1.0,
    transfer: Transfer = 0.0,
    blocking: Blocking = False,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="A measured timeline, drawn below the predicted one.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="A .png, .svg or .pdf file.")] = Path("pipeline.png"),
) -> None:
    """Draw when each rank computes what, one row a rank."""
    with one_sentence(shared=True):
        from zoo.cost.stages import evenly
        from zoo.pipe import check
        from zoo.pipe.plot import draw
        from zoo.pipe.simulate import read_spans, simulate

        table = _table(schedule, ranks, micro_batches, option)
        check(table)
        found = simulate(table, evenly(_costs(forward, input_, weight, transfer, blocking))(table.num_stages))
        draw(found, out, measured=None if measured is None else read_spans(_json(measured)))
        typer.echo(out)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--measured {path} cannot be read as JSON: {error}") from error


@app.command()
def choose(
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    forward: Forward = 1.0,
    input_: Input = 1.0,
    weight: Weight = 1.0,
    transfer: Transfer = 0.0,
    blocking: Blocking = False,
    kept: Annotated[float, typer.Option(help="Bytes that the whole model keeps of a micro-batch.")] = 1.0,
    limit: Annotated[float | None, typer.Option(help="Bytes that a rank may keep.", show_default="none")] = None,
) -> None:
    """Compare schedules for a model that is cut into stages of equal cost, fastest first."""
    with one_sentence(shared=True):
        from dataclasses import replace

        from zoo.cost.stages import evenly
        from zoo.pipe.choose import choose as compare

        costs = replace(_costs(forward, input_, weight, transfer, blocking), kept_bytes=kept)
        typer.echo(compare(ranks, micro_batches, evenly(costs), limit_bytes=limit))
