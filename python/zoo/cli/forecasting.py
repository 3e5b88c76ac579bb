"""``zoo forecast MODEL --gpus N``: the memory and the time of a step, before there is hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
    read_transformer,
)  # fmt: skip
from zoo.cost.step import time_lines

_GIB = 2.0**30
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


def forecast_of_model(
    path: str, *, gpus: int, batch: int, seq: int, machine: str, given: dict[str, Any], tokens: float | None,
    software: str, hours_between_failures: float, checkpoint_s: float, restart_s: float,
) -> dict[str, Any]:  # fmt: skip
    """The report as data.

    Args:
        path: of a ``config.json`` or its folder. machine: hardware by name or file. given: parts of the layout that
            are wanted, by their names; the rest is the fastest that fits. software: by name.
        tokens: to train on, for days.

    Raises:
        ValueError: what the user can fix.
    """
    model, found = read_transformer(path, seq=seq), read_hardware(machine)
    if software not in SOFTWARE:
        raise ValueError(f"no software is named {software!r}: known are {', '.join(SOFTWARE)}.")
    known = layouts(model, found, ranks=gpus, global_batch=batch, software=SOFTWARE[software])
    alike = [f for f in known if all(getattr(f.layout, n) == v for n, v in given.items())]
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
        "judged": len(known), "fitting": sum(f.fits for f in known),
    }  # fmt: skip
    if tokens is not None:
        seconds = tokens / chosen.time.tokens_per_s / max(kept.part, 1e-9)
        document["training"] = {"tokens": tokens, "days": seconds / 86_400, "gpu_hours": gpus * seconds / 3600}
    return document


def _wanted(
    model: Transformer, machine: Hardware, gpus: int, batch: int, given: dict[str, Any], software: Software
) -> Forecasted:
    """The layout that was asked for, where no search would propose it."""
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
        "", f"memory of a rank: {memory['total'] / _GIB:.1f} of {room / _GIB:.0f} GiB"
        + ("" if document["fits"] else " - it does not fit"),
        *(f"  {role:<28}{memory[role] / _GIB:>9.2f} GiB" for role in _ROLES if memory[role]),
        "", *time_lines(time),
        "", f"goodput {kept['part']:.1%} at {kept['failures_per_day']:.2g} failures a day"
        + (f", a checkpoint every {kept['interval_s'] / 60:.0f} min" if kept["interval_s"] else ""),
    ]  # fmt: skip
    if "training" in document:
        long = document["training"]
        lines.append(f"{long['tokens']:.3g} tokens: {long['days']:.1f} days, {long['gpu_hours']:,.0f} GPU-hours")
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
