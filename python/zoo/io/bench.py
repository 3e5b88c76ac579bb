"""Which block size, queue depth and number of threads suit a device: measured, not guessed.

Every point of a grid moves the same file, in shuffled order and several times; the figure of a point is the median of
its rates. A write overwrites blocks that are allocated and written, with ``O_DIRECT`` where the file system has it;
nobody asks the device to empty its own cache.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from zoo.io.checks import whole_number
from zoo.io.config import AioConfig
from zoo.io.handle import Backend, Handle
from zoo.io.pool import BufferPool

Operation = Literal["read", "write"]
OPERATIONS: tuple[Operation, ...] = ("read", "write")
CLOSE = 0.97
"""A point this near to the fastest is as good; of those the one that asks for least is taken."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to measure: every combination of the settings."""

    folder: Path
    """On the device to be measured; a file of ``num_bytes`` is made there and removed."""
    num_bytes: int = 1 << 30
    block_sizes: tuple[int, ...] = (1 << 17, 1 << 18, 1 << 20, 1 << 22)
    queue_depths: tuple[int, ...] = (4, 8, 32)
    num_threads: tuple[int, ...] = (1, 2)
    operations: tuple[Operation, ...] = OPERATIONS
    repeats: int = 3
    memory: Literal["pool", "tensor"] = "pool"
    """Where the bytes are: in a buffer of the pool, or in an ordinary tensor, whose address may need a copy."""
    backend: Backend = "auto"
    seed: int = 0

    def points(self) -> list[AioConfig]:
        """Every combination.

        Raises:
            ValueError: a setting out of range, no settings, or a size that is none.
        """
        whole_number("size", self.num_bytes, 4096, 1 << 50)
        whole_number("repeats", self.repeats, 1, 1000)
        for size in self.block_sizes:
            whole_number("block_size", size, 4096, 1 << 30, multiple=4096)
        for name, values, most in (("queue_depth", self.queue_depths, 4096), ("threads", self.num_threads, 64)):
            for value in values:
                whole_number(name, value, 1, most)
        grid = itertools.product(self.block_sizes, self.queue_depths, self.num_threads)
        points = [AioConfig(block_size=b, queue_depth=d, intra_op_parallelism=t) for b, d, t in grid]
        if not points or not self.operations:
            raise ValueError(
                "nothing to measure: give at least one block size, queue depth, number of threads, operation"
            )
        return points


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One point and operation."""

    operation: Operation
    block_size: int
    queue_depth: int
    num_threads: int
    gigabytes_per_s: float
    """Median, in 10⁹ bytes a second."""
    lowest: float
    highest: float
    cpu_s_per_gigabyte: float
    """Median of user and system time of the process."""


def run(sweep: Sweep, *, progress: Callable[[int, int], None] = lambda done, of: None) -> list[Measurement]:
    """Measure every point; ``progress(done, of)`` is called after each transfer.

    Raises:
        ValueError: see :meth:`Sweep.points`; or the bytes fit neither into the host's memory nor on the device.
    """
    points = sweep.points()
    _check_room(sweep)
    pool = BufferPool(sweep.num_bytes + 4096, pinned=False)
    tensor = (
        pool.empty(sweep.num_bytes, dtype=torch.uint8)
        if sweep.memory == "pool"
        else torch.empty(sweep.num_bytes, dtype=torch.uint8)
    )
    tensor.random_(0, 256, generator=torch.Generator().manual_seed(sweep.seed))
    rates: dict[tuple[Operation, AioConfig], list[tuple[float, float]]] = {}
    order = [(o, p) for o in sweep.operations for p in points for _ in range(sweep.repeats)]
    random.Random(sweep.seed).shuffle(order)
    with tempfile.TemporaryDirectory(prefix="zoo-io-bench-", dir=sweep.folder) as folder:
        path = Path(folder) / "data"
        with Handle(backend=sweep.backend) as handle:
            handle.write(tensor, path, fsync=True)
        for number, (operation, point) in enumerate(order):
            rates.setdefault((operation, point), []).append(_once(operation, point, tensor, path, sweep.backend))
            progress(number + 1, len(order))
    return [_summary(operation, point, found, sweep.num_bytes) for (operation, point), found in sorted_items(rates)]


def _check_room(sweep: Sweep) -> None:
    """Memory that is not there ends the process without a word."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for what, room in (("memory of this machine", memory), (f"free space of {sweep.folder}", _free(sweep.folder))):
        if sweep.num_bytes > room:
            raise ValueError(f"size = {sweep.num_bytes}; the {what} is {room} bytes: measure with a smaller size")


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def sorted_items(
    rates: dict[tuple[Operation, AioConfig], list[tuple[float, float]]],
) -> Iterable[tuple[tuple[Operation, AioConfig], list[tuple[float, float]]]]:
    """By operation and setting instead of by chance."""
    return sorted(
        rates.items(),
        key=lambda item: (item[0][0], item[0][1].block_size, item[0][1].queue_depth, item[0][1].intra_op_parallelism),
    )


def _once(
    operation: Operation, point: AioConfig, tensor: torch.Tensor, path: Path, backend: Backend
) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one transfer."""
    with (
        Handle.from_config(point, backend=backend) as handle,
        handle.open(path, "w" if operation == "write" else "r") as file,
    ):
        move = handle.pwrite if operation == "write" else handle.pread
        # The first transfer of a handle makes and registers buffers; it is not what a training run waits for.
        move(tensor[: min(len(tensor), 2 * point.block_size * point.queue_depth * point.intra_op_parallelism)], file)
        cpu, begun = _cpu_s(), time.perf_counter()
        move(tensor, file)
        return time.perf_counter() - begun, _cpu_s() - cpu


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _summary(
    operation: Operation, point: AioConfig, found: Sequence[tuple[float, float]], num_bytes: int
) -> Measurement:
    gigabytes = num_bytes / 1e9
    rates = [gigabytes / wall for wall, _ in found]
    return Measurement(
        operation=operation,
        block_size=point.block_size,
        queue_depth=point.queue_depth,
        num_threads=point.intra_op_parallelism,
        gigabytes_per_s=statistics.median(rates),
        lowest=min(rates),
        highest=max(rates),
        cpu_s_per_gigabyte=statistics.median(cpu for _, cpu in found) / gigabytes,
    )


def best(measurements: Sequence[Measurement]) -> AioConfig:
    """The settings that are fastest over all operations (geometric mean); of those within 3 % of the fastest, the ones
    on the fewest threads with the fewest bytes in flight."""
    by_point: dict[tuple[int, int, int], list[float]] = {}
    for m in measurements:
        by_point.setdefault((m.block_size, m.queue_depth, m.num_threads), []).append(m.gigabytes_per_s)
    means = {point: statistics.geometric_mean(rates) for point, rates in by_point.items()}
    fastest = max(means.values())
    near = [point for point, mean in means.items() if mean >= CLOSE * fastest]
    block, depth, threads = min(near, key=lambda p: (p[2], p[0] * p[1], -means[p]))
    return AioConfig(block_size=block, queue_depth=depth, intra_op_parallelism=threads)


def as_json(sweep: Sweep, measurements: Sequence[Measurement]) -> str:
    """``aio``: the section of a configuration; ``measurements``: everything it was chosen from."""
    section = best(measurements).model_dump()
    facts = {"size": sweep.num_bytes, "memory": sweep.memory, "repeats": sweep.repeats}
    return json.dumps({"aio": section, "sweep": facts, "measurements": [asdict(m) for m in measurements]}, indent=2)


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """A panel an operation: rate over block size, a line for every depth and number of threads."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    operations = sorted({m.operation for m in measurements})
    figure = Figure(figsize=(5.5 * len(operations), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for index, operation in enumerate(operations):
        axes = figure.add_subplot(1, len(operations), index + 1)
        lines: dict[tuple[int, int], list[Measurement]] = {}
        for m in measurements:
            if m.operation == operation:
                lines.setdefault((m.queue_depth, m.num_threads), []).append(m)
        for (depth, threads), line in sorted(lines.items()):
            sizes = [m.block_size / 1024 for m in line]
            middle = [m.gigabytes_per_s for m in line]
            spread = [[m.gigabytes_per_s - m.lowest for m in line], [m.highest - m.gigabytes_per_s for m in line]]
            style = "-" if threads == 1 else "--"
            label = f"depth {depth}, {threads} thread{'s' * (threads > 1)}"
            axes.errorbar(sizes, middle, yerr=spread, fmt=f"o{style}", capsize=3, label=label)
        ticks = sorted({m.block_size / 1024 for m in measurements})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axes.set_ylim(0, 1.1 * max(m.highest for m in measurements if m.operation == operation))
        axes.set_xlabel("block size (KiB)")
        axes.set_ylabel("GB/s, median and range")
        axes.set_title(operation)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
