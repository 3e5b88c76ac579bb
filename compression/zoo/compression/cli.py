"""``zoo compress``: quantise a task's trained model, and report what that did. Component ``command.compress``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo.cli.failure import one_sentence

if TYPE_CHECKING:
    from torch import nn

    from zoo.train import Task

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Compress a trained model, and report what that did."
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="Of the run: its section train.task says the model.")]
Weights = Annotated[
    Path | None, typer.Option(help="A safetensors file: weights, or packed layers.", show_default="the task's own")
]


@app.command()
def quantise(
    config: Config,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    weights: Weights = None,
    bits: Annotated[int, typer.Option(help="8 or 4.")] = 8,
    group_size: Annotated[int, typer.Option(help="Elements of a row that share a scale; 0 for a row.")] = 64,
    minima: Annotated[bool, typer.Option("--minima", help="Groups have a minimum besides.")] = False,
    gptq: Annotated[bool, typer.Option("--gptq", help="Errors are made good by later columns.")] = False,
    blocks: Annotated[str | None, typer.Option(help="For --gptq: the list of blocks, such as model.layers.")] = None,
    samples: Annotated[int, typer.Option(help="For --gptq: training samples that calibrate.")] = 32,
    leave_out: Annotated[list[str] | None, typer.Option(help="A pattern of layers that stay; repeat it.")] = None,
) -> None:
    """Round the linear layers of the model of CONFIG, pack them, and write them to a file."""
    with one_sentence(shared=True):
        from zoo.compression.packed import pack_model, save_packed
        from zoo.compression.post_training import Recipe, Uniform
        from zoo.compression.post_training import quantise as apply

        task = _task(config)
        model = _loaded(task, weights)
        recipe = Recipe(
            grid=Uniform(bits=bits, symmetric=not minima), group_size=group_size, leave_out=leave_out or (),
            method="gptq" if gptq else "nearest", candidates=20,
        )  # fmt: skip
        found: dict[str, Any] = {}
        if gptq:
            chain = _blocks(model, blocks)
            data = task.training_data()
            picked = [data[len(data) * i // samples] for i in range(samples)]  # type: ignore[arg-type]
            found = {"blocks": chain, "batches": [tuple(part[None] for part in sample) for sample in picked]}
        layers = apply(model, recipe, **found)
        save_packed(pack_model(model, layers), out)
        typer.echo(f"{len(layers)} layers of {bits} bits: {out}, {out.stat().st_size:,} bytes")


@app.command()
def report(
    config: Config,
    after: Annotated[Path, typer.Option(help="A safetensors file: weights, or packed layers.")],
    before: Weights = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Bits, sparsity, bytes, FLOPs by layer, and the validation loss, of two versions of the model of CONFIG."""
    with one_sentence(shared=True):
        from zoo.compression.report import report as look

        task = _task(config)
        data = task.validation_data()
        first = tuple(part[None] for part in data[0])

        def loss(model: nn.Module) -> float:
            values = [float(model(*(part[None] for part in data[i]))) for i in range(len(data))]  # type: ignore[arg-type]
            return sum(values) / len(values)

        found = look(
            _loaded(task, before), _loaded(task, after), inputs=first, measure=loss,
            unit=f"validation loss, nats a {task.unit}",
        )  # fmt: skip
        typer.echo(found.table())
        if plot is not None:
            found.plot(plot)
        if json_ is not None:
            json_.write_text(json.dumps(found.to_dict(), indent=1) + "\n")


def _task(config: Path) -> Task:
    from zoo import registry
    from zoo.train import read_config

    read = read_config(config, [])
    choice = read.train.task
    made: Task = registry.build("task", choice.type, choice.params, seed=read.seed)
    return made


def _loaded(task: Task, weights: Path | None) -> nn.Module:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    from zoo.compression.packed import load_packed
    from zoo.compression.packed.files import KEY

    model = task.model()
    if weights is None:
        return model
    try:
        with safe_open(weights, framework="pt") as file:
            packed = KEY in (file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{weights} is no whole safetensors file: {error}.") from error
    if packed:
        return load_packed(model, weights)
    found, mine = load_file(weights), model.state_dict()
    tied = {name for name, p in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    missing = sorted(mine.keys() - found.keys() - tied)
    different = sorted(name for name in found if name not in mine or mine[name].shape != found[name].shape)
    if missing or different:
        raise ValueError(
            f"{weights} is no file of this task's model: it lacks {missing[:5]}, and has of another shape or besides "
            f"{different[:5]}."
        )
    model.load_state_dict(found, strict=False)
    return model


def _blocks(model: nn.Module, path: str | None) -> list[nn.Module]:
    from torch import nn

    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if path is None and len(lists) == 1:
        return list(next(iter(lists.values())))
    if path not in lists:
        raise ValueError(
            f"--blocks is {path!r}; --gptq goes through the model block by block, and needs one of its lists of "
            f"modules: {', '.join(lists) or 'it has none'}."
        )
    return list(lists[path])
