"""A hardware file of this machine: what is in it is measured here, and its sources say how and when."""

from __future__ import annotations

import datetime
import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.bench.collectives import Measured, Settings
from zoo.cli.bench.fitting import Line
from zoo.cost.hardware import Channel, Device, Hardware, Link
from zoo.cost.hardware import Measured as Product

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PARTS = {"products": 0.5, "memory": 0.05, "calls": 0.05, "copies": 0.1, "disk": 0.15, "links": 0.25}
"""Of the time. On a machine without one of them it ends so much earlier."""
_STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Of a ring of N ranks, times N − 1: what ``zoo.cost.seconds`` takes a link's numbers for."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What goes into the file.

    Attributes:
        device: "auto", "cpu", "cuda" or "cuda:1".
        dtypes: names of :data:`DTYPES`.
        seconds: of the whole measurement, about.
        ranks: that share this machine; None: its GPUs, or two processes on CPUs. A CPU is parted among them.
        folder: on the disk to be measured; None for none.
        links, network: results of ``zoo bench comm``: of this machine, measured before; of several nodes.
    """

    name: str
    device: str = "auto"
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    seconds: float = 60.0
    ranks: int | None = None
    folder: Path | None = None
    links: Measured | None = None
    network: Measured | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: a dtype or a number that there is not, or a result of one node as that of a network.
        """
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"dtype = {dtype!r}; allowed are {', '.join(DTYPES)}.")
        if not self.dtypes:
            raise ValueError(f"no dtype is given; allowed are {', '.join(DTYPES)}.")
        if not self.seconds > 0:
            raise ValueError(f"seconds = {self.seconds}; give a number above 0.")
        if self.ranks is not None and not 1 <= self.ranks <= 64:
            raise ValueError(f"ranks = {self.ranks}; allowed are 1 (without links) to 64 on this machine.")
        if self.links is not None and self.links.nodes > 1:
            raise ValueError(f"--links has a result of {self.links.nodes} nodes; give it as --network.")
        if self.network is not None and self.network.nodes < 2:
            raise ValueError(
                "--network has a result of one node; make it by zoo bench comm --json FILE on several, by torchrun or "
                "srun."
            )


def device_of(name: str) -> torch.device:
    """The device of a name.

    Raises:
        ValueError: there is no such device, or it is not here.
    """
    import torch

    found = torch.cuda.device_count()
    kind, _, number = name.partition(":")
    if name == "cpu" or (name == "auto" and not found):
        return torch.device("cpu")
    if kind not in ("auto", "cuda") or (number and not number.isdecimal()) or name == "auto:":
        raise ValueError(f"device = {name!r}; allowed are auto, cpu, cuda, cuda:0, cuda:1, …")
    index = int(number or 0)
    if index >= found:
        raise ValueError(
            f"device = {name!r}, and torch sees {found} GPUs; zoo doctor says why. Give --device cpu for the processor."
        )
    return torch.device("cuda", index)


def fill(wanted: Wanted, *, say: Callable[[str], None] = lambda text: None) -> Hardware:
    """Measure, and make the file's content of it.

    Args:
        say: told what begins.

    Raises:
        ValueError: a device or folder that cannot be measured.
    """
    import torch

    device = device_of(wanted.device)
    ranks = wanted.ranks or (torch.cuda.device_count() if device.type == "cuda" else 2)
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":  # a rank's share of the processors
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        sources: list[str] = [_about(device, ranks)]
        made = _device(device, wanted, ranks, sources, say)
    finally:
        torch.set_num_threads(threads)
    channels = _channels(device, wanted, ranks, sources, say)
    inside, between = _links(device, wanted, ranks, channels, sources, say)
    return Hardware(
        name=wanted.name, device=made, ranks_per_node=ranks, inside=inside, between=between, channels=channels,
        sources=tuple(sources),
    )  # fmt: skip


def _about(device: torch.device, ranks: int) -> str:
    import torch

    today = datetime.datetime.now(datetime.timezone.utc).date()
    share = f"{torch.get_num_threads()} threads, the share of one of {ranks} ranks"
    what = share if device.type == "cpu" else str(device)
    return f"measured on {today} by zoo bench hardware with torch {torch.__version__} on {what}"


def _device(device: torch.device, wanted: Wanted, ranks: int, sources: list[str], say: Callable[[str], None]) -> Device:
    import torch

    from zoo.cli.bench import computing

    tables: dict[str, tuple[Product, ...]] = {}
    for dtype in wanted.dtypes:
        say(f"products of {dtype}")
        share = wanted.seconds * _PARTS["products"] / len(wanted.dtypes)
        found = computing.products(device, getattr(torch, DTYPES[dtype]), share)
        tables[dtype] = tuple(
            Product(m=m, n=n, k=k, flops_per_s=2.0 * m * n * k / timing.median_s) for (m, n, k), timing in found
        )
    say("memory")
    rate, _ = computing.memory_bandwidth(device, wanted.seconds * _PARTS["memory"])
    say("calls")
    launch = computing.call_cost(device, wanted.seconds * _PARTS["calls"])
    counts = ", ".join(f"{len(table)} of {dtype}" for dtype, table in tables.items())
    sources += [
        f"products: {counts}, the median of each; flops_per_s is the best of them, no maker's peak",
        "bytes_per_s: a copy of 256 MiB within the memory, bytes read and written, while other ranks rest",
        "launch_s: the median of an addition of one element" + ("" if device.type == "cpu" else ", not waited for"),
    ]
    name, memory_bytes, units = _kind(device, ranks)
    return Device(
        name=name, flops_per_s={dtype: max(p.flops_per_s for p in table) for dtype, table in tables.items()},
        memory_bytes=memory_bytes, bytes_per_s=rate, units=units, products=tables, launch_s=launch.median_s,
    )  # fmt: skip


def _kind(device: torch.device, ranks: int) -> tuple[str, int, int]:
    """(name, bytes, units) of a rank's device."""
    import torch

    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        return about.name, about.total_memory, about.multi_processor_count
    from zoo.cli.doctor.machine import memory_bytes, processor_name

    return processor_name(), memory_bytes() // ranks, max(1, len(os.sched_getaffinity(0)) // ranks)


def _channels(
    device: torch.device, wanted: Wanted, ranks: int, sources: list[str], say: Callable[[str], None]
) -> dict[str, Channel]:
    found: dict[str, Channel] = {}
    if device.type == "cuda":
        from zoo.cli.bench.computing import COPY_SIZES, copies

        say("copies")
        for name, line in copies(device, wanted.seconds * _PARTS["copies"]).items():
            found[name] = _channel(line, COPY_SIZES[-1])
        sources.append("to_device, to_host: copies of page-locked memory, 4 KiB to 256 MiB, a line through the medians")
        say("host memory")
        found["host_memory"] = host_memory(ranks, wanted.seconds * _PARTS["memory"])
        sources.append(f"host_memory: a copy of 256 MiB by the share of one of {ranks} ranks, while other ranks rest")
    if wanted.folder is not None:
        from zoo.cli.bench.disk import SIZES, measure_disk

        say("disk")
        disk = measure_disk(wanted.folder, wanted.seconds * _PARTS["disk"])
        found |= {"disk_read": _channel(disk.read, SIZES[-1]), "disk_write": _channel(disk.write, SIZES[-1])}
        sources.append(
            f"disk_read, disk_write: zoo.io by {disk.backend}, O_DIRECT on {disk.file_system}, 64 KiB to 256 MiB, a "
            f"line through the medians ({disk.read.error:.0%} and {disk.write.error:.0%} mean error); caches of the "
            "device, and of a host below a virtual machine, are not emptied"
        )
    return found


def host_memory(ranks: int, seconds: float) -> Channel:
    """What a rank's share of the processors reads and writes in host memory."""
    import torch

    from zoo.cli.bench.computing import memory_bandwidth

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    try:
        rate, _ = memory_bandwidth(torch.device("cpu"), seconds)
    finally:
        torch.set_num_threads(threads)
    return Channel(latency_s=0.0, bytes_per_s=rate)


def _channel(line: Line, largest: int) -> Channel:
    rate = line.bytes_per_s if math.isfinite(line.bytes_per_s) else largest / line.alpha_s
    return Channel(latency_s=line.alpha_s, bytes_per_s=rate)


def _links(
    device: torch.device, wanted: Wanted, ranks: int, channels: Mapping[str, Channel], sources: list[str],
    say: Callable[[str], None],
) -> tuple[Link, Link]:  # fmt: skip
    measured = wanted.links
    if measured is None and ranks > 1:
        from zoo.cli.bench.ranks import measure_here

        say("links")
        settings = Settings(operations=tuple(_STEPS), seconds=wanted.seconds * _PARTS["links"], device=device.type)
        measured = measure_here(ranks, settings)
    if measured is not None:
        inside = link_of(measured)
        sources.append(f"inside: zoo bench comm, {measured.ranks} ranks, {measured.backend}, {_errors(measured)}")
    elif "to_host" in channels:
        slow = channels["to_host"]
        inside = Link(latency_s=slow.latency_s, bytes_per_s=slow.bytes_per_s)
        sources.append("inside: not measured, there is one device; as to_host")
    elif wanted.network is not None:
        inside = link_of(wanted.network)
        sources.append("inside: not measured, there is one rank; as between")
    else:
        raise ValueError("one rank on a processor has no links to measure; give --ranks 2, or --links FILE.")
    if wanted.network is None:
        sources.append(
            "between: not measured, there is one node; as inside (--network takes what zoo bench comm found on several)"
        )
        return inside, inside
    network = wanted.network
    sources.append(f"between: zoo bench comm, {network.ranks} ranks on {network.nodes} nodes, {network.backend}")
    return inside, link_of(network)


def _errors(measured: Measured) -> str:
    lines = measured.lines()
    return ", ".join(f"{name} {lines[name].error:.0%} mean error of its line" for name in _STEPS if name in lines)


def link_of(measured: Measured) -> Link:
    """A link whose ring takes what the collectives took: of all-gather, reduce-scatter and all-reduce the median β, and
    the median of α by the steps of a ring; the all-reduces themselves as a table.

    Raises:
        ValueError: none of these operations was measured at two sizes.
    """
    lines = {name: line for name, line in measured.lines().items() if name in _STEPS}
    if not lines:
        raise ValueError(
            f"a link needs one of {', '.join(_STEPS)} at two sizes or more; the result of zoo bench comm has none."
        )
    steps = measured.ranks - 1
    latency = statistics.median(line.alpha_s / (_STEPS[name] * steps) for name, line in lines.items())
    rates = [line.bytes_per_s for line in lines.values() if math.isfinite(line.bytes_per_s)]
    if not rates:  # times that do not grow: what the largest message reached
        rates = [max(point.bus_bandwidth for point in measured.points if point.operation in lines)]
    table = tuple(
        (float(point.message_bytes), point.median_s) for point in measured.points if point.operation == "all_reduce"
    )
    return Link(
        latency_s=latency, bytes_per_s=statistics.median(rates), all_reduce={measured.ranks: table} if table else {}
    )


def summary(found: Hardware) -> str:
    """For people: the file in some lines."""
    device = found.device
    lines = [f"{found.name}: {device.name}, {device.memory_bytes / 2**30:.1f} GiB, {found.ranks_per_node} a node"]
    for dtype, rate in device.flops_per_s.items():
        best = max(device.products[dtype], key=lambda product: product.flops_per_s)
        lines.append(
            f"  {dtype:<11} {rate / 1e12:.4g} TFLOP/s at most, ({best.m}, {best.k}) x ({best.k}, {best.n}); "
            f"{len(device.products[dtype])} products"
        )
    lines.append(f"  memory      {device.bytes_per_s / 1e9:.4g} GB/s")
    lines.append(f"  launch      {device.launch_s * 1e6:.3g} us")
    named: dict[str, Channel | Link] = {**found.channels, "inside": found.inside, "between": found.between}
    for name, channel in named.items():
        lines.append(f"  {name:<11} {channel.latency_s * 1e6:.4g} us + bytes / {channel.bytes_per_s / 1e9:.4g} GB/s")
    return "\n".join([*lines, *(f"  {source}" for source in found.sources)])
