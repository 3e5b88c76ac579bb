"""Measures all contenders in one process, in turns, and writes the page."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from benchmarks.activation_checkpointing.contenders import Block, Checkpoint, Tiny, contenders, step
from benchmarks.activation_checkpointing.memory import Peak
from benchmarks.common import Spread, facts, machine, remarks, table
from torch import nn

PAGE = Path(__file__).with_name("RESULTS.md")
TARGET = 1.02


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--shape", type=int, nargs=2, default=(4, 128), metavar=("BATCH", "LENGTH"))
    parser.add_argument("--folder", type=Path, default=None, help="for NVMe; a temporary one")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        ways = contenders(Path(folder), given.blocks)
        x = torch.randn(*given.shape, given.width, requires_grad=True)
        blocks: list[nn.Module] = [Block(given.width) for _ in range(given.blocks)]
        check(blocks, ways, x)
        times = rounds(blocks, ways, x, given.rounds, 1)
        memory = {name: peak(blocks, how, x) for name, how in ways.items()}
        tiny: list[nn.Module] = [Tiny(8) for _ in range(given.blocks)]
        calls = rounds(tiny, ways, torch.randn(8, requires_grad=True), given.rounds, 20)
    where = f"{given.blocks} blocks of width {given.width}, {given.shape[0]} sequences of {given.shape[1]}"
    given.page.write_text(page(where, given, times, memory, calls), encoding="utf-8")


def check(blocks: list[nn.Module], ways: dict[str, Checkpoint], x: torch.Tensor) -> None:
    """All have the same gradients, bit for bit."""
    expected: list[torch.Tensor | None] = []
    for name, how in ways.items():
        x.grad = None
        step(blocks, how, x)
        found = [x.grad, *(p.grad for block in blocks for p in block.parameters())]
        expected = expected or found
        if not all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise SystemExit(f"the gradients of {name!r} are not those without checkpoints")


def rounds(
    blocks: list[nn.Module], ways: dict[str, Checkpoint], x: torch.Tensor, number: int, steps: int
) -> dict[str, list[float]]:
    """CPU seconds of a step, all threads together: one turn a round, each round begins with another contender."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(number + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            x.grad = None
            step(blocks, ways[name], x)  # warm
            start = time.process_time()
            for _ in range(steps):
                step(blocks, ways[name], x)
            if turn:
                found[name].append((time.process_time() - start) / steps)
    return found


def peak(blocks: list[nn.Module], how: Checkpoint, x: torch.Tensor) -> int:
    """The most bytes of tensors of one step; of a warm one with the buffers that were there before."""
    owner = getattr(how, "__self__", None)
    if owner is not None:
        owner.reset()
    for block in blocks:
        block.zero_grad(set_to_none=True)
    x.grad = None
    with Peak() as seen:
        step(blocks, how, x)
    return seen.most


def page(
    where: str, given: argparse.Namespace, times: dict[str, list[float]], memory: dict[str, int],
    calls: dict[str, list[float]],
) -> str:  # fmt: skip
    def ratio(of: dict[str, list[float]], name: str, base: str) -> Spread:
        return Spread(tuple(a / b for a, b in zip(of[name], of[base], strict=True)))

    rows = [
        [
            name, Spread(tuple(values)).text(1, 1e3), ratio(times, name, "no checkpoint").text(3),
            ratio(times, name, "torch").text(3), f"{memory[name] / 2**20:.1f}",
            f"{memory[name] / memory['no checkpoint']:.3f}",
            f"{(median(calls[name]) - median(calls['no checkpoint'])) * 1e6 / given.blocks:.0f}",
        ]
        for name, values in times.items()
    ]  # fmt: skip
    pairs = (("zoo", "torch"), ("zoo, re-entrant", "torch, re-entrant"))
    targets = [
        f"- CPU time of {a} of {b}'s: {'met' if ratio(times, a, b).median <= TARGET else '**missed**'} "
        f"({ratio(times, a, b).text(3)}, target {TARGET})"
        for a, b in pairs
    ]
    about = facts(machine(["torch"]))
    header = [
        "contender", "CPU of a step, ms", "of no checkpoint", "of torch", "peak of tensors, MiB", "of no checkpoint",
        "CPU of a call, µs",
    ]  # fmt: skip
    return f"""# Activation checkpointing on the CPU

Written by `python -m benchmarks.activation_checkpointing`.

{about}

## Targets

{chr(10).join(targets)}

## A step

Forward and backward of {where}, fp32, one thread; every block is checkpointed. CPU time is that of the whole process,
threads of zoo.io included. Contenders take turns in one process, {given.rounds} rounds; a ratio is of one round: median
(least–most). Gradients were compared before, bit for bit. The peak is of living tensors made in a step, gradients of
parameters among them, and the contiguous buffers; memory of zoo.io's pool is not in it. *CPU of a call*: forward and
backward of a product of eight values more than without a checkpoint.

{table(header, rows)}

{remarks(given.page)}"""
