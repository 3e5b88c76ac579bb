"""What the accelerators of all kinds have in common."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

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
        """Choose a backend of ``torch.compile``, for calls of ``engine.compile`` that name none.

        Raises:
            ValueError: there is none of that name.
        """
        from zoo.compile.config import check_backend

        check_backend(backend, f"set_compile_backend({backend!r})")
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        """The module of the builders of operations."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The class of that name in ``deepspeed.ops.op_builder``; None of a name that no builder has."""
        from zoo.deepspeed.adapters.utilities import op_builders

        return getattr(op_builders, class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        """A builder of that class: one that zoo does not have is not compatible. None of a name that no builder has."""
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


def _maker(kind: str, name: str) -> property:
    """``torch.FloatTensor`` of the CPU is a type; the GPU's is a function, which does the same with a list."""
    dtype = getattr(torch, name).dtype

    def get(self: Any) -> Any:
        return getattr(torch, name) if kind == "cpu" else functools.partial(torch.tensor, dtype=dtype, device="cuda")

    return property(get, doc=f"Makes a tensor of {dtype} on this device from a list.")


def add_makers(cls: type, kind: str) -> None:
    """Give the class of a kind its ``FloatTensor`` and the like."""
    for name in _TENSORS:
        setattr(cls, name, _maker(kind, name))
