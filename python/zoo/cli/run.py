"""``zoo run``: a script of the user, with what zoo gives it beside."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from zoo.cli.failure import one_sentence


def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python program.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="...", help="Its arguments.")] = None,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="`import deepspeed` gives zoo.deepspeed, in what it starts too.")
    ] = False,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes on this machine: `zoo launch --ranks N --show all`.")
    ] = 1,
) -> None:
    """Run SCRIPT with its arguments, as Python does; under torchrun, srun or mpirun, on each rank.

    Options of zoo come before SCRIPT, all after it are the script's own.
    """
    with one_sentence(shared=True):
        if not script.is_file():
            raise ValueError(f"there is no file {str(script)!r}; give the path of a Python program.")
        environment = dict(os.environ)
        if as_deepspeed:
            environment["PYTHONPATH"] = with_standin(environment.get("PYTHONPATH", ""))
            from zoo.comm.launch import discover  # torch takes a second to import: not for --help

            if ranks == 1 and discover(environment) is None:  # as DeepSpeed's launcher does: a job of one process
                environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
                environment.setdefault("MASTER_ADDR", "127.0.0.1")
                environment.setdefault("MASTER_PORT", str(_free_port()))
        started = [sys.executable]
        if ranks > 1:
            started += ["-m", "zoo.cli", "launch", f"--ranks={ranks}", "--show=all"]
        sys.stdout.flush()
        os.execve(sys.executable, [*started, str(script), *(arguments or ())], environment)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def with_standin(path: str) -> str:
    """A PYTHONPATH with the folder before it in which ``deepspeed`` is zoo."""
    from zoo.deepspeed.standin import installed_folder

    folder = str(installed_folder())
    return os.pathsep.join([folder, *(part for part in path.split(os.pathsep) if part and part != folder)])
