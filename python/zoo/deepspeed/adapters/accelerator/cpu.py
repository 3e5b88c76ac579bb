"""The accelerator of machines without one: the host itself."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

import torch

from zoo.deepspeed.adapters.accelerator.base import DeepSpeedAccelerator, add_makers


class CPU_Accelerator(DeepSpeedAccelerator):
    """The CPU. It has one device, number 0, no streams and no events (None). Its memory is that of the process."""

    _name, _communication_backend_name = "cpu", "gloo"
    Stream: Any = None
    Event: Any = None

    def device_name(self, device_index: int | None = None) -> str:
        """ "cpu"."""
        return "cpu"

    def device(self, device_index: int | None = None) -> Any:
        """A context that changes nothing."""
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def current_device(self) -> int:
        """0."""
        return 0

    def current_device_name(self) -> str:
        """ "cpu"."""
        return "cpu"

    def device_count(self) -> int:
        """Ranks of this node, as the launcher says (LOCAL_SIZE, LOCAL_WORLD_SIZE); 1."""
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def is_available(self) -> bool:
        """True."""
        return True

    def is_synchronized_device(self) -> bool:
        """True."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs behind."""

    def manual_seed(self, seed: int) -> Any:
        """Seed torch's generator."""
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seed torch's generator."""
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Of torch's generator."""
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Of torch's generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Of torch's generator."""
        torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        """torch's generator."""
        return torch.default_generator

    def stream(self, stream: Any) -> Any:
        """A context that changes nothing."""
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        """None."""

    def default_stream(self, device_index: int | None = None) -> None:
        """None."""

    def is_bf16_supported(self) -> bool:
        """True."""
        return True

    def is_fp16_supported(self) -> bool:
        """True: every torch that zoo runs with computes in fp16 on the CPU."""
        return True

    def empty_cache(self) -> None:
        """There is none."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Resident bytes of the process."""
        return _status("VmRSS")

    memory_reserved = memory_cached = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most resident bytes since :meth:`reset_peak_memory_stats`, or since the process began."""
        return _status("VmHWM")

    max_memory_reserved = max_memory_cached = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Measure the peak from now on, where Linux lets us (``/proc/self/clear_refs``)."""
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Resident bytes, as torch's statistics name them."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(), "allocated_bytes.all.peak":
            self.max_memory_allocated(),
        }  # fmt: skip

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the host, in bytes."""
        return host_memory()[0]

    def available_memory(self, device_index: int | None = None) -> int:
        """Of the host, in bytes, without swapping."""
        return host_memory()[1]

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """No profiler takes ranges of the CPU."""

    def range_pop(self, domain: str | None = None) -> None:
        """See :meth:`range_push`."""

    def create_graph(self) -> None:
        """None: there are no graphs."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """A context that changes nothing."""
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """There are no graphs."""


add_makers(CPU_Accelerator, "cpu")


def _status(field: str) -> int:
    """Bytes, of the kernel's page about this process; the peak that ``getrusage`` knows where there is none."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(f"{field}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_memory() -> tuple[int, int]:
    """(all, available without swapping), in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return total, int(line.split()[1]) * 1024
    except OSError:
        pass
    return total, os.sysconf("SC_AVPHYS_PAGES") * page
