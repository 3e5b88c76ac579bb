"""``deepspeed.ops.op_builder``: what programs ask before they use an operation; ``zoo.kernels`` has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


class OpBuilder:
    """One operation. ``NAME`` is DeepSpeed's name of it."""

    NAME = ""
    _home = "zoo.kernels"
    _family = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch was built for AMD's GPUs."""
        return torch.version.hip is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """(major, minor) of ROCm that torch was built for; (0, 0) for a torch of other devices."""
        major, minor = [*(torch.version.hip or "0.0").split("."), "0"][:2]
        return int(major), int(minor)

    @staticmethod
    def is_sycl_enabled() -> bool:
        """False: nothing of zoo's is compiled by SYCL."""
        return False

    def absolute_name(self) -> str:
        """DeepSpeed's name of the compiled module: "deepspeed.ops.adam.cpu_adam_op"."""
        return f"deepspeed.ops.{self._family}.{self.NAME}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works here: natively, or by its reference where there is no compiler."""
        try:
            import_module(self._home)
        except ModuleNotFoundError:
            return False
        return True

    def is_compiled_ahead(self) -> bool:
        """Whether a compiled library that fits this machine's torch came with the package."""
        try:
            from zoo.kernels.building import built_ahead
        except ModuleNotFoundError:
            return False
        return built_ahead() is not None

    def load(self, verbose: bool = True) -> Any:
        """The module that has it, compiled where that can be.

        Raises:
            ModuleNotFoundError: the distribution zoo-kernels is not installed.
        """
        from zoo.kernels import loading

        loading.native()
        return import_module(self._home)


class CUDAOpBuilder(OpBuilder):
    """One that runs on GPUs, and here on CPUs too."""


class CPUAdamBuilder(OpBuilder):
    """Adam on the CPU."""

    NAME, _home, _family = "cpu_adam", "zoo.kernels.update", "adam"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the CPU."""

    NAME, _home, _family = "cpu_adagrad", "zoo.kernels.update", "adagrad"


class CPULionBuilder(OpBuilder):
    """Lion on the CPU."""

    NAME, _home, _family = "cpu_lion", "zoo.kernels.update", "lion"


class FusedAdamBuilder(CUDAOpBuilder):
    """Adam on any device."""

    NAME, _home, _family = "fused_adam", "zoo.kernels.update", "adam"


class FusedLambBuilder(CUDAOpBuilder):
    """LAMB on any device."""

    NAME, _home, _family = "fused_lamb", "zoo.kernels.update", "lamb"


class FusedLionBuilder(CUDAOpBuilder):
    """Lion on any device."""

    NAME, _home, _family = "fused_lion", "zoo.kernels.update", "lion"


class AsyncIOBuilder(OpBuilder):
    """Tensors to and from files: ``AsyncIOBuilder().load().aio_handle(...)``."""

    NAME, _home, _family = "async_io", "zoo.deepspeed.adapters.utilities.aio", "aio"

    def is_compiled_ahead(self) -> bool:
        """Whether zoo's extension in Rust is there, which it always is."""
        return True

    def load(self, verbose: bool = True) -> Any:
        """The module with ``aio_handle``."""
        return import_module(self._home)


class NotImplementedBuilder(OpBuilder):
    """An operation that zoo does not have: it says so when it is asked, and cannot be loaded."""

    NAME = "deepspeed_not_implemented"

    def is_compatible(self, verbose: bool = False) -> bool:
        """It is not."""
        return False

    def is_compiled_ahead(self) -> bool:
        """It is not."""
        return False

    def load(self, verbose: bool = True) -> Any:
        """Refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: zoo does not have this operation; is_compatible() is False, and "
            "deepspeed.ops.__compatible_ops__ lists those that it has."
        )


class PinMemoryBuilder(NotImplementedBuilder):
    """Page-locked memory without CUDA; that of ``zoo.io.BufferPool`` is aligned."""

    NAME = "pin_memory"


ALL: tuple[type[OpBuilder], ...] = (
    CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder, FusedAdamBuilder, FusedLambBuilder, FusedLionBuilder,
    AsyncIOBuilder, PinMemoryBuilder, NotImplementedBuilder,
)  # fmt: skip
"""Every builder."""


def __getattr__(name: str) -> Any:
    if name == "__compatible_ops__":  # found out when somebody asks
        return {builder.NAME: builder().is_compatible() for builder in ALL}
    if name.endswith("Builder"):  # the table says for which names
        space = {"__module__": __name__, "__doc__": NotImplementedBuilder.__doc__}
        made = globals()[name] = type(name, (NotImplementedBuilder,), space)
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
