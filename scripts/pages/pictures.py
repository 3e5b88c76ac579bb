"""The pictures of ``docs/concepts``: what the runtime says of placements, of a step, of its memory and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Any, NamedTuple

import torch

import zoo.cost
from zoo import sim
from zoo.cost.drawing import svg
from zoo.pipe import build
from zoo.pipe.simulate import simulate
from zoo.plan import Actions
from zoo.profiling import WorkCounter
from zoo.zero import ZeroOptimizer

RANKS = 4
ROLES = ("parameters", "gradients", "states")
COLOURS = ("#4f81bd", "#4d9e5b", "#d98032", "#8064a2")
NOTHING = "#f2f2f2"
SAMPLES, MORE = 64, 400
"""Samples that run here, and how many times as many the picture counts: FLOPs grow with them, messages do not."""
FONT = 'font-family="sans-serif" font-size="12"'


class Held(NamedTuple):
    """Of one role on one rank: which of ``num_parts`` equal parts it keeps; all of them where nothing is split."""

    parts: tuple[int, ...]
    num_parts: int


def pictures() -> dict[str, str]:
    """File name → SVG."""
    return {
        "stages.svg": stages(),
        "step.svg": svg(timeline(), title=f"One step at ZeRO stage 3 on two ranks, {SAMPLES * MORE:,} samples each"),
        "critical-path.svg": svg(timeline(), critical=True, title="The same step: what its end follows from"),
        "memory.svg": memory(),
        "pipeline.svg": pipeline(),
    }


# -- stages -----------------------------------------------------------------------------------------------------------


def held(stage: int) -> list[dict[str, Held]]:
    """By rank and role, as the placements of a bucket of a real optimizer on simulated ranks say."""

    def on(rank: int) -> dict[str, Held]:
        optimizer = ZeroOptimizer(torch.nn.Linear(8, 8), stage=stage, lr=0.1, param_persistence_threshold=0)
        found = {}
        for role in ROLES:
            placement = getattr(optimizer.buckets[0].placements, role)
            split = placement.split
            found[role] = Held(tuple(range(RANKS)), RANKS) if split is None else Held((split.rank,), split.size)
        optimizer.close()
        return found

    results: list[dict[str, Held]] = sim.run(RANKS, on)
    return results


def stages() -> str:
    """Four grids: rows are ranks, columns are parts of each role; coloured is what a rank keeps."""
    cell, gap, left, top = 22, 14, 60, 44
    role_width = RANKS * cell + gap
    panel = left + len(ROLES) * role_width + 16, RANKS * (cell + 2) + 60
    parts = [_open(2 * panel[0], 2 * panel[1])]
    for stage in range(4):
        x0, y0 = left + stage % 2 * panel[0], stage // 2 * panel[1]
        parts.append(f'<text x="{x0}" y="{y0 + 20}" font-size="15">stage {stage}</text>')
        for column, role in enumerate(ROLES):
            x = x0 + column * role_width + RANKS * cell / 2
            parts.append(f'<text x="{x}" y="{y0 + 38}" text-anchor="middle">{role}</text>')
        for rank, roles in enumerate(held(stage)):
            y = y0 + top + rank * (cell + 2)
            parts.append(f'<text x="{x0 - 8}" y="{y + 15}" text-anchor="end">rank {rank}</text>')
            for column, role in enumerate(ROLES):
                for part in range(RANKS):
                    x = x0 + column * role_width + part * cell
                    fill = COLOURS[part] if part in roles[role].parts else NOTHING
                    parts.append(f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{cell}" fill="{fill}"/>')
    return "\n".join([*parts, "</svg>", ""])


# -- a step -----------------------------------------------------------------------------------------------------------


@cache
def recorded(max_live_parameters: int = 0) -> tuple[Actions, ...]:
    """What two ranks did in the second step of a model of four layers at stage 3."""

    def on(rank: int) -> Actions:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        optimizer = ZeroOptimizer(
            model, stage=3, lr=1e-3, units=layers, param_persistence_threshold=0, reduce_bucket_size=70_000,
            max_live_parameters=max_live_parameters,
        )  # fmt: skip
        for _ in range(2):  # the first step learns the order of the layers
            with WorkCounter() as work, optimizer.sharded.record(work) as actions:
                model(torch.randn(SAMPLES, 256)).square().mean().backward()
                optimizer.step()
        return actions

    return tuple(sim.run(2, on))


def timeline() -> Any:
    """The recorded step on two A100s."""
    hardware = zoo.cost.read_hardware("a100-80")
    seconds = zoo.cost.seconds_on(hardware.device)
    programs = [
        zoo.cost.program_of(actions, seconds=lambda action: MORE * seconds(action), members=lambda collective: (0, 1))
        for actions in recorded()
    ]
    return zoo.cost.simulate_events(programs, zoo.cost.cost_on(hardware))


# -- memory -----------------------------------------------------------------------------------------------------------


def memory() -> str:
    """Bytes of whole parameters on a rank after each action of the step, for two settings."""
    curves = [
        ("max_live_parameters=0", recorded(0)[0].whole_bytes(), COLOURS[0]),
        ("max_live_parameters=1,000,000", recorded(1_000_000)[0].whole_bytes(), COLOURS[2]),
    ]
    whole = 4 * (256 * 256 + 256) * 4
    width, height, left, top, bottom = 760, 300, 70, 50, 250
    longest = max(len(found) for _, found, _ in curves)
    parts = [
        _open(width, height),
        f'<text x="{left}" y="22" font-size="15">Whole parameters on a rank, by action</text>',
    ]
    for tick in range(5):
        y = bottom - (bottom - top) * tick / 4
        parts.append(f'<line x1="{left}" y1="{y}" x2="{width - 20}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tick} layer{"s" * (tick != 1)}</text>')
    for number, (name, found, colour) in enumerate(curves):
        steps = [(left + (width - left - 20) * i / longest, bottom - (bottom - top) * one / whole)
                 for i, one in enumerate(found)]  # fmt: skip
        path = f"M{left},{bottom}" + "".join(f" H{x:.1f} V{y:.1f}" for x, y in steps)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        x = left + number * 220
        parts.append(f'<rect x="{x}" y="{height - 26}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{height - 16}">{escape(name)}</text>')
    parts.append(f'<text x="{width - 20}" y="{height - 16}" text-anchor="end">actions of one step</text>')
    return "\n".join([*parts, "</svg>", ""])


# -- pipelines --------------------------------------------------------------------------------------------------------

FORWARD, BACKWARD, WEIGHT = "#4f81bd", "#4d9e5b", "#8064a2"
OF_KIND = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}


def pipeline(names: Sequence[str] = ("gpipe", "1f1b", "zb_h1"), ranks: int = 4, micro_batches: int = 6) -> str:
    """Schedules as tables: rows are ranks, a cell is a computation with the number of its micro-batch."""
    unit, row, left = 18, 22, 60
    found = [(name, simulate(build(name, num_ranks=ranks, num_micro_batches=micro_batches))) for name in names]
    longest = max(span.end_s for _, one in found for span in one.spans)
    panel = ranks * (row + 2) + 44
    width, height = int(left + longest * unit + 20), len(found) * panel + 34
    parts = [_open(width, height)]
    for number, (name, one) in enumerate(found):
        top = number * panel + 30
        title = f"{name}: bubble {one.bubble:.0%}"
        parts.append(f'<text x="{left}" y="{top - 8}" font-size="15">{escape(title)}</text>')
        for rank in range(ranks):
            y = top + rank * (row + 2)
            parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">rank {rank}</text>')
        for span in one.spans:
            x, y = left + span.start_s * unit, top + span.rank * (row + 2)
            size = (span.end_s - span.start_s) * unit
            fill = OF_KIND[span.computation.kind.value]
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{size - 1:.1f}" height="{row}" fill="{fill}"/>')
            parts.append(
                f'<text x="{x + size / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="#ffffff">'
                f"{span.computation.micro_batch}</text>"
            )
    for number, (word, colour) in enumerate((("forward", FORWARD), ("backward", BACKWARD), ("of weights", WEIGHT))):
        x = left + number * 110
        parts.append(f'<rect x="{x}" y="{height - 22}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{height - 12}">{word}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _open(width: float, height: float) -> str:
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} {FONT}>'
    return f'{head}\n<rect {size} fill="#ffffff"/>'
