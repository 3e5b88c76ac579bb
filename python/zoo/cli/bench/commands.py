"""``zoo bench``: the commands."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo.cli.failure import one_sentence, rank_of_launch

if TYPE_CHECKING:
    from zoo.cli.bench.collectives import Measured, Settings

_OF_LAUNCHERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
app = typer.Typer(no_args_is_help=True, help="Measure this machine: links, processors, memory, disk.")


@app.callback()
def _group() -> None:
    """Keeps each command its own name."""


@app.command()
def comm(
    ranks: Annotated[
        int | None, typer.Option(help="Processes to start here, where no launcher has.", show_default="2")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Repeat it for several.", show_default="all")] = None,
    min_size: Annotated[str, typer.Option(help="Bytes of the smallest message.")] = "1K",
    max_size: Annotated[str, typer.Option(help="Bytes of the largest.")] = "64M",
    factor: Annotated[int, typer.Option(min=2, help="Between one size and the next.")] = 4,
    seconds: Annotated[float, typer.Option(help="After this long no further point begins.")] = 30.0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Through memory that ranks of one machine share.")
    ] = False,
    json_: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Time the collectives of zoo.comm by size, over the ranks of torchrun, srun or mpirun, or some started here.

    Prints the median, the bandwidths of the algorithm and of the bus, and for each operation the line
    t = alpha + wire bytes / beta. The time of a repetition is that of the slowest rank.
    """
    launched = _speak_as_torchrun()
    with one_sentence(shared=not launched):
        from zoo.cli.bench.collectives import OPERATIONS, Settings, sizes_between
        from zoo.cli.bench.results import check_writable, write_json
        from zoo.cli.io import num_bytes

        settings = Settings(
            operations=tuple(op or OPERATIONS), sizes=sizes_between(num_bytes(min_size), num_bytes(max_size), factor),
            seconds=seconds, dtype=dtype, device=device, shared_memory=shared_memory,
        )  # fmt: skip
        if json_ is not None and rank_of_launch() in (None, 0):
            check_writable(json_)
        found = _measured(settings, ranks, launched)
        if rank_of_launch() in (None, 0):
            typer.echo(found.table())
            if json_ is not None:
                write_json(json_, found.to_dict())


@app.command()
def hardware(
    write: Annotated[Path, typer.Option(metavar="FILE.json", help="The file to be written.")],
    name: Annotated[str | None, typer.Option(help="Of the hardware.", show_default="the file's")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    dtype: Annotated[list[str] | None, typer.Option(help="Repeat it for several.", show_default="fp32 bf16")] = None,
    seconds: Annotated[float, typer.Option(help="Of the whole measurement, about.")] = 60.0,
    ranks: Annotated[
        int | None, typer.Option(help="That share this machine.", show_default="its GPUs, 2 on a CPU")
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="On the disk to be measured.", exists=True, file_okay=False, show_default="the current")
    ] = Path(),
    no_disk: Annotated[bool, typer.Option("--no-disk", help="Do not measure the disk.")] = False,
    links: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A result of zoo bench comm on this machine.")
    ] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A result of zoo bench comm on several nodes.")
    ] = None,
) -> None:
    """Measure products, memory, calls, copies, disk and links, and write them as hardware that forecasts take.

    zoo forecast MODEL --hardware FILE.json uses it.
    """
    with one_sentence(shared=True):
        from zoo.cli.bench.filling import Wanted, fill, summary
        from zoo.cli.bench.results import check_writable, write_json

        check_writable(write)
        wanted = Wanted(
            name=name or write.stem, device=device, dtypes=tuple(dtype or ("fp32", "bf16")), seconds=seconds,
            ranks=ranks, folder=None if no_disk else folder, links=_result(links), network=_result(network),
        )  # fmt: skip
        found = fill(wanted, say=lambda text: typer.echo(f"measuring {text}", err=True))
        write_json(write, found.to_dict())
        typer.echo(summary(found))


def _result(path: Path | None) -> Measured | None:
    if path is None:
        return None
    from zoo.cli.bench.collectives import Measured

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; give what zoo bench comm --json wrote.") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} is no result of zoo bench comm.")
    return Measured.from_dict(document)


def _speak_as_torchrun() -> bool:
    """Whether a launcher has started this process as one of several."""
    with one_sentence(shared=True):
        if not any(
            name in os.environ
            for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
        ):
            return False  # without torch, which takes a second to import
        from zoo.comm import speak_as_torchrun

        speak_as_torchrun()
    return rank_of_launch() is not None


def _measured(settings: Settings, ranks: int | None, launched: bool) -> Measured:
    if launched:
        if ranks is not None and ranks != int(os.environ["WORLD_SIZE"]):
            raise ValueError(f"--ranks {ranks}, and the launcher has started {os.environ['WORLD_SIZE']}; leave it out.")
        from zoo.cli.bench.on_a_rank import measure_as_rank

        return measure_as_rank(settings, say=_progress() if rank_of_launch() == 0 else _silent)
    from zoo.cli.bench.ranks import measure_here

    return measure_here(2 if ranks is None else ranks, settings)


def _silent(operation: str, size: int) -> None:
    del operation, size


def _progress() -> Any:
    if not sys.stderr.isatty():
        return _silent

    def say(operation: str, size: int) -> None:
        sys.stderr.write(f"\r\x1b[K{operation} of {size} bytes ")
        sys.stderr.flush()

    return say
