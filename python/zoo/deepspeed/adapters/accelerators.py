"""``deepspeed.accelerator``: the device that programs compute on, behind one set of methods.

CUDA where torch sees a GPU, else the CPU; the variable DS_ACCELERATOR ("cuda" or "cpu") chooses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]
_TENSORS = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")


class DeepSpeedAccelerator(ABC):
    """What both kinds have in common. A device is a number, or None for the current one."""

    _name = ""
    _communication_backend_name = ""
    _compile_backend = "inductor"

    # -- which device -------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", or "cuda:1" with a number."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    @abstractmethod
    def device(self, device_index: int | None = None) -> Any:
        """A context in which that device is the current one."""

    @abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make it the current one."""

    @abstractmethod
    def current_device(self) -> int:
        """The number of the current one."""

    @abstractmethod
    def current_device_name(self) -> str:
        """As "cuda:1"."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices that this process sees."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether it can be used."""

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a device of this kind."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """Of ``torch.distributed``."""
        return self._communication_backend_name

    # -- how it works -------------------------------------------------------------------------------------------------

    @abstractmethod
    def is_synchronized_device(self) -> bool:
        """Whether an operation is over when its call returns."""

    def use_host_timers(self) -> bool:
        """Whether the host's clock measures operations."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether operations see the results of earlier ones without streams being told."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether running ahead cannot use up memory."""
        return self.is_synchronized_device()

    @abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until it has done everything."""

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it when the device has begun."""
        return callback()

    # -- numbers by chance --------------------------------------------------------------------------------------------

    def random(self) -> Any:
        """The module ``torch.random``."""
        return torch.random

    @abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the generator of the current device."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""

    @abstractmethod
    def initial_seed(self) -> int:
        """What the current device's generator was seeded with."""

    @abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the generator."""

    @abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set it."""

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator."""

    # -- dtypes -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""

    @abstractmethod
    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""

    def is_fp64_supported(self) -> bool:
        """Whether it computes in fp64."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """What models are trained in."""
        found = [torch.float32]
        if self.is_fp16_supported():
            found.append(torch.float16)
        if self.is_bf16_supported():
            found.append(torch.bfloat16)
        return found

    def preferred_dtype(self) -> torch.dtype:
        """bf16 where there is a GPU that has it, then fp16; fp32 on the CPU."""
        if self._name == "cpu":
            return torch.float32
        return torch.bfloat16 if self.is_bf16_supported() else torch.float16

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for it."""
        return False

    def amp(self) -> Any:
        """torch's module of mixed precision for it, None for the CPU."""
        return None

    # -- memory of the host -------------------------------------------------------------------------------------------

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A copy in page-locked memory where there is a GPU; the tensor itself elsewhere, and where it is so already.

        Raises:
            ValueError: ``make_copy=False`` of a tensor that is not page-locked: memory cannot be locked afterwards.
        """
        if self._name == "cpu" or tensor.is_pinned():
            return tensor
        if not make_copy:
            raise ValueError("pin_memory(make_copy=False): zoo copies into page-locked memory; leave it out.")
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is in page-locked memory."""
        return torch.cuda.is_available() and tensor.is_pinned()

    # -- the compiler, operations -------------------------------------------------------------------------------------

    def get_compile_backend(self) -> str:
        """What :meth:`set_compile_backend` chose; "inductor"."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose a backend of ``torch.compile``.

        Raises:
            ValueError: there is none of that name.
        """
        known = torch.compiler.list_backends()
        if backend not in known:
            raise ValueError(f"set_compile_backend({backend!r}): torch.compile has {', '.join(known)}.")
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        """The module of the builders of operations."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The class of that name in ``deepspeed.ops.op_builder``; None where zoo does not have the operation."""
        from zoo.deepspeed.adapters import op_builders

        return getattr(op_builders, class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        """A builder of that class; None where zoo does not have the operation."""
        found = self.get_op_builder(class_name)
        return found() if found is not None else None

    def build_extension(self) -> Any:
        """torch's class for ``setup.py``."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    # -- environment --------------------------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Beginnings of the names of variables that a launcher passes on."""
        return ["NCCL"] if self._name == "cuda" else []

    def visible_devices_envs(self) -> list[str]:
        """Variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Set them in ``current_env``."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))


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


def _maker(kind: str, name: str) -> property:
    """``torch.FloatTensor`` of the CPU is a type; the GPU's is a function, which does the same with a list."""
    dtype = getattr(torch, name).dtype

    def get(self: Any) -> Any:
        return getattr(torch, name) if kind == "cpu" else functools.partial(torch.tensor, dtype=dtype, device="cuda")

    return property(get, doc=f"Makes a tensor of {dtype} on this device from a list.")


for _name in _TENSORS:
    setattr(CPU_Accelerator, _name, _maker("cpu", _name))
    setattr(CUDA_Accelerator, _name, _maker("cuda", _name))


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


_current: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process, the same object each time.

    Raises:
        ValueError: DS_ACCELERATOR names one that zoo does not have.
    """
    global _current
    if _current is None:
        name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in SUPPORTED_ACCELERATOR_LIST:
            raise ValueError(f"DS_ACCELERATOR={name!r}; allowed are {', '.join(SUPPORTED_ACCELERATOR_LIST)}.")
        _current = CUDA_Accelerator() if name == "cuda" else CPU_Accelerator()
    return _current


def set_accelerator(accel_obj: DeepSpeedAccelerator | None) -> None:
    """Make this the accelerator of the process; None: choose again when it is next asked for.

    Raises:
        AssertionError: it is no :class:`DeepSpeedAccelerator`.
    """
    global _current
    if accel_obj is not None and not isinstance(accel_obj, DeepSpeedAccelerator):
        raise AssertionError(
            f"set_accelerator() got a {type(accel_obj).__name__}; it takes an object of a subclass of "
            "DeepSpeedAccelerator."
        )
    _current = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether zoo has an accelerator of this kind."""
    return get_accelerator().device_name().split(":")[0] in SUPPORTED_ACCELERATOR_LIST
