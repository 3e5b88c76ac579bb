"""The accelerator of machines with NVIDIA's GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.deepspeed.adapters.accelerator.base import DeepSpeedAccelerator, add_makers


class CUDA_Accelerator(DeepSpeedAccelerator):
    """GPUs, by the functions of ``torch.cuda``."""

    _name, _communication_backend_name = "cuda", "nccl"
    Stream = torch.cuda.Stream
    Event = torch.cuda.Event

    def device(self, device_index: int | None = None) -> Any:
        """As in the base class."""
        return torch.cuda.device(device_index)

    def set_device(self, device_index: int) -> None:
        """As in the base class."""
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """As in the base class."""
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        """As in the base class."""
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        """As in the base class."""
        return torch.cuda.device_count()

    def is_available(self) -> bool:
        """As in the base class."""
        return torch.cuda.is_available()

    def communication_backend_version(self) -> Any:
        """Of NCCL."""
        return torch.cuda.nccl.version()  # type: ignore[no-untyped-call]

    def is_synchronized_device(self) -> bool:
        """False."""
        return False

    def synchronize(self, device_index: int | None = None) -> None:
        """As in the base class."""
        torch.cuda.synchronize(device_index)

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it when CUDA has begun."""
        return torch.cuda._lazy_call(callback)  # type: ignore[no-untyped-call]

    def manual_seed(self, seed: int) -> None:
        """As in the base class."""
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """As in the base class."""
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """As in the base class."""
        return torch.cuda.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """As in the base class."""
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """As in the base class."""
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        """As in the base class."""
        return torch.cuda.default_generators[device_index]

    def stream(self, stream: Any) -> Any:
        """A context in which operations go to this stream."""
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """Where operations go now."""
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """Where they go by default."""
        return torch.cuda.default_stream(device_index)

    def is_bf16_supported(self) -> bool:
        """As in the base class."""
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Compute capability 7 or newer."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 7

    def is_triton_supported(self) -> bool:
        """Compute capability 8 or newer."""
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8

    def amp(self) -> Any:
        """``torch.cuda.amp``."""
        return torch.cuda.amp

    def empty_cache(self) -> None:
        """As torch's, like all of the following."""
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors."""
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most."""
        return torch.cuda.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch holds."""
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most."""
        return torch.cuda.max_memory_reserved(device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Measure the most from now on."""
        torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """By name."""
        return torch.cuda.memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the GPU, in bytes."""
        return int(torch.cuda.get_device_properties(device_index).total_memory)  # type: ignore[arg-type, unused-ignore]

    def available_memory(self, device_index: int | None = None) -> int:
        """Of the GPU, in bytes: what nobody has."""
        return int(torch.cuda.mem_get_info(device_index)[0])

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a range that profilers show."""
        return torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: str | None = None) -> Any:
        """End it."""
        return torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def create_graph(self) -> Any:
        """An empty graph."""
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """A context whose operations become the graph."""
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        """Run it."""
        graph.replay()


add_makers(CUDA_Accelerator, "cuda")
