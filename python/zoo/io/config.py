"""The ``aio`` section of a configuration."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from zoo.config import Section


class AioConfig(Section):
    """How tensors travel to and from files; `Handle.from_config` makes a handle of it."""

    carried_by: ClassVar[str] = "zoo.zero"
    block_size: int = Field(default=1 << 20, ge=4096, le=1 << 30, multiple_of=4096)
    """Largest transfer, in bytes."""

    queue_depth: int = Field(default=8, ge=1, le=4096)
    """Transfers a thread keeps in flight."""

    intra_op_parallelism: int = Field(default=1, ge=1, le=64, alias="thread_count")
    """Threads that share the blocks of every tensor, each with a queue of its own."""

    single_submit: bool = False
    """Hand every transfer to the kernel by itself instead of many at once."""

    overlap_events: bool = True
    """Begin new transfers as others complete, instead of one full queue after the other."""

    use_gds: bool = False
    """Where cuFile is found (GPUDirect Storage), parameters and saved activations on NVMe travel between it and a GPU
    without host memory in between; where not, that is logged and they go through page-locked memory. What is updated
    on the CPU goes through host memory anyway."""
