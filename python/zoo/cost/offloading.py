"""What states in host memory and on NVMe add to the time of a step, and which of it no number is known for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zoo.cost.forecast import Forecast
from zoo.cost.hardware import Channel, Hardware

__all__ = ["Offloading", "offloading"]


@dataclass(frozen=True, kw_only=True)
class Offloading:
    """Seconds of a step, of one rank.

    Attributes:
        exposed_s: of copies and files, what nothing hides. host_update_s: of the update by the host's processors.
        ways: seconds by way, hidden or not: "to_host", "to_device", "disk_read", "disk_write".
        not_counted: what has no number in the hardware file, each in a few words.
    """

    exposed_s: float = 0.0
    host_update_s: float = 0.0
    ways: Mapping[str, float] = field(default_factory=dict)
    not_counted: tuple[str, ...] = ()


def offloading(
    found: Forecast, hardware: Hardware, *, forward_s: float, backward_s: float, update_bytes: float, offloads: bool
) -> Offloading:
    """Of a step whose bytes are planned: ``bytes / rate`` of each way, and what computation hides of it.

    Gradients go to the host beside backward, parameters come beside forward and backward: what is longer than these
    shows. Copies either way do not slow the other. Files of states are read and written around an update that runs
    beside them: what a disk takes for both, one after the other, or what the update takes, where that is longer. (Ren
    et al. 2021, "ZeRO-Offload", section 4; Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.)

    Args:
        forward_s, backward_s: of a step, without what is asked for here. update_bytes: read and written for each
            parameter that is updated. offloads: something of the job is to lie outside of the device.
    """
    sizes = {
        "to_host": found.to_host_bytes, "to_device": found.to_device_bytes,
        "disk_read": found.nvme_read_bytes, "disk_write": found.nvme_written_bytes,
    }  # fmt: skip
    ways: dict[str, float] = {}
    unknown: list[str] = []
    for name, size in sizes.items():
        channel = hardware.channels.get(name)
        if channel is not None:
            ways[name] = _seconds(channel, size)
        elif size:
            unknown.append(f"{_TEXTS[name]} ({size:,} bytes: {hardware.name} states no {name})")
    host = hardware.channels.get("host_memory")
    update_s = 0.0
    if host is not None:
        update_s = _seconds(host, update_bytes * found.host_updated)
    elif found.host_updated:
        unknown.append(
            f"the update of {found.host_updated:,} parameters on the host ({hardware.name} states no host_memory)"
        )
    if offloads and not any(sizes.values()):
        unknown.append("copies between a device and its host: planned for a job on the CPU, which has none")
    files_s = ways.get("disk_read", 0.0) + ways.get("disk_write", 0.0)
    shown = max(ways.get("to_host", 0.0) - backward_s, 0.0)
    shown += max(ways.get("to_device", 0.0) - forward_s - backward_s, 0.0)
    return Offloading(
        exposed_s=shown + max(files_s - update_s, 0.0), host_update_s=update_s, ways=ways, not_counted=tuple(unknown)
    )


_TEXTS = {
    "to_host": "copies to the host", "to_device": "copies to the device", "disk_read": "reads from NVMe",
    "disk_write": "writes to NVMe",
}  # fmt: skip


def _seconds(channel: Channel, num_bytes: float) -> float:
    return channel.seconds(num_bytes) if num_bytes else 0.0
