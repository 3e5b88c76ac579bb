"""A profile as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.profiling import strings
from zoo.profiling.profile import ModuleProfile, Profile, written

__all__ = ["aggregated", "put", "tree", "whole"]

_WIDE = 86


def put(text: str, output_file: str | Path | None) -> None:
    """To a file, or to standard output."""
    if output_file:
        written(output_file, text + "\n")
    else:
        sys.stdout.write(text + "\n")


def whole(
    profile: Profile, *, step: int, depth: int, top: int, detailed: bool, engine: Any = None,
    peak_flops_per_s: float | None = None,
) -> str:  # fmt: skip
    """Totals, the largest modules, the tree."""
    parts = [_line(" FLOPs profile "), f"Profile at step {step}", "", *_totals(profile, engine, peak_flops_per_s)]
    if profile.not_counted:
        names = ", ".join(f"{name} ({calls})" for name, calls in sorted(profile.not_counted.items()))
        parts += ["", f"Not counted, because they have no formula (calls): {names}"]
    parts += ["", _line(" Largest modules "), aggregated(profile, depth=depth, top=top)]
    if detailed:
        parts += ["", _line(" Modules "), _LEGEND, "", tree(profile)]
    return "\n".join([*parts, _line("")])


def _line(title: str) -> str:
    return title.center(_WIDE, "-")


_LEGEND = (
    "Of each module: parameters, multiply-accumulates and seconds of its forward, each with its part of the model's, "
    "and FLOPs a second.\nWhat a module does beside calling its modules is in its own numbers alone."
)


# -- totals -----------------------------------------------------------------------------------------------------------


def _totals(profile: Profile, engine: Any, peak: float | None) -> list[str]:
    rows = [*_job(engine), *_parameters(profile, engine), *_forward(profile), *_backward(profile)]
    if peak is not None and profile.training_s:
        use = profile.utilisation(peak)
        rows += [("model FLOPs utilisation (MFU)", f"{100 * use.mfu:.3g} %")]
        rows += [("hardware FLOPs utilisation (HFU), with recomputation", f"{100 * use.hfu:.3g} %")]
    return [f"{name + ':':<64}  {value}" for name, value in rows]


def _job(engine: Any) -> Iterator[tuple[str, Any]]:
    if engine is None:
        return
    size = _ask(engine, "dp_world_size")
    yield "world size", _ask(engine, "world_size")
    yield "data parallel size", _ask(engine, "seq_dp_world_size") if size is None else size
    yield "model parallel size", _ask(engine, "mp_world_size")
    yield "micro-batch of a rank", _ask(engine, "train_micro_batch_size_per_gpu")


def _ask(engine: Any, name: str) -> Any:
    found = getattr(engine, name, None)
    return found() if callable(found) else found


def _parameters(profile: Profile, engine: Any) -> Iterator[tuple[str, Any]]:
    model = profile.model.parameters
    text = strings.params_to_string
    yield "parameters", text(model.numel)
    if model.kept != model.numel:
        yield "parameters that this rank keeps", text(model.kept)
    if model.active != model.numel:
        yield "parameters that one token meets (active experts)", text(model.active)
    ranks = _ask(engine, "mp_world_size") if engine is not None else None
    if isinstance(ranks, int) and ranks > 1:
        yield "parameters of the model = parameters * model parallel size", text(model.numel * ranks)


def _forward(profile: Profile) -> Iterator[tuple[str, Any]]:
    model = profile.model
    number = strings.number_to_string
    yield "multiply-accumulates of forward", strings.macs_to_string(model.forward.macs)
    yield "FLOPs of forward = 2 * multiply-accumulates", number(model.forward.flops)
    if model.forward.masked_macs:
        yield "FLOPs of forward without what causal masks hide", number(model.forward.causal_flops)
    yield "elementwise operations of forward (in no other number)", number(model.forward.elementwise)
    if model.seconds:
        yield "seconds of forward", strings.duration_to_string(model.seconds)
        yield "FLOPs a second of forward", strings.flops_to_string(model.forward.flops / model.seconds)


def _backward(profile: Profile) -> Iterator[tuple[str, Any]]:
    if not profile.has_backward:
        return
    model, number = profile.model, strings.number_to_string
    yield "FLOPs of backward", number(model.backward.flops)
    yield "FLOPs of recomputation in backward", number(model.recomputation.flops)
    if profile.backward_s and profile.training_s:
        again = model.backward.flops + model.recomputation.flops
        yield "seconds of backward", strings.duration_to_string(profile.backward_s)
        yield "FLOPs a second of backward and recomputation", strings.flops_to_string(again / profile.backward_s)
        yield "model FLOPs a second of both", strings.flops_to_string(profile.model_flops / profile.training_s)
        yield "hardware FLOPs a second of both", strings.flops_to_string(profile.hardware_flops / profile.training_s)


# -- the largest modules ----------------------------------------------------------------------------------------------


def aggregated(profile: Profile, *, depth: int, top: int) -> str:
    """Of each depth the classes with the most parameters, multiply-accumulates and seconds."""
    classes: dict[int, dict[str, list[float]]] = {}
    for level, module in profile.model.walk():
        sums = classes.setdefault(level, {}).setdefault(module.kind, [0.0, 0.0, 0.0])
        for i, value in enumerate((module.parameters.numel, module.forward.macs, module.seconds or 0.0)):
            sums[i] += value
    deepest = len(classes) - 1 if depth == -1 else min(depth, len(classes) - 1)
    columns = [("parameters", strings.params_to_string), ("MACs", strings.macs_to_string)]
    if profile.model.seconds is not None:
        columns.append(("seconds", strings.duration_to_string))
    lines = [f"The first {top} at each depth:"]
    for level in range(deepest + 1):
        lines.append(f"depth {level}:")
        for i, (title, text) in enumerate(columns):
            largest = sorted(classes[level].items(), key=lambda one: -one[1][i])[:top]
            lines.append(f"    {title:<11}" + ", ".join(f"{kind} {text(sums[i])}" for kind, sums in largest))
    return "\n".join(lines)


# -- the tree ---------------------------------------------------------------------------------------------------------


def tree(profile: Profile) -> str:
    """Modules as torch prints them, each with its numbers."""
    return "\n".join(_module(profile.model, profile.model, "", ""))


def _module(module: ModuleProfile, model: ModuleProfile, indent: str, name: str) -> Iterator[str]:
    head = f"{indent}{name}{module.kind}("
    numbers = _numbers(module, model) + (f", {module.extra}" if module.extra and not module.children else "")
    if not module.children:
        yield f"{head}{numbers})"
        return
    yield head
    yield f"{indent}  {numbers}"
    for child in module.children:
        yield from _module(child, model, indent + "  ", f"({child.name}): ")
    yield indent + ")"


def _numbers(module: ModuleProfile, model: ModuleProfile) -> str:
    own, of = module.parameters, model.parameters.numel
    parts = [
        f"{strings.params_to_string(own.numel)} = {_part(own.numel, of)} of parameters",
        f"{strings.macs_to_string(module.forward.macs)} = {_part(module.forward.macs, model.forward.macs)} of MACs",
    ]
    if own.active != own.numel:
        parts.insert(1, f"{strings.params_to_string(own.active)} active")
    if module.seconds is not None:
        parts.append(f"{strings.duration_to_string(module.seconds)} = {_part(module.seconds, model.seconds)} of time")
        parts.append(strings.flops_to_string(module.forward.flops / module.seconds if module.seconds else 0.0))
    return ", ".join(parts)


def _part(value: float, of: float | None) -> str:
    return f"{round(100 * value / of, 2) if of else 0:g} %"
