"""``zoo launch``: a script on every slot of every host."""

from __future__ import annotations

import os
import sys
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any

import typer

from zoo.cli.failure import one_sentence

PORT = 29500
"""Of rank 0, where launchers on several nodes are told no other."""

_COMMAND = ("script", "arguments", "module", "no_python", "num_nodes", "num_gpus", "write")
_WRITTEN = {*_COMMAND, "master_port", "grace_s", "image"}
_HOSTS = {*_COMMAND, "hostfile", "include", "exclude"}
"""What a written job, and a written file of hosts, has in a form of its own."""
_PASSED_ON = {
    "include", "exclude", "log_dir", "show", "bind_cores", "max_restarts", "start_s", "finish_s", "hang_s",
    "as_deepspeed",
}  # fmt: skip
"""What the launchers of a written job are told as it was told here."""


def launch(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python program.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="...", help="Its arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program of any kind.")] = False,
    hostfile: Annotated[
        Path | None, typer.Option("-H", "--hostfile", help="Hosts, one a line: worker-0 slots=4.")
    ] = None,
    include: Annotated[str, typer.Option("-i", "--include", help="Only these: host:slot,slot@host.")] = "",
    exclude: Annotated[str, typer.Option("-e", "--exclude", help="All but these, written alike.")] = "",
    num_nodes: Annotated[int | None, typer.Option("--num_nodes", "--num-nodes", help="The first hosts.")] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option("--num_gpus", "--num-gpus", "--ranks", help="Processes on each host.", show_default="its slots"),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node_rank", "--node-rank", help="Of this host, with --num_nodes, without ssh.")
    ] = None,
    master_addr: Annotated[str | None, typer.Option("--master_addr", "--master-addr", help="Of rank 0.")] = None,
    master_port: Annotated[int | None, typer.Option("--master_port", "--master-port", help="Of rank 0.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="A folder for each rank: DIR/rank0/stdout.log, ….")] = None,
    show: Annotated[str, typer.Option(help="Ranks on the screen: 0,3 or all.")] = "0",
    bind_cores: Annotated[
        str | None, typer.Option("--bind-cores", help="Cores of their own for ranks: all, or 0-3,8.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Start again after a failure, so often.")] = 0,
    min_nodes: Annotated[int | None, typer.Option(help="With restarts: go on with so few hosts.")] = None,
    ssh: Annotated[
        str | None, typer.Option(envvar="ZOO_LAUNCH_SSH", help="What is given a host and a command line.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="First one all-reduce, and a look at this folder on every host.")
    ] = False,
    start_s: Annotated[float, typer.Option(help="A host that has not answered by then does not answer.")] = 60.0,
    grace_s: Annotated[float, typer.Option(help="From SIGTERM to SIGKILL.")] = 6.0,
    finish_s: Annotated[float, typer.Option(help="Ranks may go on so long after one has ended.")] = 300.0,
    hang_s: Annotated[float | None, typer.Option(help="Without output for so long it hangs: stacks of all.")] = None,
    lost_s: Annotated[float, typer.Option(help="A host over ssh that is silent for so long is lost.")] = 10.0,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Start nothing: write a script for sbatch (FILE.sbatch), for Kubernetes (FILE.yaml), or the hosts.",
        ),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image, for Kubernetes.")] = None,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="`import deepspeed` gives zoo.deepspeed.")
    ] = False,
) -> None:
    """Run SCRIPT on every slot: of the hosts of --hostfile, of what SLURM or PBS has lent, or of this host.

    Options come before SCRIPT. What fails first is named at the end; nothing is left running, however it ends.
    """
    kind = ["-m"] if module else ["--no-python"] if no_python else []
    with one_sentence(shared=False):  # it is no rank, also where a rank starts it
        if write is not None and write.suffix in (".sbatch", ".yaml", ".yml"):
            command = [*_given(context, write, _WRITTEN, _PASSED_ON), *kind, script, *(arguments or ())]
            _write(write, command, num_nodes, num_gpus, master_port, image, grace_s)
            return
        from zoo.launch.job import Job
        from zoo.launch.supervisor import Supervisor

        if image is not None and (write is None or write.suffix == ".sbatch"):
            raise ValueError("--image is of a job for Kubernetes; add --write FILE.yaml, or leave it out.")
        if hostfile is not None and node_rank is not None:
            raise ValueError(
                "--hostfile is for one launcher, which starts all hosts, and --node_rank for a launcher on each of "
                "them; leave one of them out."
            )
        more: dict[str, Any] = {} if ssh is None else {"ssh": ssh}
        place = _node(node_rank, num_nodes) if hostfile is None else None
        if place is not None:
            more |= {"node": place.rank, "nodes": place.num_nodes}
            master_addr = master_addr or place.address
            master_port = master_port or _port_of_environment()
            hosts, devices = _here(include, exclude, num_gpus)
        else:
            hosts, devices = _hosts(hostfile, include, exclude, num_nodes, num_gpus)
        if write is not None:
            from zoo.launch import scripts

            _given(context, write, _HOSTS)
            write.write_text(scripts.hostfile({host: len(slots) for host, slots in hosts.items()}), encoding="utf-8")
            return
        job = Job(
            command=[*kind, script, *(arguments or ())],
            hosts=hosts, devices=devices, environment=_environment(hosts, as_deepspeed), cores=bind_cores,
            log_dir=None if log_dir is None else str(log_dir.absolute()), shown=_shown(show), address=master_addr,
            port=master_port, max_restarts=max_restarts, min_nodes=min_nodes, start_s=start_s, grace_s=grace_s,
            finish_s=finish_s, hang_s=hang_s, lost_s=lost_s, **more,
        )  # fmt: skip
        code = Supervisor(job.preflight()).run() if check else 0
        if code == 0:
            code = Supervisor(job).run()
    sys.stdout.flush()
    raise SystemExit(code)


def _given(context: typer.Context, file: Path, known: set[str], passed_on: Set[str] = frozenset()) -> list[str]:
    """Options of the command line among ``passed_on``, as a command has them.

    Raises:
        ValueError: some are neither among these nor among ``known``.
    """
    given = [
        one for one in context.command.params
        if getattr(context.get_parameter_source(one.name), "name", "") == "COMMANDLINE"
    ]  # fmt: skip
    names = {one.name: max(one.opts, key=len) for one in given}
    if wrong := [name for key, name in names.items() if key not in known | passed_on]:
        raise ValueError(
            f"{', '.join(wrong)} cannot be written into {file}; leave {'them' if wrong[1:] else 'it'} out, or start "
            "the job without --write."
        )
    words = ((name, context.params[key]) for key, name in names.items() if key in passed_on)
    return [name if value is True else f"{name}={value}" for name, value in words]


def _write(
    file: Path, command: list[str], nodes: int | None, ranks: int | None, port: int | None, image: str | None,
    grace_s: float,
) -> None:  # fmt: skip
    """A file of a batch system; its ranks are those of GPUs unless CUDA_VISIBLE_DEVICES is empty."""
    from zoo.launch import exports, scripts

    if ranks is None:
        raise ValueError(f"{file} needs to know how many ranks a node has; give --num_gpus, and --num_nodes.")
    batch = scripts.Batch(
        name=scripts.name_of(file.stem), nodes=nodes or 1, ranks=ranks, command=command,
        grace_s=grace_s, gpus=os.environ.get("CUDA_VISIBLE_DEVICES") != "", port=port or PORT,
        environment=exports.exported({}, files=exports.environment_files(os.environ)),
    )  # fmt: skip
    if file.suffix == ".sbatch":
        text = scripts.sbatch(batch)
    elif image is None:
        raise ValueError(f"{file} needs the name of an image that has zoo and the script; give --image.")
    else:
        text = scripts.kubernetes(batch, image)
    file.write_text(text, encoding="utf-8")


def _hosts(
    hostfile: Path | None, include: str, exclude: str, num_nodes: int | None, num_gpus: int | None
) -> tuple[dict[str, list[int]], bool]:
    """Host → slots, and whether they are devices that somebody chose."""
    from zoo.launch import discovery, hosts

    lent = discovery.allotment(os.environ) if hostfile is None else None
    if hostfile is not None or lent is not None:
        there = hosts.read_hostfile(hostfile) if hostfile is not None else {}
        if lent is not None:  # what a batch system says is how many tasks it would start, not how many ranks fit
            there = {host: max(slots, num_gpus or 0) for host, slots in lent.hosts.items()}
        slots = hosts.select(hosts.all_slots(there), include, exclude)
        if not slots:
            raise ValueError(f"--exclude {exclude!r} leaves no host of {', '.join(there)}.")
        return hosts.first(slots, num_nodes, num_gpus), bool(include or exclude)
    found, chosen = _here(include, exclude, num_gpus)
    return hosts.first(found, num_nodes), chosen


def _here(include: str, exclude: str, num_gpus: int | None) -> tuple[dict[str, list[int]], bool]:
    """The same of this host alone."""
    from zoo.launch import hosts
    from zoo.launch.job import gpus

    devices = gpus(os.environ)
    here = hosts.select({"localhost": devices or list(range(num_gpus or 1))}, include, exclude)
    if not here:
        raise ValueError(f"--exclude {exclude!r} leaves no slot of localhost.")
    return hosts.first(here, None, num_gpus), bool(include or exclude)


def _node(rank: int | None, nodes: int | None) -> Any:
    """Which node this is, as options or variables say; None where this launcher is the only one."""
    from zoo.launch import discovery

    if rank is not None:
        return discovery.Node("--node_rank", rank, nodes or 1, os.environ.get("MASTER_ADDR"))
    found = discovery.node(os.environ)
    return found if found is not None and found.num_nodes > 1 else None


def _port_of_environment() -> int:
    from zoo.launch import hosts

    text = os.environ.get("MASTER_PORT", str(PORT))
    if not hosts.is_number(text):
        raise ValueError(f"the environment has MASTER_PORT={text!r}; a number belongs there, or give --master-port.")
    return int(text)


def _environment(hosts: dict[str, list[int]], as_deepspeed: bool) -> dict[str, str]:
    from zoo.launch import exports

    files = exports.environment_files(os.environ)
    found = exports.exported(os.environ if list(hosts) != ["localhost"] else {}, files=files)
    if as_deepspeed:
        from zoo.cli.run import with_standin

        found["PYTHONPATH"] = with_standin(found.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
    return found


def _shown(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise ValueError(f"--show is {text!r}; give ranks as 0,3, or all.") from None
