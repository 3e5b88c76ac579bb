"""Parts and sinks of an engine: built from enabled sections, ordered, and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zoo.config import Config, ConfigError
from zoo.parts import Clock, Environment, Sink, StepRecord, in_order
from zoo.registry import Registry

PART, SINK = "engine_part", "sink"


def build(
    config: Config, environment: Environment, registry: Registry, *,
    parts: Mapping[str, Any] | None = None, sinks: Mapping[str, Sink] | None = None,
) -> tuple[Parts, dict[str, Sink]]:  # fmt: skip
    """The parts and sinks of all sections that the document asks for, and those that the user brings.

    Raises:
        ConfigError: a section that is asked for, and that nobody carries out.
        ValueError: a part of the user has the name of one from the configuration; or they cannot be ordered.
    """
    found: dict[str, Any] = {}
    writers: dict[str, Sink] = {}
    for kind, into in ((PART, found), (SINK, writers)):
        for name in registry.names(kind):
            if config.asks_for(name):
                into[name] = registry.get(kind, name)(getattr(config, name), environment)
    idle = [
        f"{name}: asked for, and nobody carries it out: neither an engine part nor a sink is registered under this "
        "name. Remove the section, or install the package that has it."
        for name, section in config.package_sections.items()
        if config.asks_for(name) and not section.carried_by and name not in found and name not in writers
    ]
    if idle:
        raise ConfigError(idle)
    mine: tuple[tuple[str, dict[str, Any], Mapping[str, Any] | None], ...] = (
        ("parts", found, parts), ("sinks", writers, sinks)
    )  # fmt: skip
    for what, into, given in mine:
        for name, item in (given or {}).items():
            if name in into:
                raise ValueError(
                    f"initialize got {what}={{{name!r}: ...}}, and the configuration has one of that name."
                )
            into[name] = item
    return Parts(found), writers


class Parts:
    """The parts of one engine in their order; a method that no part has costs nothing.

    Attributes:
        all: name → part.
        changes_batches, changes_loss: some part does.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        ordered = in_order(parts)
        self.all: dict[str, Any] = dict(ordered)

        def those(method: str) -> list[tuple[str, Callable[..., Any]]]:
            return [(name, getattr(part, method)) for name, part in ordered if hasattr(part, method)]

        self._prepare, self._batch, self._loss = those("prepare"), those("on_batch"), those("on_loss")
        self._before, self._after = those("before_update"), those("after_update")
        self._factors, self._metrics, self._loaders = those("lr_factor"), those("metrics"), those("make_loader")
        self.changes_batches, self.changes_loss = bool(self._batch), bool(self._loss)

    def prepare(self, module: nn.Module, mesh: Any) -> nn.Module:
        """The module to train."""
        for _, call in self._prepare:
            changed = call(module, mesh)
            module = module if changed is None else changed
        return module

    def make_loader(self, dataset: Any, **how: Any) -> Any:
        """The loader of the part that makes one; None without such a part."""
        if len(self._loaders) > 1:
            names = " and ".join(name for name, _ in self._loaders)
            raise ValueError(f"{names} both decide which samples a micro-batch has; enable one of them.")
        return self._loaders[0][1](dataset, **how) if self._loaders else None

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What goes into the model."""
        for _, call in self._batch:
            args, kwargs = call(args, kwargs, clock)
        return args, kwargs

    def on_loss(self, loss: Any, clock: Clock) -> Any:
        """The loss to go backward from."""
        for _, call in self._loss:
            loss = call(loss, clock)
        return loss

    def before_update(self, clock: Clock) -> None:
        """The gradients of a step are there."""
        for _, call in self._before:
            call(clock)

    def lr_factor(self, clock: Clock) -> float:
        """The product of what parts multiply learning rates by."""
        factor = 1.0
        for _, call in self._factors:
            factor *= float(call(clock))
        return factor

    def metrics(self) -> dict[str, float]:
        """Numbers of all parts, each under "<part>/<name>"."""
        return {f"{name}/{key}": float(value) for name, call in self._metrics for key, value in call().items()}

    def after_update(self, record: StepRecord) -> None:
        """A step is over."""
        for _, call in self._after:
            call(record)

    def close(self) -> None:
        """Each part that has something to close, the last first."""
        for part in reversed(self.all.values()):
            if hasattr(part, "close"):
                part.close()
