"""The sections ``offload_param`` and ``offload_optimizer`` of ``zero_optimization``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from zoo.config import Section
from zoo.config.fates import Fate
from zoo.config.section import Documented
from zoo.shard.documents import OFFLOAD_OPTIMIZER_FATES, OFFLOAD_PARAM_FATES

Device = Literal["none", "cpu", "nvme"]


class OffloadParamConfig(Section):
    """Where the partitioned parameters live while no unit uses them. Stage 3 only."""

    fates: ClassVar[Mapping[str, Fate]] = OFFLOAD_PARAM_FATES

    device: Device = "none"
    """"cpu" keeps this rank's shards in host memory, "nvme" in a file under nvme_path."""

    nvme_path: Path | None = None
    """A directory on the device; each rank keeps unnamed files there, which vanish with the process."""

    max_in_cpu: int = Field(default=1_000_000_000, ge=0)
    """With "nvme": this many elements of this rank's shards stay in host memory."""

    pin_memory: bool = False
    """Host memory is page-locked (with a CUDA device)."""


class OffloadOptimizerConfig(Section):
    """Where optimizer states and reduced gradients live, and with them where the update runs. Stages 1 to 3."""

    fates: ClassVar[Mapping[str, Fate]] = OFFLOAD_OPTIMIZER_FATES

    device: Device = "none"
    """"cpu" keeps states in host memory and updates on the CPU; "nvme" keeps them in a file under nvme_path."""

    nvme_path: Path | None = None
    """A directory on the device; each rank keeps unnamed files there, which vanish with the process."""

    pipeline_read: Annotated[bool, Documented(False)] = True
    """Read the states of the next sub-group while one is updated: one more buffer of a sub-group, or three with
    update_in_backward."""

    pipeline_write: Annotated[bool, Documented(False)] = True
    """Write the states of a sub-group while the next one is updated: one more buffer of a sub-group, or three with
    update_in_backward."""

    ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """This part of the elements is offloaded; the states of the rest stay on the device and are updated there."""

    pin_memory: bool = False
    """Host memory is page-locked (with a CUDA device)."""
