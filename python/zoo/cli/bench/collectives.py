"""Collectives of ``zoo.comm``, timed over the ranks that there are."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from zoo.cli.bench.fitting import Line, fit
from zoo.cost import wire_bytes

if TYPE_CHECKING:
    import torch

    from zoo.comm import Communicator

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
FEWEST, MOST = 3, 1000
"""Repetitions of a point, where there is time."""
_PARTS = 4
FORMAT = "zoo bench comm 1"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        operations: of :data:`OPERATIONS`. "send" is a message to a partner and one back: rank r and rank r + N // 2
            are partners, all pairs at a time, and the time of one message is half of both.
        sizes: bytes of the whole logical buffer, as ``zoo.comm.OpStats`` counts them; rounded up to what N ranks share.
        seconds: when this is over no further point begins; a point takes an equal part of what is left.
        device: "cpu" by gloo, "cuda" by NCCL, "auto" by whether torch sees a GPU.
        shared_memory: let ranks of one machine use zoo's transport through memory that they share.
    """

    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = tuple(1 << k for k in range(10, 27, 2))
    seconds: float = 30.0
    dtype: str = "float32"
    device: str = "auto"
    shared_memory: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: an operation, dtype or device that there is not, no sizes, or no time.
        """
        for name, values, allowed in (
            ("operation", self.operations, OPERATIONS), ("dtype", (self.dtype,), DTYPES),
            ("device", (self.device,), DEVICES),
        ):  # fmt: skip
            for value in values:
                if value not in allowed:
                    raise ValueError(f"{name} = {value!r}; allowed are {', '.join(allowed)}.")
        if not self.operations or not self.sizes or min(self.sizes) < 1:
            raise ValueError("nothing to measure: give at least one operation, and sizes of at least 1 byte.")
        if not self.seconds > 0:
            raise ValueError(f"seconds = {self.seconds}; give a number above 0.")

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The other way round."""
        given = json.loads(text)
        return cls(**{**given, "operations": tuple(given["operations"]), "sizes": tuple(given["sizes"])})


def sizes_between(least: int, most: int, factor: int = 4) -> tuple[int, ...]:
    """least, factor · least, … and most.

    Raises:
        ValueError: there are none.
    """
    if not 1 <= least <= most or factor < 2:
        raise ValueError(f"sizes from {least} to {most} by {factor}; give 1 <= least <= most, and a factor from 2.")
    found = [least]
    while found[-1] * factor < most:
        found.append(found[-1] * factor)
    return tuple(dict.fromkeys([*found, most]))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One operation at one size. The time of a repetition is that of the rank that took longest.

    Attributes:
        message_bytes: of the whole logical buffer.
        wire_bytes: what a rank has to send with an algorithm that sends the least (``zoo.comm.OpStats``).
    """

    operation: str
    message_bytes: int
    wire_bytes: int
    repetitions: int
    median_s: float
    lowest_s: float
    highest_s: float

    def check(self) -> None:
        """Refuse what is no measurement, in a file that something else wrote.

        Raises:
            ValueError: a number that is none, or no time.
        """
        for key in ("message_bytes", "wire_bytes", "repetitions", "median_s", "lowest_s", "highest_s"):
            value = getattr(self, key)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{key} = {value!r} of {self.operation}, and it is a number above 0")

    @property
    def algorithm_bandwidth(self) -> float:
        """Message bytes by median seconds."""
        return self.message_bytes / self.median_s

    @property
    def bus_bandwidth(self) -> float:
        """Wire bytes by median seconds: what can be compared with a link, and between numbers of ranks."""
        return self.wire_bytes / self.median_s


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All points of a run.

    Attributes:
        skipped: (operation, bytes) that there was no time for.
    """

    ranks: int
    nodes: int
    backend: str
    device: str
    dtype: str
    seconds: float
    points: tuple[Point, ...]
    skipped: tuple[tuple[str, int], ...] = field(default=())

    def lines(self) -> dict[str, Line]:
        """α and β over wire bytes, by operation; of those with two sizes at least."""
        found: dict[str, Line] = {}
        for name in dict.fromkeys(point.operation for point in self.points):
            points = [point for point in self.points if point.operation == name]
            if len({point.wire_bytes for point in points}) > 1:
                found[name] = fit([p.wire_bytes for p in points], [p.median_s for p in points])
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain values, with the bandwidths and lines that follow from the points."""
        points = [
            {
                **asdict(point),
                "algorithm_bytes_per_s": point.algorithm_bandwidth,
                "bus_bytes_per_s": point.bus_bandwidth,
            }
            for point in self.points
        ]
        lines = {name: line.to_dict() for name, line in self.lines().items()}
        facts = {key: getattr(self, key) for key in ("ranks", "nodes", "backend", "device", "dtype", "seconds")}
        skipped = [list(pair) for pair in self.skipped]
        return {"format": FORMAT, **facts, "points": points, "lines": lines, "skipped": skipped}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Measured:
        """The other way round; what follows from the points is made again.

        Raises:
            ValueError: another format, or keys that are missing.
        """
        if given.get("format") != FORMAT:
            raise ValueError(
                f"format = {given.get('format')!r}; this reads {FORMAT!r}, as zoo bench comm --json writes."
            )
        derived = ("algorithm_bytes_per_s", "bus_bytes_per_s")
        try:
            points = tuple(
                Point(**{key: value for key, value in point.items() if key not in derived}) for point in given["points"]
            )
            facts = {key: given[key] for key in ("ranks", "nodes", "backend", "device", "dtype", "seconds")}
            skipped = tuple((str(name), int(size)) for name, size in given["skipped"])
            for key in ("ranks", "nodes"):
                if type(facts[key]) is not int:
                    raise TypeError(f"{key} = {facts[key]!r}, and it is a whole number")
            for point in points:
                point.check()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no result of zoo bench comm: {error}.") from error
        return cls(**facts, points=points, skipped=skipped)

    def table(self) -> str:
        """For people: a line a point, then a line an operation, then what was left out."""
        where = (
            f"{self.ranks} ranks on {self.nodes} node{'s' * (self.nodes > 1)}" if self.nodes else f"{self.ranks} ranks"
        )
        lines = [
            f"{where}, {self.backend}, {self.device}, {self.dtype}, {self.seconds:.1f} s",
            f"{'operation':<16}{'bytes':>12}{'times':>7}{'median us':>12}{'range us':>20}"
            f"{'alg GB/s':>10}{'bus GB/s':>10}",
        ]
        for p in self.points:
            between = f"{p.lowest_s * 1e6:.1f}-{p.highest_s * 1e6:.1f}"
            lines.append(
                f"{p.operation:<16}{p.message_bytes:>12}{p.repetitions:>7}{p.median_s * 1e6:>12.1f}{between:>20}"
                f"{p.algorithm_bandwidth / 1e9:>10.3f}{p.bus_bandwidth / 1e9:>10.3f}"
            )
        lines += [
            "",
            f"{'operation':<16}{'alpha us':>12}{'beta GB/s':>12}{'mean error':>12}    t = alpha + wire bytes / beta",
        ]
        for name, line in self.lines().items():
            lines.append(f"{name:<16}{line.alpha_s * 1e6:>12.1f}{line.bytes_per_s / 1e9:>12.3f}{line.error:>12.1%}")
        if self.skipped:
            told = ", ".join(f"{name} of {size} bytes" for name, size in self.skipped)
            lines.append(f"no time for {len(self.skipped)} of the points (a longer --seconds has it): {told}")
        return "\n".join(lines)


def order(settings: Settings) -> Iterator[tuple[str, int]]:
    """The points in the order in which they are measured: the ends first, then what lies between, so that a line can be
    drawn early through each operation."""
    sizes = sorted(set(settings.sizes))
    taken: list[int] = []
    spans = [(0, len(sizes) - 1)]
    taken += [0] if len(sizes) == 1 else [0, len(sizes) - 1]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            taken.append(middle)
            spans += [(low, middle), (middle, high)]
    for place in taken:
        for operation in settings.operations:
            yield operation, sizes[place]


def measure(
    comm: Communicator, settings: Settings, *, say: Callable[[str, int], None] = lambda operation, size: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:  # fmt: skip
    """Time every point over the ranks of ``comm``. Collective; every rank gets the same result.

    Before a repetition the ranks meet (on CUDA they do not: events of the stream are taken). How often a point is
    repeated, and when the time is over, is agreed on by the largest number of any rank.

    Args:
        say: told of each point before it begins.

    Raises:
        ValueError: one rank alone.
    """
    if comm.size < 2:
        raise ValueError(
            "there is one rank, and nothing to send: give --ranks 2, or start it as torchrun --nproc-per-node=2 -m "
            "zoo.cli bench comm."
        )
    import torch

    begun = clock()
    dtype = getattr(torch, settings.dtype)
    todo = list(order(settings))
    found: list[Point] = []
    skipped: list[tuple[str, int]] = []
    for number, (name, size) in enumerate(todo):
        left = settings.seconds - _most(comm, [clock() - begun])[0]
        if left <= 0:
            skipped = todo[number:]
            break
        say(name, size)
        length = -(-size // dtype.itemsize // comm.size) * comm.size
        run = OPERATION[name](comm, length, dtype, comm.device)
        times = _times(comm, run, left / (len(todo) - number), clock)
        message = length * dtype.itemsize
        scale = 0.5 if name == "send" else 1.0
        found.append(
            Point(
                operation=name, message_bytes=message, wire_bytes=wire_bytes(name, message, comm.size, None)[0],
                repetitions=len(times), median_s=scale * statistics.median(times), lowest_s=scale * min(times),
                highest_s=scale * max(times),
            )
        )  # fmt: skip
    found.sort(key=lambda point: (settings.operations.index(point.operation), point.message_bytes))
    return Measured(
        ranks=comm.size, nodes=len(set(comm.nodes or ())), backend=_named(comm, settings), device=_device(comm),
        dtype=settings.dtype, seconds=_most(comm, [clock() - begun])[0], points=tuple(found), skipped=tuple(skipped),
    )  # fmt: skip


def _named(comm: Communicator, settings: Settings) -> str:
    return f"{comm.backend} with shared memory" if settings.shared_memory else comm.backend


def _device(comm: Communicator) -> str:
    import torch

    return torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "cpu"


def _most(comm: Communicator, values: Sequence[float]) -> list[float]:
    """Of each number the largest of any rank."""
    import torch

    given = torch.tensor(values, dtype=torch.float64, device=comm.device)
    comm.all_reduce(given, "max").wait()
    found: list[float] = given.tolist()
    return found


def _times(comm: Communicator, run: Callable[[], None], share_s: float, clock: Callable[[], float]) -> list[float]:
    """Seconds of each repetition, of the slowest rank: as many as fit into the share, alike on all ranks.

    They are made in parts, after each of which the ranks agree on what time is over: the first guess may be far off.
    """
    begun = clock()
    run()  # connections, buffers
    before = clock()
    _timed(comm, run, 1, clock)
    gone, guess = _most(comm, [clock() - begun, clock() - before])
    wanted = max(FEWEST, min(int((share_s - gone) / max(guess, 1e-7)), MOST))
    part = max(FEWEST, -(-wanted // _PARTS))
    found: list[float] = []
    while len(found) < wanted and (not found or gone < share_s):
        found += _timed(comm, run, min(part, wanted - len(found)), clock)
        (gone,) = _most(comm, [clock() - begun])
    return _most(comm, found)


def _timed(comm: Communicator, run: Callable[[], None], count: int, clock: Callable[[], float]) -> list[float]:
    import torch

    if comm.device.type != "cuda":
        found = []
        for _ in range(count):
            comm.barrier()
            begun = clock()
            run()
            found.append(clock() - begun)
        return found
    comm.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


Maker = Callable[["Communicator", int, "torch.dtype", "torch.device"], Callable[[], None]]


def _all_gather(comm: Communicator, length: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    import torch

    full, shard = (
        torch.zeros(length, dtype=dtype, device=device),
        torch.ones(length // comm.size, dtype=dtype, device=device),
    )
    return lambda: comm.all_gather(full, shard).wait()


def _reduce_scatter(comm: Communicator, length: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    import torch

    full, out = (
        torch.ones(length, dtype=dtype, device=device),
        torch.zeros(length // comm.size, dtype=dtype, device=device),
    )
    return lambda: comm.reduce_scatter(full, out).wait()


def _all_reduce(comm: Communicator, length: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    import torch

    given = torch.zeros(length, dtype=dtype, device=device)  # zeros stay zeros, however often they are summed
    return lambda: comm.all_reduce(given).wait()


def _all_to_all(comm: Communicator, length: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    import torch

    out, given = torch.zeros(length, dtype=dtype, device=device), torch.ones(length, dtype=dtype, device=device)
    return lambda: comm.all_to_all(out, given).wait()


def _broadcast(comm: Communicator, length: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    import torch

    given = torch.zeros(length, dtype=dtype, device=device)
    return lambda: comm.broadcast(given).wait()


def _send(comm: Communicator, length: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    import torch

    given = torch.zeros(length, dtype=dtype, device=device)
    half = comm.size // 2
    first = comm.rank < half
    partner = comm.rank + half if first else comm.rank - half
    if comm.rank >= 2 * half:  # of an odd number the last has no partner
        return lambda: None

    def there_and_back() -> None:
        if first:
            comm.send(given, partner).wait()
            comm.recv(given, partner).wait()
        else:
            comm.recv(given, partner).wait()
            comm.send(given, partner).wait()

    return there_and_back


OPERATION: dict[str, Maker] = {
    "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_reduce": _all_reduce, "all_to_all": _all_to_all,
    "broadcast": _broadcast, "send": _send,
}  # fmt: skip
