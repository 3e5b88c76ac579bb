"""A process that is to be killed: for each line "FOLDER FIRST KIND" on its input it forks a child that saves one
checkpoint after the other, and tells its number and each checkpoint that was saved.

Forked, because a process that imports torch takes seconds to begin, and the instants of a save are what is looked for.
"""

from __future__ import annotations

import os
import sys

import torch

from zoo.checkpointing import BackgroundSaver, prune, save
from zoo.comm import Communicator
from zoo.layout import StateSlice

SMALL, LARGE = 40_000, 3 << 20


def part(name: str, numel: int, value: int) -> StateSlice:
    """A flat tensor of one value, the number of the checkpoint."""
    return StateSlice(name, "parameter", 0, numel, (numel,), torch.full((numel,), float(value)))


def state(number: int, kind: str) -> list[StateSlice]:
    """Several tensors; with "large" a file that goes past the page cache."""
    sizes = [7, SMALL, LARGE if kind == "large" else 100, 1]
    return [part(f"t{place}", size, number) for place, size in enumerate(sizes)]


def run(folder: str, first: int, kind: str) -> None:
    """Save until somebody kills us: new tags, and one tag that is replaced each time ("same")."""
    saver = BackgroundSaver(Communicator())
    for number in range(first, first + 1000):
        tag = "same" if kind == "same" else f"t{number}"
        if kind == "background":
            saver.save(folder, tag, state(number, kind), {"number": number})
            saver.wait()
        else:
            save(folder, tag, state(number, kind), {"number": number})
        sys.stdout.write(f"saved {number}\n")
        sys.stdout.flush()
        if kind == "prune":
            prune(folder, 2)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, first, kind = line.split()
        child = os.fork()
        if not child:
            try:
                run(folder, int(first), kind)
            finally:
                os._exit(1)
        sys.stdout.write(f"child {child}\n")
        sys.stdout.flush()
        os.waitpid(child, 0)
        sys.stdout.write("over\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
