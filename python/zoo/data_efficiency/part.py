"""What the section ``data_efficiency`` asks for, as one engine part."""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.data_efficiency.config import DataEfficiencyConfig
from zoo.data_efficiency.random_ltd import RandomLTD
from zoo.parts import Clock, Environment


class DataEfficiency:
    """Curriculum by metrics of samples, micro-batches of variable size, and random-LTD, each where it is enabled.

    Args:
        section: ``data_efficiency``.
        environment: of the engine.

    Attributes:
        random_ltd: None where it is not enabled.
    """

    def __init__(self, section: DataEfficiencyConfig, environment: Environment) -> None:
        self.section, self.environment = section, environment
        routing = section.data_routing
        self.random_ltd: RandomLTD | None = None
        if routing.enabled and routing.random_ltd.enabled:
            self.random_ltd = RandomLTD(routing.random_ltd, environment, seed=section.seed)

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Change the module before it is sharded."""
        if self.random_ltd is not None:
            self.random_ltd.prepare(module, mesh)

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of training begins."""
        if self.random_ltd is not None:
            self.random_ltd.on_batch(clock)
        return args, kwargs

    def before_update(self, clock: Clock) -> None:
        """The gradients of a step are there."""
        if self.random_ltd is not None:
            self.random_ltd.before_update()

    def metrics(self) -> dict[str, float]:
        """Of everything that is enabled."""
        return {} if self.random_ltd is None else self.random_ltd.metrics()

    def close(self) -> None:
        """Modules are called as before."""
        if self.random_ltd is not None:
            self.random_ltd.close()
