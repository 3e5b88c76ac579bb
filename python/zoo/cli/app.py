"""The commands."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from zoo.cli.bench.commands import app as bench_app
from zoo.cli.ckpt import app as ckpt_app
from zoo.cli.compiling import app as compile_app
from zoo.cli.doctor.command import doctor
from zoo.cli.failure import one_sentence, rank_of_launch
from zoo.cli.io import app as io_app
from zoo.cli.launch import launch
from zoo.cli.pipe import app as pipe_app
from zoo.cli.report import report
from zoo.cli.run import run
from zoo.cli.tensor import app as tensor_app
from zoo.cli.tune import tune


class _Commands(TyperGroup):
    """The commands here, and those that other distributions register (kind "command": a Typer); loaded when called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_registered()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in _registered():
            return TyperCommand(cmd_name, help=f"See zoo {cmd_name} --help.")
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and super().get_command(ctx, args[0]) is None and args[0] in _registered():
            from zoo import registry

            return args[0], typer.main.get_command(registry.get("command", args[0])), args[1:]
        return super().resolve_command(ctx, args)


def _registered() -> list[str]:
    from zoo import registry

    return list(registry.names("command")) if "command" in registry.kinds() else []


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than all else of `zoo --help`
    help="Train models with zoo.",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(ckpt_app, name="ckpt")
app.add_typer(compile_app, name="compile")
app.add_typer(io_app, name="io")
app.add_typer(pipe_app, name="pipe")
app.add_typer(tensor_app, name="tensor")
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(context_settings={"allow_interspersed_args": False})(launch)
app.command()(doctor)
app.command()(report)
app.command()(tune)


def file_or_example(given: Path) -> Path:
    """The file itself, or that of the example of this name where there is no such file."""
    from zoo import examples

    return given if given.is_file() or str(given) not in examples.names() else examples.configuration(str(given))


Path_ = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        callback=file_or_example,
        help="A .json, .yaml or .yml file, or the name of an example that comes with zoo, such as byte_lm.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Another value for a key, such as optimizer.params.lr=0.001."),
]


Task = Annotated[
    str | None,
    typer.Option("--task", metavar="MODULE:FUNCTION", help="A task of your own, in the place of train.task.type."),
]


def main() -> None:
    """Entry point of the ``zoo`` command."""
    # A terminal of another encoding, or a file's name that is no text, is no reason to end a run.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    app(prog_name="zoo")


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"zoo {version('zoo-core')}")
        except PackageNotFoundError:
            typer.echo("zoo (not installed as a distribution)")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del show


@app.command()
def train(
    config: Path_,
    stage: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3.", show_default="the configuration's")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the latest checkpoint in the output directory.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="the configuration's")] = None,
    out: Annotated[str | None, typer.Option(help="Output directory.", show_default="the configuration's")] = None,
    task: Task = None,
    moe: Annotated[
        bool, typer.Option("--moe", help="Mixtures of experts in the place of perceptrons, for tasks that have mlp=.")
    ] = False,
    pipe: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages: the model is cut into so many.", show_default="none")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor ranks: matrices are cut into so many.", show_default="none")
    ] = None,
    checkpoint_activations: Annotated[
        bool,
        typer.Option("--checkpoint-activations", help="Keep of each block its input, and compute the rest again."),
    ] = False,
    set_: Set = None,
) -> None:
    """Train what CONFIG describes; under torchrun, srun or mpirun, on all of its ranks.

    SIGTERM and SIGINT (Ctrl-C) let the step end, save a checkpoint and end with exit code 75; --resume goes on.
    """
    overrides = [*(set_ or ())]
    for key, value in (("zero_optimization.stage", stage), ("train.steps", steps)):
        if value is not None:
            overrides.append(f"{key}={value}")
    if moe:
        overrides.insert(0, 'train.task.params.mlp={"type": "moe"}')  # --set says more of it
    if pipe is not None and pipe > 1:
        tensor = f', "tensor": {tp}' if tp is not None else ""
        overrides.insert(0, f'mesh.axes={{"pipe": {pipe}, "data": -1{tensor}}}')
    if tp is not None:
        overrides.append(f"tensor_parallel.autotp_size={tp}")
    if checkpoint_activations:
        overrides.insert(0, "activation_checkpointing.blocks=auto")
    if out is not None:
        overrides.append(f"train.out={json.dumps(out)}")
    with contextlib.ExitStack() as stack:
        with one_sentence(shared=True):
            from zoo.comm import speak_as_torchrun  # torch takes a second to import: not for --help
            from zoo.train import read_config
            from zoo.train.tasks import with_task

            speak_as_torchrun()
            loaded = read_config(config, [*overrides, *stack.enter_context(with_task(task))])
        with one_sentence(shared=False):
            from zoo.train import STOPPED, StoppedError
            from zoo.train import train as run

            stopped = False
            try:
                run(loaded, resume=resume)
            except StoppedError:
                stopped = True
            _leave()
            if stopped:
                raise SystemExit(STOPPED)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    step: Annotated[int, typer.Option(min=1, help="Which step; 1 is the first.")],
    task: Task = None,
    set_: Set = None,
) -> None:
    """Run a step of RUN again and compare it bit by bit with its log and checkpoints.

    Exit code 1 if something differs. With as many ranks as the run had, under torchrun, srun or mpirun.
    """
    with one_sentence(shared=False):
        from zoo.comm import speak_as_torchrun
        from zoo.train import replay as again
        from zoo.train.tasks import with_task

        speak_as_torchrun()
        with with_task(task) as more:
            found = again(run, step, overrides=(*(set_ or ()), *more), say=typer.echo)
        if rank_of_launch() in (None, 0):
            for text in found.differences[1:]:
                typer.echo(f"  {text}")
            typer.echo(found.verdict())
        _leave()
        if found.differences:
            raise SystemExit(1)


def _leave() -> None:
    import torch.distributed as dist

    if rank_of_launch() is not None and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()


@app.command()
def forecast(
    config: Annotated[
        Path,
        typer.Argument(
            help="As of zoo train: a file or an example; with --gpus also a model's config.json or its folder, or "
            "MODULE:FUNCTION that gives a model or its configuration."
        ),
    ],
    ranks: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks.", show_default="1")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Whose figures.", show_default="0")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where the model computes: cpu or cuda.", show_default="cuda with --hardware, else cpu"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    task: Task = None,
    peak: Annotated[bool, typer.Option("--peak", help="And the most that is allocated at once, by a dry run.")] = False,
    set_: Set = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Forecast time on so many, without them.")] = None,
    machine: Annotated[
        str | None, typer.Option("--hardware", help="By name, or a file; h100 by default, with --gpus.")
    ] = None,
    software: Annotated[
        str | None, typer.Option(help="eager, or lean: no time between kernels.", show_default="eager")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step.", show_default="256")] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="4096, or as many as the model has")
    ] = None,
    tensor: Annotated[int | None, typer.Option(min=1, help="Ranks of the tensor axis.")] = None,
    pipeline: Annotated[int | None, typer.Option(min=1, help="Stages of the pipeline.")] = None,
    stage: Annotated[int | None, typer.Option(min=0, max=3, help="Of ZeRO.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Sequences of one.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.")] = None,
    tokens: Annotated[float | None, typer.Option(min=1, help="To train on: days and GPU-hours.")] = None,
    hours_between_failures: Annotated[float | None, typer.Option(help="Of one GPU.", show_default="50000")] = None,
    checkpoint_s: Annotated[
        float | None, typer.Option(help="That a checkpoint stops training.", show_default="30")
    ] = None,
    restart_s: Annotated[
        float | None, typer.Option(help="From a failure to the next step.", show_default="600")
    ] = None,
) -> None:
    """Print what a step of CONFIG will hold and move on each rank: memory by tier, bytes on the wire and on NVMe.

    With --hardware: how long it takes, too; of jobs for which there is no formula, from a run under virtual time.
    With --gpus N: what a step of a transformer will hold and how long it will take on N GPUs, in the fastest layout
    that fits or in the one that is asked for.
    """
    with one_sentence(shared=True):
        from zoo.cli.forecasting import forecast_of_model, refuse, refuse_model, table

        wanted: dict[str, Any] = {
            "tensor": tensor, "pipeline": pipeline, "stage": stage, "micro-batch": micro_batch, "recompute": recompute,
        }  # fmt: skip
        others = {
            "batch": batch, "tokens": tokens, "hours-between-failures": hours_between_failures,
            "checkpoint-s": checkpoint_s, "restart-s": restart_s,
        }  # fmt: skip
        of_jobs = {"peak": peak or None, "set": set_ or None, "ranks": ranks, "rank": rank, "device": device}
        refuse(gpus, of_models={**wanted, "seq": seq, **others}, of_jobs=of_jobs)
        if gpus is None and machine is None and software is not None:
            raise ValueError("--software is of a forecast of time: give --hardware too, or leave it out.")
        if gpus is not None:
            document = forecast_of_model(
                str(file_or_example(config)), gpus=gpus, seq=seq, task=task, machine=machine or "h100",
                software=software or "eager", given=_as_named(wanted), **_as_named(others),
            )  # fmt: skip
            typer.echo(json.dumps(document, indent=1) if as_json else table(document))
            return
        from zoo.train import forecast as make
        from zoo.train.config import read_document
        from zoo.train.tasks import with_task

        refuse_model(config)
        ranks, rank = ranks or 1, rank or 0
        if rank >= ranks:
            raise ValueError(f"rank={rank} of {ranks} ranks; it is from 0 to {ranks - 1}.")
        with with_task(task) as more:
            read = read_document(file_or_example(config), (*(set_ or ()), *more)).load(ranks)
            found = make(
                read, ranks=ranks, rank=rank, device=device, hardware=machine, software=software or "eager", peak=peak
            )
        typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else found.table())


def _as_named(options: dict[str, Any]) -> dict[str, Any]:
    """Those that are given, as names of arguments."""
    return {name.replace("-", "_"): value for name, value in options.items() if value is not None}


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="A model of transformers (folder, config.json), or MODULE:FUNCTION.")],
    shape: Annotated[str | None, typer.Option(help="Of the argument of MODULE:FUNCTION's model: 8,3,224,224.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences, of a model of transformers.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 512,
    backward: Annotated[bool, typer.Option("--backward", help="And the backward.")] = False,
    meta: Annotated[bool, typer.Option("--meta", help="Without values: no memory, and no seconds.")] = False,
    depth: Annotated[int, typer.Option(min=-1, help="Of the largest modules that are printed; -1: all.")] = -1,
    top: Annotated[int, typer.Option(min=1, help="How many of them at each depth.")] = 1,
    detailed: Annotated[bool, typer.Option(help="Print the tree of modules too.")] = True,
    peak_tflops: Annotated[float | None, typer.Option(min=0, help="Of the device: utilisation is printed.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write JSON.")] = None,
    flame_file: Annotated[Path | None, typer.Option("--flame", metavar="FILE", help="Write a flame graph.")] = None,
) -> None:
    """Print what each module of MODEL computes: FLOPs, parameters and, where there are values, seconds.

    MODULE:FUNCTION returns a model, or (model, args, kwargs). Models of transformers are profiled without values.
    """
    with one_sentence(shared=True):
        from zoo.cli.bench.results import check_writable
        from zoo.cli.profiling import profile_of, write

        for file in (json_file, flame_file):
            if file is not None:
                check_writable(file)
        profiler = profile_of(
            model, shape=shape, batch=batch, seq=seq, backward=backward, meta=meta, peak_tflops=peak_tflops or None
        )
        profiler.print_model_profile(profile_step=0, module_depth=depth, top_modules=top, detailed=detailed)
        write(profiler.profile, json_file, flame_file)


@app.command()
def explain(
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="What zoo said, or a part of it.")],
) -> None:
    """Print what a message of zoo means, and what to do."""
    with one_sentence(shared=True):
        from zoo.cli.explaining.messages import find

        known, found = find(message)
        if not found:
            raise ValueError(
                "no message of the index is like that; docs/reference/messages.md has all of them. "
                "Most messages of zoo say after a semicolon what to do."
            )
        if not known:
            typer.echo("not one of the index; the nearest are:\n")
        typer.echo("\n\n".join(map(str, found)))


@app.command()
def components(kind: Annotated[str | None, typer.Argument(help="Only this kind.")] = None) -> None:
    """Print every component that can be named in a configuration."""
    with one_sentence(shared=True):
        from zoo import registry

        kinds = registry.kinds()
        if kind is not None and kind not in kinds:
            raise ValueError(f"no kind is named {kind!r}; known: {', '.join(kinds)}")
        for name in [kind] if kind else kinds:
            typer.echo(name)
            for component in registry.names(name):
                typer.echo(f"  {component:<24}{registry.entry(name, component)}")
        for problem in registry.problems():
            typer.echo(f"problem: {problem}", err=True)


@config_app.command("explain")
def explain_configuration(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|KEY",
            show_default=False,
            help="A file or an example, or a key such as zero_optimization.stage.",
        ),
    ],
    set_: Set = None,
    given: Annotated[bool, typer.Option("--given", help="Of a file: leave out default values.")] = False,
) -> None:
    """Print every value of CONFIG and where it came from; or what KEY does, its type and its default."""
    with one_sentence(shared=True):
        from zoo.config import read

        config = file_or_example(Path(what))
        if not config.is_file() and config.suffix not in (".json", ".yaml", ".yml") and "/" not in what:
            from zoo.config.keys import explain_key

            if set_ or given:
                name = "--set" if set_ else "--given"
                raise ValueError(f"{name} goes with a configuration, and {what!r} is no file; leave it out.")
            typer.echo(explain_key(what))
            return

        document = read(config, overrides=set_ or ())
        if "train" in document.values:
            from zoo.train import read_config

            typer.echo(read_config(config, set_ or ()).explain(given=given))
        else:
            typer.echo(document.load().explain(given=given))


@config_app.command()
def schema() -> None:
    """Print the JSON schema of a configuration, for editors."""
    with one_sentence(shared=True):
        from zoo.config import json_schema

        typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def build(
    cpu: Annotated[bool, typer.Option("--cpu", help="The library for the CPU (the default).")] = False,
    cuda_arch: Annotated[
        str | None, typer.Option("--cuda-arch", metavar="80,90,100", help="The library for these GPUs.")
    ] = None,
) -> None:
    """Compile the native operations ahead of their first use, into the cache."""
    with one_sentence(shared=True):
        try:
            from zoo.kernels import building
        except ModuleNotFoundError as error:
            raise ValueError("there is nothing to build: the distribution zoo-kernels is not installed.") from error
        try:
            if cpu or cuda_arch is None:
                typer.echo(building.build(building.cpu_plan()))
                try:
                    typer.echo(building.build(building.python_plan()))
                except building.BuildError as error:  # what it spares is time: the operations run without it
                    typer.echo(f"zoo: without the module that prepares updates once: {error}", err=True)
            if cuda_arch is not None:
                typer.echo(building.build_cuda_library(building.parse_architectures(cuda_arch)))
        except building.BuildError as error:
            raise ValueError(str(error)) from error
