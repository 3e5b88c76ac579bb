"""``zoo forecast MODEL --gpus N``: the memory and the time of a step, before there is hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.cost import (
    SOFTWARE,
    Forecasted,
    Hardware,
    Layout,
    Software,
    Transformer,
    forecast_layout,
    goodput,
    layouts,
    nearest,
    read_hardware,
    transformer_of,
)  # fmt: skip
from zoo.cost.reading import longest_of, read_config
from zoo.cost.step import time_lines

_GIB = 2.0**30
_SEQ = 4096
_ROLES = ("parameters", "gradients", "states", "activations", "gathered", "head")


def refuse(gpus: int | None, *, of_models: Mapping[str, Any], of_jobs: Mapping[str, Any]) -> None:
    """Options that would have no effect: those of a model's forecast without ``--gpus``, and those of a job's with it.

    Raises:
        ValueError: one is given (is not None).
    """
    for name, value in (of_models if gpus is None else of_jobs).items():
        if value is not None and gpus is None:
            raise ValueError(f"--{name} goes with --gpus N and a model's config.json; add --gpus, or leave it out.")
        if value is not None:
            raise ValueError(f"--{name} is for a configuration of zoo train; leave out --gpus, or leave out --{name}.")


def refuse_model(path: Path) -> None:
    """A model, its config.json or MODULE:FUNCTION, where a configuration of a job is expected.

    Raises:
        ValueError: it is one.
    """
    if ":" in str(path) and not path.exists() and not path.suffix:
        raise ValueError(f"{path} is no file; if it is MODULE:FUNCTION that gives a model, add --gpus N.")
    try:
        config = read_config(path)
    except (ValueError, OSError):
        return  # whoever reads configurations says what is wrong
    if "model_type" in config and "train" not in config:
        raise ValueError(
            f"{path} is a model ({config['model_type']}), no configuration of zoo train: add --gpus N for a forecast "
            "of the model, or give a configuration whose task trains it."
        )


def shape_of_model(source: str, *, seq: int | None, task: str | None) -> tuple[Transformer, list[str]]:
    """The shape of a model, and what is to be said of it.

    Args:
        source: a config.json or its folder; MODULE:FUNCTION, which gives a :class:`zoo.cost.Transformer`, a model, a
            configuration of transformers or a dict like one; or a configuration of ``zoo train`` or an example, whose
            task has the model. seq: tokens of a sequence; None for 4,096, or as many as the model has, or the task's.
            task: MODULE:FUNCTION, in the place of the configuration's.

    Raises:
        ValueError: what the user can fix.
    """
    path = Path(source)
    if not path.exists() and ":" in source:
        if task is not None:
            raise ValueError(f"--task goes with a configuration of zoo train; {source!r} is a model: leave one out.")
        made = _called(source)
        if isinstance(made, Transformer):
            shape = made if seq is None else dataclasses.replace(made, seq=seq)
            return shape, []
        config = _document_of(made, source)
    elif task is None and path.suffix not in (".yaml", ".yml") and "train" not in read_config(path):
        config = read_config(path)
    else:
        config, of_task = _of_task(source, task)
        seq = of_task if seq is None else seq
    longest = longest_of(config)
    shape = transformer_of(config, seq=min(_SEQ, longest or _SEQ) if seq is None else seq)
    if longest is None or shape.seq <= longest:
        return shape, []
    return shape, [f"sequences of {shape.seq:,} tokens: the model states {longest:,} positions"]


def _called(name: str) -> Any:
    """What MODULE:FUNCTION returns; models are made without memory where they can be."""
    import torch

    from zoo.cli.profiling import function_of

    make = function_of(name)
    try:
        try:
            with torch.device("meta"):
                made = make()
        except (RuntimeError, NotImplementedError):  # it looks at values
            made = make()
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
    return made[0] if isinstance(made, tuple) and made else made


def _document_of(made: Any, name: str) -> dict[str, Any]:
    """The configuration of a model, as transformers writes it."""
    config = made if isinstance(made, Mapping) else getattr(made, "config", made)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{name} gives a {type(made).__name__}, which has no config of transformers that says its shape. It may "
            "give a zoo.cost.Transformer; zoo forecast CONFIG --ranks N --hardware NAME runs a job of any model under "
            "virtual time."
        )
    return dict(config)


def _of_task(source: str, task: str | None) -> tuple[dict[str, Any], int]:
    """(configuration of the model, tokens of a sample) of the task of a configuration of ``zoo train``."""
    from zoo.registry import DEFAULT
    from zoo.train.config import read_document
    from zoo.train.dry import task_of
    from zoo.train.forecasting import model_of
    from zoo.train.tasks import with_task

    with with_task(task) as more:
        config = read_document(source, more).load(1)
        made = task_of(config, DEFAULT)
        name = config.train.task.type if config.train is not None else source
        return _document_of(model_of(made, config), f"the task {name!r}"), made.units_per_sample


def forecast_of_model(
    path: str, *, gpus: int, batch: int = 256, seq: int | None, machine: str, given: dict[str, Any],
    tokens: float | None = None, software: str, hours_between_failures: float = 50_000.0, checkpoint_s: float = 30.0,
    restart_s: float = 600.0, task: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The report as data.

    Args:
        path, seq, task: see :func:`shape_of_model`. machine: hardware by name or file. given: parts of the layout that
            are wanted, by their names; the rest is the fastest that fits. software: by name.
        tokens: to train on, for days.

    Raises:
        ValueError: what the user can fix.
    """
    model, notes = shape_of_model(path, seq=seq, task=task)
    found = read_hardware(machine)
    if software not in SOFTWARE:
        raise ValueError(f"no software is named {software!r}: known are {', '.join(SOFTWARE)}.")
    known = layouts(model, found, ranks=gpus, global_batch=batch, software=SOFTWARE[software])
    alike = [f for f in known if all(getattr(f.layout, n) == v for n, v in given.items())]
    if not alike:
        alike = _with(given, known, model, found, SOFTWARE[software])
    chosen = alike[0] if alike else _wanted(model, found, gpus, batch, given, SOFTWARE[software])
    kept = goodput(
        ranks=gpus, hours_between_failures=hours_between_failures, checkpoint_s=checkpoint_s, restart_s=restart_s
    )
    document = {
        "parameters": model.parameters, "hardware": found.name, "software": software,
        "layout": dataclasses.asdict(chosen.layout),
        "fits": chosen.fits, "memory": chosen.memory.to_dict(), "device_bytes": found.device.memory_bytes,
        "time": chosen.time.to_dict(), "goodput": dataclasses.asdict(kept),
        "nearest": [] if chosen.fits else [_short(f, chosen.layout) for f in nearest(chosen.layout, known)],
        "fastest": [_short(f, chosen.layout) for f in known[:5] if f.fits and f.layout != chosen.layout],
        "notes": notes,
        "judged": len(known), "fitting": sum(f.fits for f in known),
    }  # fmt: skip
    if tokens is not None:
        # None: it never ends, for failures come faster than it gets on.
        seconds = tokens / chosen.time.tokens_per_s / kept.part if kept.part else None
        document["training"] = {
            "tokens": tokens, "days": None if seconds is None else seconds / 86_400,
            "gpu_hours": None if seconds is None else gpus * seconds / 3600,
        }  # fmt: skip
    return document


def _with(
    given: dict[str, Any], known: Sequence[Forecasted], model: Transformer, machine: Hardware, software: Software
) -> list[Forecasted]:
    """Layouts like the known ones but for what is given, which no search proposes: those that fit first."""
    made: set[Layout] = set()
    for found in known:
        sizes = {**dataclasses.asdict(found.layout), **given}
        apart = sizes["tensor"] * sizes["pipeline"]
        data = found.layout.ranks // apart
        odd = data == 1 or (sizes["pipeline"] > 1 and sizes["stage"] > 1)
        if found.layout.ranks % apart or ("stage" not in given and sizes["stage"] and odd):
            continue
        try:
            layout = Layout(**{**sizes, "data": data, "sequence_parallel": sizes["tensor"] > 1})
            layout.check(model)
        except ValueError:
            continue
        made.add(layout)
    every = [forecast_layout(model, layout, machine, software) for layout in made]
    return sorted(every, key=lambda f: (not f.fits, f.time.step_s if f.fits else f.memory.total, str(f.layout)))


def _wanted(
    model: Transformer, machine: Hardware, gpus: int, batch: int, given: dict[str, Any], software: Software
) -> Forecasted:
    """The layout that was asked for, where nothing else can be chosen for it: mostly to say why it cannot be."""
    sizes = {"tensor": 1, "pipeline": 1, **given}
    apart = sizes["tensor"] * sizes["pipeline"]
    if gpus % apart:
        raise ValueError(
            f"tensor={sizes['tensor']} and pipeline={sizes['pipeline']} need a multiple of {apart} GPUs, not {gpus}."
        )
    layout = Layout(global_batch=batch, data=gpus // apart, sequence_parallel=sizes["tensor"] > 1, **sizes)
    return forecast_layout(model, layout, machine, software)


def _short(found: Forecasted, beside: Layout) -> dict[str, Any]:
    return {
        "changes": found.differs(beside), "step_s": found.time.step_s, "mfu": found.time.mfu,
        "total_bytes": found.memory.total,
    }  # fmt: skip


def table(document: dict[str, Any]) -> str:
    """The report as text."""
    layout, time, memory, kept = (document[k] for k in ("layout", "time", "memory", "goodput"))
    ranks, room = time["ranks"], document["device_bytes"]
    shape = ", ".join(f"{n} {layout[n]}" for n in ("tensor", "data", "pipeline") if layout[n] > 1) or "one rank"
    lines = [
        f"{document['parameters'] / 1e9:.2f} B parameters on {ranks:,} of {document['hardware']}, software "
        f"{document['software']}: {shape}, ZeRO stage {layout['stage']}, micro-batch {layout['micro_batch']}, "
        f"recompute {layout['recompute']}",
        *(f"note: {note}" for note in document["notes"]),
        "", f"memory of a rank: {memory['total'] / _GIB:.1f} of {room / _GIB:.0f} GiB"
        + ("" if document["fits"] else " - it does not fit"),
        *(f"  {role:<28}{memory[role] / _GIB:>9.2f} GiB" for role in _ROLES if memory[role]),
        "", *time_lines(time),
        "", f"goodput {kept['part']:.1%} at {kept['failures_per_day']:.2g} failures a day"
        + (f", a checkpoint every {kept['interval_s'] / 60:.0f} min" if kept["interval_s"] else ""),
    ]  # fmt: skip
    if "training" in document:
        long = document["training"]
        takes = "never, failures come faster than a job of so many GPUs gets on"
        if long["days"] is not None:
            takes = f"{long['days']:.1f} days, {long['gpu_hours']:,.0f} GPU-hours"
        lines.append(f"{long['tokens']:.3g} tokens: {takes}")
    lines += _others("nearest layouts that fit", document["nearest"])
    if not document["fits"] and not document["nearest"]:
        lines += [
            "",
            "no layout of these ranks fits: take more ranks, a smaller batch, or offload (zoo forecast CONFIG)",
        ]
    lines += _others(f"fastest of {document['fitting']} that fit ({document['judged']} judged)", document["fastest"])
    return "\n".join(lines)


def _others(title: str, found: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        f"  {f['step_s']:>8.3f} s  MFU {f['mfu']:>5.1%}  {f['total_bytes'] / _GIB:>6.1f} GiB  "
        + ", ".join(f["changes"])
        for f in found
    ]
    return ["", f"{title}:", *rows] if rows else []
