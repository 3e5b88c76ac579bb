"""Parts and sinks of an engine: built from enabled sections, ordered, and called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zoo.comm import Communicator, raise_in_next, raise_together, together
from zoo.config import Config, ConfigError
from zoo.parts import Clock, Environment, Sink, StepRecord, in_order, parts_of
from zoo.registry import Registry

PART, SINK = "engine_part", "sink"


def build(
    config: Config, environment: Environment, registry: Registry, everyone: Communicator | None = None, *,
    parts: Mapping[str, Any] | None = None, sinks: Mapping[str, Sink] | None = None, monitors: bool = True,
    model: nn.Module | None = None,
) -> tuple[Parts, dict[str, Sink]]:  # fmt: skip
    """The parts and sinks of all sections that the document asks for, and those that the user or the model brings.

    Sinks of sections are built on rank 0 only, unless the section has ``ranks`` = "all". A collective of ``everyone``
    where there are some: what keeps one from being built is raised on all ranks.

    Raises:
        ConfigError: a section that is asked for, and that nobody carries out.
        ValueError: a part of the user has the name of one from the configuration; or they cannot be ordered; or a sink
            cannot be built.
    """
    asked = {kind: [name for name in registry.names(kind) if config.asks_for(name)] for kind in (PART, SINK)}
    wanted = asked[SINK] if monitors else []
    # Without sinks the next thing that all ranks do together is to construct what shards the model.
    with raise_together(everyone, "initialize") if wanted else raise_in_next(lambda: everyone, "initialize"):
        _check_asked(asked, config, registry, parts=parts, sinks=sinks, model=model)
        found = {name: registry.get(PART, name)(getattr(config, name), environment) for name in asked[PART]}
        brought = parts_of(model) if model is not None else {}
        for name in brought.keys() - found.keys() - (parts or {}).keys():
            found[name] = brought[name](model, environment)
        ordered = Parts({**found, **(parts or {})})
    return ordered, {**_sinks(wanted, config, environment, registry, everyone), **(sinks or {})}


def _check_asked(
    asked: Mapping[str, list[str]], config: Config, registry: Registry, *, parts: Mapping[str, Any] | None,
    sinks: Mapping[str, Sink] | None, model: nn.Module | None,
) -> None:  # fmt: skip
    idle = [
        f"{name}: asked for, and nobody carries it out: neither an engine part nor a sink is registered under this "
        "name. Remove the section, or install the package that has it."
        for name, section in config.package_sections.items()
        if config.asks_for(name) and not section.carried_by and not section.runner
        and not any(name in names for names in asked.values())
    ]  # fmt: skip
    runs = getattr(model, "engine_runner", "plain")
    idle += [
        f"{name}: asked for, and nobody carries it out: the runner {section.runner!r} does, and a "
        f"{type(model).__name__} is run by {runs!r}."
        for name, section in config.package_sections.items()
        if section.runner not in ("", runs) and config.asks_for(name) and getattr(config, name) != section()
    ]
    if idle:
        raise ConfigError(idle)
    for what, kind, given in (("parts", PART, parts), ("sinks", SINK, sinks)):
        for name in given or {}:
            if name in asked[kind]:
                raise ValueError(
                    f"initialize got {what}={{{name!r}: ...}}, and the configuration has one of that name."
                )


def _sinks(
    names: list[str], config: Config, environment: Environment, registry: Registry, everyone: Communicator | None
) -> dict[str, Sink]:  # fmt: skip
    """Those of this rank; all or, on every rank, none."""
    made: dict[str, Sink] = {}

    def make() -> None:
        for name in names:
            section = getattr(config, name)
            if environment.rank == 0 or getattr(section, "ranks", "first") == "all":
                made[name] = registry.get(SINK, name)(section, environment)

    try:
        if names and environment.world_size > 1:
            # A disk or a log-in may fail on some ranks only.
            comm = everyone if everyone is not None else Communicator()
            together(comm, "building monitors", make, error=lambda text, _: ValueError(text), plain=ValueError)
        else:
            make()
    except BaseException:
        for sink in made.values():
            with contextlib.suppress(Exception):  # the error at hand is the news
                sink.close()
        raise
    return made


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
        self._counting = those("counts_batch")
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

    def counts_batch(self, clock: Clock) -> bool:
        """Whether samples and tokens of the micro-batch that :meth:`on_batch` had count."""
        return all(call(clock) for _, call in self._counting)

    def on_loss(self, loss: Any, clock: Clock) -> Any:
        """The loss to go backward from."""
        for _, call in self._loss:
            loss = call(loss, clock)
        return loss

    def check_untouched_loss(self) -> None:
        """Raise ValueError where a part changes the loss: a backward has begun from one that none has seen."""
        if self._loss:
            names = ", ".join(repr(name) for name, _ in self._loss)
            raise ValueError(
                f"loss.backward() under an engine whose part {names} changes the loss: its gradients would be those of "
                "a loss without what the part adds. Call engine.backward(loss)."
            )

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

    def closers(self) -> list[Callable[[], None]]:
        """What closes each part that has something to close, in the order of the parts."""
        return [part.close for part in self.all.values() if hasattr(part, "close")]

    def check_updates(self, in_backward: bool) -> None:
        """Raise ValueError for parts that do something before an update, where updates are made in backward."""
        names = sorted({name for name, _ in (*self._before, *self._factors)})
        if in_backward and names:
            raise ValueError(
                f"zero_optimization.update_in_backward with the engine part {', '.join(names)}, which has to do "
                "something before each update; those are made in backward. Leave one of the two out."
            )
