"""Named components by kind: every one can be swapped by name, for one experiment, from any package.

Vocabulary. *Kind*: what a component can stand for ("optimizer"). *Name*: which one ("adamw"). *Component*: a class
with its own small ``Config``. *Origin*: who registered it: a distribution, a file or an override. *Contested*:
claimed by two origins.

The functions here speak to one default `Registry`; tests and embedders make their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zoo.registry.building import (
    ByKeywords,
    adapter_of,
    argument_types,
    config_class,
    keywords,
    known_keys,
    make_config,
)
from zoo.registry.core import CORE
from zoo.registry.describe import Choice
from zoo.registry.describe import describe as _describe
from zoo.registry.errors import BuildError, DuplicateError, LoadError, RegistryError, UnknownError, near, nearest
from zoo.registry.registry import GROUP, Entry, Registry, installed

__all__ = [
    "CORE",
    "DEFAULT",
    "GROUP",
    "BuildError",
    "ByKeywords",
    "Choice",
    "DuplicateError",
    "Entry",
    "LoadError",
    "Registry",
    "RegistryError",
    "Subpackage",
    "UnknownError",
    "adapter_of",
    "argument_types",
    "build",
    "config_class",
    "describe",
    "entry",
    "get",
    "installed",
    "keywords",
    "kinds",
    "known_keys",
    "make_config",
    "names",
    "near",
    "nearest",
    "override",
    "problems",
    "register",
    "scope",
]


@dataclass(frozen=True)
class Subpackage:
    """What a distribution tells about itself under the kind "subpackage"."""

    name: str
    version: str
    summary: str


DEFAULT = Registry(CORE, origin="zoo-core", discover=installed)
"""The core's components and those of every installed distribution."""

register = DEFAULT.register
build = DEFAULT.build
get = DEFAULT.get
entry = DEFAULT.entry
names = DEFAULT.names
kinds = DEFAULT.kinds
problems = DEFAULT.problems
override = DEFAULT.override
scope = DEFAULT.scope


def describe(tree: Mapping[str, Choice], registry: Registry = DEFAULT) -> str:
    """The resolved tree of an experiment as text: kinds, names, origins and config values (see `Choice`)."""
    return _describe(tree, registry)
