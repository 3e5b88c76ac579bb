"""The typed configuration: a ds_config document in, a frozen tree of values out, with the origin of each.

``read`` checks keys and keeps values that are still "auto"; ``load`` checks everything; ``read_section`` reads one
section alone. A subpackage owns its section: it derives a class from `Section` and registers it (`register_section`),
and the value is reached as an attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zoo.config.batch import BatchSizeError
from zoo.config.choice import ComponentChoice, describe_choices
from zoo.config.core import Bf16, Comm, Config, DataTypes, Fp16, Optimizer, Scheduler, TorchAutocast
from zoo.config.document import Document, read, read_section
from zoo.config.errors import ConfigError
from zoo.config.mesh import Mesh
from zoo.config.schema import finish
from zoo.config.section import Section
from zoo.config.tree import ROOT_KIND, SECTION_KIND, Tree
from zoo.config.tree import root_keys as _root_keys
from zoo.registry import DEFAULT, Registry

__all__ = [
    "ROOT_KIND",
    "SECTION_KIND",
    "BatchSizeError",
    "Bf16",
    "Comm",
    "ComponentChoice",
    "Config",
    "ConfigError",
    "DataTypes",
    "Document",
    "Fp16",
    "Mesh",
    "Optimizer",
    "Scheduler",
    "Section",
    "TorchAutocast",
    "json_schema",
    "load",
    "read",
    "read_section",
    "register_section",
    "root_keys",
]


def load(
    source: str | Path | Mapping[str, Any],
    *,
    sections: Mapping[str, type[Section]] | None = None,
    world_size: int | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    auto: Mapping[str, Any] | None = None,
    registry: Registry = DEFAULT,
) -> Config:
    """Read, fill in, validate and freeze a configuration.

    Args:
        source: path of a .json, .yaml or .yml file, or a mapping.
        sections: the application's own sections by name, such as ``{"model": ModelConfig}``.
        world_size: data-parallel ranks; when None, the environment's WORLD_SIZE (torchrun sets it), else 1.
        overrides: ``{"zero_optimization.stage": 1}`` or ``["zero_optimization.stage=1"]``; they win over the document.
        auto: dotted path → value for what the document leaves at "auto".
        registry: where the packages' sections come from.

    Raises:
        ConfigError: every problem found, each with its path, what was given, what is allowed.
        FileNotFoundError: no such file.
    """
    document = read(source, sections=sections, overrides=overrides, registry=registry)
    return document.resolve_auto(auto or {}).load(world_size)


def root_keys(registry: Registry = DEFAULT) -> set[str]:
    """Every key that the root of a configuration may have, in every spelling: fields, sections of packages, and
    documented keys that are refused, unnecessary or wait."""
    return _root_keys(Config, registry)


def register_section(name: str, section: type[Section] | str, *, registry: Registry = DEFAULT) -> None:
    """Make ``section`` (a class, or "module:Class" to import it at the first `read`) the owner of a top-level key.

    Packages outside the core write the entry point ``"config_section.<name>" = "module:Class"`` instead.
    """
    registry.register(SECTION_KIND, name, section)


def json_schema(sections: Mapping[str, type[Section]] | None = None, *, registry: Registry = DEFAULT) -> dict[str, Any]:
    """JSON schema of a document with all registered sections, for editors.

    Both spellings of aliased keys are in it, and the names and options of all components that a document may choose.
    """
    root = Tree.of(Config, registry, sections).whole().root
    return describe_choices(finish(root.model_json_schema(by_alias=False)), registry)
