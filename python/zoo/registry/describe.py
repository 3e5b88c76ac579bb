"""The resolved tree of an experiment as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.registry.building import config_values
from zoo.registry.registry import Registry

__all__ = ["Choice", "describe"]


@dataclass(frozen=True)
class Choice:
    """One component of an experiment: which kind, which name, its config, and the components it is made of in turn."""

    kind: str
    name: str
    config: Any = None
    parts: Mapping[str, Choice] = field(default_factory=dict)


def describe(tree: Mapping[str, Choice], registry: Registry) -> str:
    """The tree with each component's kind, name, origin and config values; values left at their default are marked.

    Raises:
        RegistryError: a name that does not resolve or a config that does not validate, as `Registry.build` would.
    """
    return "\n".join(_lines(tree, registry, ""))


def _lines(tree: Mapping[str, Choice], registry: Registry, indent: str) -> list[str]:
    lines = []
    for position, (label, choice) in enumerate(tree.items()):
        last = position == len(tree) - 1
        entry = registry.entry(choice.kind, choice.name)
        head = choice.name if label == choice.kind else f"{choice.kind} {choice.name}"
        lines.append(f"{indent}{'└─' if last else '├─'} {label}: {head}  [{entry}]")
        below = indent + ("   " if last else "│  ")
        bar = "│  " if choice.parts else "   "
        factory = registry.get(choice.kind, choice.name)
        for name, value, given in config_values(factory, f"{choice.kind} {choice.name!r}", choice.config):
            lines.append(f"{below}{bar}{name} = {value!r}{'' if given else '  (default)'}")
        lines += _lines(choice.parts, registry, below)
    return lines
