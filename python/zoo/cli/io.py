"""``zoo io``: what a device can do, and whether it does it right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zoo.cli.failure import FAILURE, one_sentence
from zoo.cost.writing import write_whole

if TYPE_CHECKING:
    from zoo.io.bench import Measurement, Sweep

app = typer.Typer(no_args_is_help=True, help="Measure and check file transfers.")

_PICTURES = (".png", ".svg", ".pdf")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def num_bytes(text: str) -> int:
    """``1M``, ``256K`` or ``4096`` as a number of bytes."""
    digits, unit = text.rstrip("KMGTkmgt"), text[len(text.rstrip("KMGTkmgt")) :].upper()
    if not digits.isdecimal() or unit not in _UNITS:
        raise ValueError(f"{text!r} is no size; write 4096, 256K, 1M or 2G")
    return int(digits) * _UNITS[unit]


def human(size: int) -> str:
    """The other way round."""
    for unit in ("T", "G", "M", "K"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


Folder = Annotated[Path, typer.Argument(help="A folder on the device.", exists=True, file_okay=False)]


@app.command()
def bench(
    folder: Folder,
    size: Annotated[str, typer.Option(help="Bytes of a transfer.")] = "1G",
    block_size: Annotated[
        list[str] | None, typer.Option(help="Repeat it for several.", show_default="128K 256K 1M 4M")
    ] = None,
    queue_depth: Annotated[list[int] | None, typer.Option(help="Repeat it for several.", show_default="4 8 32")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Repeat it for several.", show_default="1 2")] = None,
    operation: Annotated[list[str] | None, typer.Option(help="read or write.", show_default="both")] = None,
    repeats: Annotated[int, typer.Option(help="Times each point is measured.")] = 3,
    memory: Annotated[str, typer.Option(help="pool or tensor: where the bytes are.")] = "pool",
    backend: Annotated[str, typer.Option(help="auto, uring or threads.")] = "auto",
    json_: Annotated[Path | None, typer.Option("--json", help="Write the aio section and all figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
) -> None:
    """Find the settings that suit the device of FOLDER: a table, and the aio section for a configuration."""
    with one_sentence(shared=False):
        from zoo.cli.bench.results import check_writable
        from zoo.io import bench as measure

        for file in (json_, plot):  # known before a long measurement
            if file is not None:
                check_writable(file)
        if plot is not None and plot.suffix.lower() not in _PICTURES:
            raise ValueError(f"{plot}: the suffix says what kind of picture to write; it takes {', '.join(_PICTURES)}.")
        given: dict[str, object] = {
            "block_sizes": tuple(num_bytes(text) for text in block_size or ()),
            "queue_depths": tuple(queue_depth or ()),
            "num_threads": tuple(threads or ()),
            "operations": tuple(_one_of("operation", name, measure.OPERATIONS) for name in operation or ()),
            "memory": _one_of("memory", memory, ("pool", "tensor")),
            "backend": _one_of("backend", backend, ("auto", "uring", "threads")),
        }
        chosen = {name: value for name, value in given.items() if value}
        sweep = measure.Sweep(folder=folder, num_bytes=num_bytes(size), repeats=repeats, **chosen)  # type: ignore[arg-type]
        sweep.points()
        found = _with_progress(sweep)
        _print_table(found)
        if json_ is not None:
            write_whole(json_, measure.as_json(sweep, found) + "\n")
        if plot is not None:
            measure.plot(found, plot)
        typer.echo('"aio": ' + measure.best(found).model_dump_json(indent=2))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} = {value!r}; allowed are {', '.join(allowed)}")
    return value


def _with_progress(sweep: Sweep) -> list[Measurement]:
    from rich.progress import Progress

    from zoo.io import bench as measure

    with Progress(transient=True) as bar:
        task = bar.add_task("transfers", total=None)
        return measure.run(sweep, progress=lambda done, of: bar.update(task, completed=done, total=of))


def _print_table(found: list[Measurement]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("operation", "block size", "depth", "threads", "GB/s", "range", "CPU s/GB")
    for m in found:
        table.add_row(
            m.operation,
            human(m.block_size),
            str(m.queue_depth),
            str(m.num_threads),
            f"{m.gigabytes_per_s:.2f}",
            f"{m.lowest:.2f}-{m.highest:.2f}",
            f"{m.cpu_s_per_gigabyte:.3f}",
        )
    Console().print(table)


@app.command()
def verify(
    folder: Folder,
    size: Annotated[str, typer.Option(help="Bytes of the files.")] = "16M",
    transfers: Annotated[int, typer.Option(help="Random writes, and as many reads, a way.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the random ranges.")] = 0,
) -> None:
    """Compare transfers in FOLDER with plain file I/O, on every backend; exit code 1 when a byte is wrong."""
    with one_sentence(shared=False):
        from zoo.io.verify import facts
        from zoo.io.verify import verify as check

        known = facts(folder)
        typer.echo(f"io_uring              {known.io_uring}")
        typer.echo(f"direct transfers      {known.direct}")
        typer.echo(f"memory to be locked   {known.locked_memory}")
        typer.echo(f"page-locked for a GPU {known.page_locked}")
        failed = False
        for outcome in check(folder, num_bytes=num_bytes(size), transfers=transfers, seed=seed):
            failed |= outcome.problem is not None
            way = "page cache" if outcome.direct == "never" else "direct"
            result = outcome.problem or f"{outcome.transfers} transfers right"
            typer.echo(f"{outcome.backend:<8}{way:<12}{outcome.memory:<9}{result}")
    if failed:
        raise typer.Exit(FAILURE)
