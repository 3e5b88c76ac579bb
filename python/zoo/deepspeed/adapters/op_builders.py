"""``deepspeed.ops.op_builder``: what programs ask before they use an operation; ``zoo.kernels`` has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class OpBuilder:
    """One operation. ``NAME`` is DeepSpeed's name of it."""

    NAME = ""
    _home = "zoo.kernels"

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works here: natively, or by its reference where there is no compiler."""
        try:
            import_module(self._home)
        except ModuleNotFoundError:
            return False
        return True

    def load(self, verbose: bool = True) -> Any:
        """The module that has it, compiled where that can be.

        Raises:
            ModuleNotFoundError: the distribution zoo-kernels is not installed.
        """
        from zoo.kernels import loading

        loading.native()
        return import_module(self._home)


class CPUAdamBuilder(OpBuilder):
    """Adam on the CPU."""

    NAME, _home = "cpu_adam", "zoo.kernels.update"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the CPU."""

    NAME, _home = "cpu_adagrad", "zoo.kernels.update"


class CPULionBuilder(OpBuilder):
    """Lion on the CPU."""

    NAME, _home = "cpu_lion", "zoo.kernels.update"


class FusedAdamBuilder(OpBuilder):
    """Adam on any device."""

    NAME, _home = "fused_adam", "zoo.kernels.update"


class FusedLambBuilder(OpBuilder):
    """LAMB on any device."""

    NAME, _home = "fused_lamb", "zoo.kernels.update"


class FusedLionBuilder(OpBuilder):
    """Lion on any device."""

    NAME, _home = "fused_lion", "zoo.kernels.update"


class AsyncIOBuilder(OpBuilder):
    """Tensors to and from files: ``AsyncIOBuilder().load().aio_handle(...)``."""

    NAME, _home = "async_io", "zoo.deepspeed.adapters.aio"

    def load(self, verbose: bool = True) -> Any:
        """The module with ``aio_handle``."""
        return import_module(self._home)
