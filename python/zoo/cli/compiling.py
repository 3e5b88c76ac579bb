"""``zoo compile``: what the passes make of a model, and the time and memory of a step of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo.cli.failure import one_sentence

if TYPE_CHECKING:
    from zoo.compile import WholeGraph
    from zoo.compile.timeline import Recording

app = typer.Typer(no_args_is_help=True, help="Look at compiled models.")


@app.callback()
def _group() -> None:
    """Keeps `report` a command of its own name."""


@app.command()
def report(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="MODULE:FUNCTION, a configuration of zoo train, or an example such as byte_lm.")
    ],
    shape: Annotated[str | None, typer.Option(help="Of the argument of MODULE:FUNCTION's model: 8,3,224,224.")] = None,
    stage: Annotated[int, typer.Option(min=0, max=3, help="Of ZeRO, for MODULE:FUNCTION.")] = 3,
    live: Annotated[int, typer.Option(min=0, help="Its max_live_parameters.")] = 0,
    prefetch: Annotated[int, typer.Option(min=0, help="Its prefetch_bucket_size.")] = 0,
    bucket: Annotated[int, typer.Option(min=1, help="Its reduce_bucket_size: elements of a gather.")] = 1,
    persist: Annotated[int, typer.Option(min=0, help="Its param_persistence_threshold.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another value of a configuration.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Among which the step is foretold.")] = 8,
    machine: Annotated[str, typer.Option("--hardware", help="By name (h100), or a file.")] = "h100",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw memory over time: .svg, .png or .pdf.")] = None,
) -> None:
    """Compile MODEL as one graph, run two steps of it on two simulated ranks, and print what each pass did, and the
    seconds and bytes of such a step on other hardware.

    The sizes are those that the model is called with here (each rank has half of a configuration's batch); nothing is
    measured.
    """
    with one_sentence(shared=False):
        from zoo.cost import read_hardware

        hardware, of_configuration = read_hardware(machine), Path(model).is_file() or ":" not in model
        _refuse(context, of_configuration=of_configuration)
        if of_configuration:
            whole, found = _of_configuration(model, set_ or [])
        else:
            whole, found = _of_function(
                model, shape, stage=stage, max_live_parameters=live, prefetch_bucket_size=prefetch,
                param_persistence_threshold=persist, reduce_bucket_size=bucket,
            )  # fmt: skip
        typer.echo(whole.report())
        if not found.marks:
            raise ValueError("no graph ran: the reason is above.")
        typer.echo(_foretold(found, hardware, ranks))
        if out is not None:
            from zoo.compile.picture import draw

            draw(found.memory(found.simulate(hardware, ranks=ranks)), out, title=f"{model}, on {ranks} of {machine}")
            typer.echo(out)


def _refuse(context: typer.Context, *, of_configuration: bool) -> None:
    """Options that would have no effect."""
    of_functions = ("shape", "stage", "live", "prefetch", "bucket", "persist")
    for name in of_functions if of_configuration else ("set_",):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            what, other = "MODULE:FUNCTION", "a configuration is changed by --set KEY=VALUE"
            if not of_configuration:
                what, other = (
                    "a configuration",
                    "those of a function are --stage, --live, --prefetch, --bucket, --persist",
                )
            raise ValueError(f"--{name.rstrip('_')} is for {what}; leave it out ({other}).")


def _of_function(name: str, shape: str | None, **options: Any) -> tuple[WholeGraph, Recording]:
    from zoo.cli.profiling import call_of_function, first_tensor, output_of
    from zoo.compile import compile_whole
    from zoo.compile.timeline import recording
    from zoo.zero import ZeroOptimizer

    first_tensor(output_of(*call_of_function(name, shape)))  # what cannot be is said here, before anything traces it

    def train(rank: int) -> tuple[WholeGraph, Recording]:
        net, args, kwargs = call_of_function(name, shape)
        optimizer = ZeroOptimizer(net, lr=0.0, **options)
        whole = compile_whole(optimizer.sharded, "aot_eager")
        for _ in range(2):  # what is gathered ahead is known from the first one
            with recording(whole) as found:
                optimizer.backward(first_tensor(net(*args, **kwargs)).sum())
        return whole, found

    return _on_two_ranks(train)


def _of_configuration(given: str, overrides: list[str]) -> tuple[WholeGraph, Recording]:
    from zoo import registry
    from zoo.cli.app import file_or_example
    from zoo.compile.timeline import recording
    from zoo.engine import initialize
    from zoo.train import Task
    from zoo.train.config import read_document

    graph = ["compile.enabled=true", "compile.deepcompile=true", "compile.backend=aot_eager"]
    config = read_document(file_or_example(Path(given)), [*graph, *overrides]).load(world_size=2)
    if config.train is None:
        raise ValueError("the configuration has no train section; add one (see zoo.train.TrainConfig).")
    choice = config.train.task

    def train(rank: int) -> tuple[WholeGraph, Recording]:
        task: Task = registry.build("task", choice.type, choice.params, seed=config.seed)
        net = task.model()
        engine, *_ = initialize(config, net, training_data=task.training_data(), monitors=False)
        whole: Any = net._compiled_call_impl
        if whole is None:
            raise ValueError("the model is not one graph: compile.enabled and compile.deepcompile are set otherwise.")
        for _ in range(2):
            with recording(whole) as found:
                engine.train_batch()
        return whole, found

    return _on_two_ranks(train)


def _on_two_ranks(train: Callable[[int], tuple[WholeGraph, Recording]]) -> tuple[WholeGraph, Recording]:
    """What the first of two has found: one alone gathers nothing ahead."""
    from zoo import sim

    try:
        found: Any = sim.run(2, train)[0]
    except sim.RankError as error:
        if isinstance(error.__cause__, ValueError):  # what the user can do is known of one rank
            raise error.__cause__ from None
        raise
    made: tuple[WholeGraph, Recording] = found
    return made


def _foretold(found: Recording, hardware: Any, ranks: int) -> str:
    """The step on that hardware, in lines."""
    timeline = found.simulate(hardware, ranks=ranks)
    moments = found.memory(timeline)
    work = [mark.of.total for mark in found.marks]
    gathered = max(moments, key=lambda moment: moment.gathered_bytes)
    highest = max(moments, key=lambda moment: moment.gathered_bytes + moment.value_bytes)
    starts = found.actions.starts()
    sent = sum(collective.num_bytes for action in starts for collective in action.collectives)
    computes = math.fsum(end - start for start, end, _ in timeline.computed[0])
    exposed = math.fsum(timeline.exposed_s[0].values())
    return "\n".join(
        (
            f"this step                {len(starts)} starts of communication, {sent:,} bytes; "
            f"{sum(one.flops for one in work):,} FLOPs",
            f"on {f'{ranks} of {hardware.name}':<22}{1e3 * timeline.makespan_s:.4g} ms, computation "
            f"{1e3 * computes:.4g}, exposed communication {1e3 * exposed:.4g}",
            f"gathered at most         {gathered.gathered_bytes:,} bytes, at {gathered.name!r}",
            f"gathered and values      {highest.gathered_bytes + highest.value_bytes:,} bytes at most, at "
            f"{highest.name!r}",
        )
    )
