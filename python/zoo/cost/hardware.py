"""What machines can do, as data: a device, the links of a node, the network between nodes.

A file is JSON. Each number is there with where it comes from (``sources``), or with when it was measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from zoo.cost.writing import write_whole

__all__ = [
    "CHANNELS",
    "Channel",
    "Device",
    "Hardware",
    "HardwareError",
    "Link",
    "Measured",
    "Tile",
    "hardware_names",
    "read_hardware",
]

_MAX_BYTES = 16 << 20  # of a file
_HUGE = 1e300  # no number of a machine is as large, and a float holds it


class HardwareError(ValueError):
    """There is no such hardware, or a file that is none."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A part of a product's result that one unit of the device makes.

    Attributes:
        rows, columns: of it. reached: of the best rate of a product, the part that this tile can have.
    """

    rows: int
    columns: int
    reached: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One product that was measured: (m, k) times (k, n), in FLOP/s."""

    m: int
    n: int
    k: int
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computes.

    Attributes:
        flops_per_s: by dtype ("bf16", "fp32", …), the peak that its maker states.
        reached: of the peak, the part that a product reaches that is large in all three sizes.
        memory_bytes: of it. bytes_per_s: that its memory reads or writes, stated; memory_reached: the part of it that
            operations reach which do little else.
        units: that make tiles at the same time (multiprocessors, cores). tiles: that products are cut into.
        fill: elements of k for which a tile takes as long as filling and emptying its pipeline does.
        products: measured ones, by dtype. Where there are any, they go before tiles.
        launch_s: of the host, to begin one operation; 0 where nobody has measured it.
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    bytes_per_s: float
    reached: float = 1.0
    memory_reached: float = 1.0
    units: int = 1
    tiles: tuple[Tile, ...] = (Tile(rows=1, columns=1),)
    fill: float = 0.0
    products: Mapping[str, tuple[Measured, ...]] = field(default_factory=dict)
    launch_s: float = 0.0

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype.

        Raises:
            HardwareError: the file states none for it.
        """
        if dtype not in self.flops_per_s:
            raise HardwareError(
                f"{self.name} states no FLOP/s for {dtype!r}; it does for {', '.join(self.flops_per_s)}."
            )
        return self.flops_per_s[dtype]


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A way of bytes that one rank uses: x bytes take latency_s + x / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Of so many bytes at a time."""
        return self.latency_s + num_bytes / self.bytes_per_s


CHANNELS = ("to_device", "to_host", "disk_read", "disk_write", "host_memory")
"""Between page-locked host memory and a device; between a disk and host memory, past the page cache; what a rank's
share of the processors reads and writes in host memory."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects ranks.

    Attributes:
        latency_s: of a message. bytes_per_s: that one rank sends and, at the same time, receives.
        all_reduce: by the number of ranks, (bytes, seconds) that were measured, bytes rising. Where there are any, they
            go before the formula.
    """

    latency_s: float
    bytes_per_s: float
    all_reduce: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Nodes of equal devices.

    Attributes:
        ranks_per_node: devices of a node. inside: between devices of a node, for one device.
        between: between nodes, for one adapter. adapters: of a node.
        channels: those of :data:`CHANNELS` that were measured, by name.
        sources: where the numbers come from.
    """

    name: str
    device: Device
    ranks_per_node: int
    inside: Link
    between: Link
    adapters: int = 1
    channels: Mapping[str, Channel] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    @property
    def node_bytes_per_s(self) -> float:
        """What all adapters of a node send together."""
        return self.adapters * self.between.bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        """As a file has it."""
        found = dataclasses.asdict(self)
        for link in (found["inside"], found["between"]):
            link["all_reduce"] = {str(n): [list(point) for point in points] for n, points in link["all_reduce"].items()}
        return found

    @classmethod
    def from_dict(cls, document: Any) -> Hardware:
        """The other way round.

        Raises:
            HardwareError: a document of another form, with what is wrong in it.
        """
        try:
            return _hardware(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise HardwareError(f"this is no hardware file: {said}.") from error

    def write(self, path: str | Path) -> None:
        """Into a file, whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")


def hardware_names() -> list[str]:
    """Those that zoo knows by name."""
    folder = resources.files("zoo.cost") / "files"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_hardware(name: str | Path) -> Hardware:
    """Hardware by its name ("a100-80"), by the beginning of one ("h100"), or from a file.

    Raises:
        HardwareError: neither is there, or the file is none.
    """
    names = hardware_names()
    alike = [known for known in names if known.startswith(str(name))]
    if len(alike) == 1 and not _is_file(Path(name)):
        name = alike[0]
    if str(name) in names:
        return Hardware.from_dict(json.loads((resources.files("zoo.cost") / "files" / f"{name}.json").read_text()))
    path = Path(name)
    if not _is_file(path):
        raise HardwareError(
            f"no hardware is named {str(name)!r}, and no file is: known are {', '.join(alike or names)}; "
            "`zoo bench hardware --write FILE` measures this machine."
        )
    if path.stat().st_size > _MAX_BYTES:
        raise HardwareError(f"{path} has {path.stat().st_size:,} bytes; a hardware file has at most {_MAX_BYTES:,}.")
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise HardwareError(f"{path} is no JSON: {error}.") from error
    return Hardware.from_dict(document)


def _is_file(path: Path) -> bool:
    """No also for a name that is too long to be one's."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _hardware(document: Any) -> Hardware:
    given = _fields(Hardware, document)
    device = _fields(Device, given["device"])
    device["flops_per_s"] = {str(k): _positive(f"flops_per_s of {k}", v) for k, v in device["flops_per_s"].items()}
    if not device["flops_per_s"]:
        raise ValueError("flops_per_s of its device is empty")
    device["tiles"] = tuple(Tile(**_fields(Tile, t)) for t in device.get("tiles", [{"rows": 1, "columns": 1}]))
    if not device["tiles"]:
        raise ValueError("its device has no tiles")
    device["products"] = {
        str(dtype): tuple(Measured(**_fields(Measured, m)) for m in found)
        for dtype, found in device.get("products", {}).items()
    }
    given["device"] = Device(**device)
    for name in ("inside", "between"):
        link = _fields(Link, given[name])
        link["all_reduce"] = {
            int(ranks): _table(f"all_reduce of {ranks}", points) for ranks, points in link.get("all_reduce", {}).items()
        }
        given[name] = Link(**link)
    channels = given.get("channels", {})
    unknown = sorted(set(channels) - set(CHANNELS))
    if unknown:
        raise ValueError(f"channels has {unknown[0]!r}; it may have {', '.join(CHANNELS)}")
    given["channels"] = {name: Channel(**_fields(Channel, channel)) for name, channel in channels.items()}
    sources = given.get("sources", ())
    if isinstance(sources, str):
        raise ValueError(f"sources is {sources!r}, where a list of texts is expected")
    given["sources"] = tuple(str(source) for source in sources)
    return Hardware(**given)


def _fields(cls: type[Any], document: Any) -> dict[str, Any]:
    """The fields of a dataclass from a document: those known, and numbers where there are to be numbers."""
    if not isinstance(document, Mapping):
        raise ValueError(f"{cls.__name__.lower()} is {document!r}, where an object is expected")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(document) - set(fields))
    if unknown:
        raise ValueError(f"{cls.__name__.lower()} has {unknown[0]!r}; it may have {', '.join(fields)}")
    found = dict(document)
    for name, f in fields.items():
        if f.type == "str" and not isinstance(found.get(name), str):
            raise ValueError(f"{name} of its {cls.__name__.lower()} is {found.get(name)!r}, where a text is expected")
        if f.type in ("float", "int"):
            if name not in found:
                if f.default is dataclasses.MISSING:
                    raise KeyError(name)
                continue
            zero = name in ("fill", "latency_s", "launch_s", "memory_bytes")
            found[name] = _number(name, found[name], zero=zero, whole=f.type == "int")
    return found


def _table(name: str, points: Any) -> tuple[tuple[float, float], ...]:
    """Of bytes and seconds, bytes rising."""
    found = tuple((_positive(f"bytes in {name}", size), _positive(f"seconds in {name}", s)) for size, s in points)
    sizes = [size for size, _ in found]
    if not found or sizes != sorted(set(sizes)):
        raise ValueError(f"{name} has {len(found)} points; there is at least one, and their bytes rise")
    return found


def _positive(name: str, value: Any) -> float:
    return float(_number(name, value, zero=False, whole=False))


def _number(name: str, value: Any, *, zero: bool, whole: bool) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _HUGE:
        raise ValueError(f"{name} is {value!r}, where a number is expected")
    if value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} is {value!r}, where a number {'of at least' if zero else 'above'} 0 is expected")
    if whole and value != int(value):
        raise ValueError(f"{name} is {value!r}, where a whole number is expected")
    return int(value) if whole else value
