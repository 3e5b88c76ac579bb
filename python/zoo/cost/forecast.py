"""What a training step will cost one rank, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.cost.simulated import SimulatedTime
    from zoo.cost.step import StepTime

__all__ = ["Forecast"]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes on one rank, and seconds where they are asked for.

    Memory is the model states after a step; traffic is that of a step with the forwards and backwards of its
    micro-batches.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    secondary_bytes: int = 0
    """hpZ: what forward leaves on this rank for backward, beside parameters; gone after the step."""
    wire_bytes: Mapping[str, int]
    """Bytes this rank sends, by operation (the convention of :class:`zoo.comm.OpStats`). Gradients that may travel as
    rows (``sparse_gradients``) count as if they travelled whole, which is the most that it can be."""
    intra_bytes: Mapping[str, int] = field(default_factory=dict)
    """Those of them for ranks of the same node, where it is known which these are."""
    inter_bytes: Mapping[str, int] = field(default_factory=dict)
    """Those of them for other nodes."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Model states by tier: device, host, nvme. Where the device is the CPU, device and host are the same memory."""
    buffers_bytes: int = 0
    """The most host memory that buffers between memory and NVMe take."""
    pinned_bytes: int = 0
    """Of the host memory, what is page-locked with pin_memory."""
    nvme_files_bytes: int = 0
    """The size of the files, whole pages."""
    nvme_read_bytes: int = 0
    nvme_written_bytes: int = 0
    """Traffic of a step with its forwards and backwards."""
    to_host_bytes: int = 0
    """Copied a step from the device to host memory: gradients of states that are not on it."""
    to_device_bytes: int = 0
    """Copied a step the other way: parameters that are updated or kept elsewhere, sums of gradients to be added to."""
    host_updated: int = 0
    """Of this rank's parameters, how many the host's processors update."""
    gathered_bytes: int = 0
    """The most bytes of parameters, split over ranks, that are whole or on their way at the same time."""
    peak_bytes: int | None = None
    """The most host memory that is allocated at the same time in a step, activations and temporaries too, where a dry
    run was asked for."""
    micro_batches: int = 1
    """Of the step."""
    time: StepTime | SimulatedTime | None = None
    """How long the step takes, where hardware was given: by formulas, or by a run under virtual time."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, and the total."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found |= {name: dict(value) for name, value in found.items() if isinstance(value, Mapping)}
        return {
            **found, "time": None if self.time is None else self.time.to_dict(), "total_bytes": self.total_bytes
        }  # fmt: skip

    def table(self) -> str:
        """One line a figure; then the parts of the time, where there is one."""
        rows = [
            ("parameters in memory", self.parameters_bytes), ("gradients in memory", self.gradients_bytes),
            ("optimizer states in memory", self.optimizer_bytes),
            *((f"model states, tier {tier}", size) for tier, size in self.tiers.items()),
            ("gathered at the same time", self.gathered_bytes), ("buffers of offloading", self.buffers_bytes),
            *([] if self.peak_bytes is None else [("most allocated at the same time", self.peak_bytes)]),
            ("page-locked", self.pinned_bytes),
            ("files on NVMe", self.nvme_files_bytes), ("read from NVMe a step", self.nvme_read_bytes),
            ("written to NVMe a step", self.nvme_written_bytes),
            *((name, size) for name, size in (
                ("copied to the host a step", self.to_host_bytes), ("copied to the device a step", self.to_device_bytes)
            ) if size),
            *((f"sent a step, {op}", size) for op, size in self.wire_bytes.items()),
            *((f"to other nodes, {op}", size) for op, size in self.inter_bytes.items()),
        ]  # fmt: skip
        lines = [f"{name:<32}{size:>20,} bytes" for name, size in rows]
        return "\n".join(lines if self.time is None else [*lines, *self.time.lines()])

    @property
    def total_bytes(self) -> int:
        """Model states: parameters, gradients and optimizer states."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
