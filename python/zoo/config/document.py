"""`Document`: a configuration that has been read but not validated, with the origin of every value."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from zoo.config.batch import BATCH_KEYS, BatchSizeError, solve
from zoo.config.choice import check_choices
from zoo.config.core import CORE_SECTIONS, Config, config_class, make_config
from zoo.config.errors import ConfigError
from zoo.config.mesh import Mesh, MeshError
from zoo.config.reading import nest, read_overrides, read_source
from zoo.config.section import Section, allows_auto, fields_by_key, section_of
from zoo.registry import DEFAULT, LoadError, Registry, nearest

__all__ = ["SECTION_KIND", "Document", "find_sections", "read"]

SECTION_KIND = "config_section"
APPLICATION_SECTIONS = ("model", "data", "training")

Sections = dict[str, tuple[type[Section], bool]]


def find_sections(
    registry: Registry = DEFAULT, application: Mapping[str, type[Section]] | None = None
) -> tuple[Sections, dict[str, str]]:
    """The sections beside the core's own: name → (class, demanded by the application?), name → why it cannot load.

    Raises:
        ConfigError: an application section that is no `Section` or takes a name that is taken.
    """
    found: Sections = {}
    missing = {}
    for name in registry.names(SECTION_KIND):
        try:
            found[name] = (registry.get(SECTION_KIND, name), False)
        except LoadError as error:
            missing[name] = str(error)
    for name, section in (application or {}).items():
        if name in CORE_SECTIONS or name in found:
            raise ConfigError([f"{name}: the name of an application section is taken; choose another"], "sections")
        given: Any = section
        if not (isinstance(given, type) and issubclass(given, Section)):
            raise ConfigError(
                [f"{name}: given {section!r}; allowed is a class derived from zoo.config.Section"], "sections"
            )
        found[name] = (section, True)
    return found, missing


@dataclass(frozen=True)
class Document:
    """Values by their fields' own names (``values``) and dotted path → where it came from (``sources``).

    ``notes`` are the sentences of the sections about keys that they translated; ``registry`` is where the components
    are looked up that the document names.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    sections: Sections
    where: str = "configuration"
    notes: tuple[str, ...] = ()
    registry: Registry = DEFAULT

    def auto_paths(self) -> list[str]:
        """Dotted paths whose value is still ``"auto"``."""
        return list(_auto_paths(self.values, config_class(self.sections), ""))

    def resolve_auto(self, values: Mapping[str, Any]) -> Document:
        """Fill in what was left to be chosen: dotted path → value, for paths that are ``"auto"`` now; others stay.

        What a program knows (hidden size, learning rate) goes here; an explicit value in the document wins over it.

        Raises:
            ConfigError: a path that the schema does not have.
        """
        root = config_class(self.sections)
        problems: list[str] = []
        layer = _normalise(nest(values.items(), "resolve_auto"), root, "resolved auto", problems, [])
        if problems:
            raise ConfigError(problems, "resolve_auto")
        wanted = set(self.auto_paths())
        result = self
        for path in layer[1]:
            if path in wanted:
                value = _at(layer[0], path)
                result = result._put(nest([(path, value)], "resolve_auto"), {path: "resolved auto"})
        return result

    def override(self, overrides: Mapping[str, Any] | Iterable[str]) -> Document:
        """Later values for some paths: ``{"a.b": 1}`` or ``["a.b=1"]``.

        Raises:
            ConfigError: a path that the schema does not have.
        """
        problems: list[str] = []
        notes: list[str] = []
        layer = _normalise(read_overrides(overrides), config_class(self.sections), "override", problems, notes)
        if problems:
            raise ConfigError(problems, "overrides")
        return replace(self._put(*layer), notes=(*self.notes, *notes))

    def load(self, world_size: int | None = None) -> Config:
        """Validate and freeze.

        Args:
            world_size: data-parallel ranks; when None, the environment's WORLD_SIZE (torchrun sets it), else 1.

        Raises:
            ConfigError: everything that is wrong, each with its path.
        """
        ranks, origin = _world_size(world_size)
        problems = [
            f'{path}: still "auto"; give a value or fill it in with resolve_auto({{"{path}": ...}})'
            for path in self.auto_paths()
        ]
        if problems:
            raise ConfigError(problems, self.where)
        values, sources = self._with_batch_sizes(ranks, origin, problems)
        try:
            config = make_config(self.sections, values, sources, ranks, self.notes)
        except ValidationError as error:
            problems += [_sentence(item, config_class(self.sections)) for item in error.errors(include_url=False)]
            raise ConfigError(problems, self.where) from None
        problems += [*_contradictions(config, config), *check_choices(config, self.registry, "")]
        if problems:
            raise ConfigError(problems, self.where)
        for note in self.notes:
            warnings.warn(note, stacklevel=2)
        return config

    def _put(self, values: dict[str, Any], sources: dict[str, str]) -> Document:
        # Whatever lay at or below a path that is set now is gone, and so is its source.
        kept = {
            path: source
            for path, source in self.sources.items()
            if not any(path == new or path.startswith(new + ".") or new.startswith(path + ".") for new in sources)
        }
        return replace(self, values=_merge(self.values, values), sources={**kept, **sources})

    def _with_batch_sizes(self, ranks: int, origin: str, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
        values, sources = dict(self.values), dict(self.sources)
        given = {key: values[key] for key in BATCH_KEYS if key in values and values[key] is not None}
        for key in BATCH_KEYS:
            if values.get(key, 1) is None:
                del values[key]
        whole = all(type(value) in (int, float) and value > 0 and value == int(value) for value in given.values())
        if not whole:
            return values, sources  # validation says which one is wrong
        try:
            ranks, origin = _ranks_of_batch(values.get("mesh"), ranks, origin)
            derived = solve({key: int(value) for key, value in given.items()}, {**sources, "world_size": origin}, ranks)
        except (BatchSizeError, MeshError) as error:
            problems.append(str(error))
            return values, sources
        known = " and ".join([*given, f"world_size = {ranks}"])
        for key, value in derived.items():
            values[key] = value
            sources[key] = f"derived from {known}"
        return values, sources


def read(
    source: str | Path | Mapping[str, Any],
    *,
    sections: Mapping[str, type[Section]] | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    registry: Registry = DEFAULT,
) -> Document:
    """Read a document and check its keys, not yet its values (they may be ``"auto"``).

    Args:
        source: path of a .json, .yaml or .yml file, or a mapping.
        sections: the application's own sections by name.
        overrides: ``{"zero_optimization.stage": 1}`` or ``["zero_optimization.stage=1"]``.
        registry: where the packages' sections come from (kind "config_section").

    Raises:
        ConfigError: unknown keys with the nearest known one, keys given twice, syntax.
    """
    raw, where = read_source(source)
    found, missing = find_sections(registry, sections)
    problems = [f"{name}: {why}" for name, why in missing.items() if name in raw]
    raw = {key: value for key, value in raw.items() if key not in missing}
    notes: list[str] = []
    values, sources = _normalise(raw, config_class(found), where, problems, notes)
    if problems:
        raise ConfigError(problems, where)
    document = Document(values, sources, found, where, tuple(notes), registry)
    return document.override(overrides) if overrides else document


# -- keys -------------------------------------------------------------------------------------------------------------


def _normalise(
    raw: Mapping[str, Any], schema: type[Section], origin: str, problems: list[str], notes: list[str], path: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """Keys → field names; what is unknown or given twice goes to ``problems``, what was translated to ``notes``."""
    try:
        given, sentences = schema.translate(raw)
    except ValueError as error:
        problems.append(f"{path}{error}")
        return {}, {}
    notes += [f"{path}{sentence}" for sentence in sentences]
    keys = fields_by_key(schema)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    spelled: dict[str, str] = {}
    for key, value in given.items():
        here = f"{path}{key}"
        name = keys.get(key)
        if name is None:
            problems.append(_unknown(here, str(key), keys, path))
            continue
        if name in values:
            problems.append(
                f"{here}: given twice, as {spelled[name]!r} and as {key!r}; they are one option, remove one"
            )
            continue
        spelled[name] = key
        said = origin if key == name else f"{origin}, alias {key!r}"
        if key not in raw or raw[key] is not value:
            said = f"{origin}, translated"
        inner = section_of(schema.model_fields[name].annotation)
        if inner is not None and isinstance(value, Mapping):
            values[name], below = _normalise(value, inner, said, problems, notes, f"{path}{name}.")
            sources.update(below)
        else:
            values[name] = value
            sources.update(dict.fromkeys(_leaf_paths(value, f"{path}{name}"), said))
    return values, sources


def _unknown(here: str, key: str, keys: Mapping[str, str], path: str) -> str:
    guess = nearest(key, keys)
    if guess:
        return f"{here}: unknown key; did you mean {guess!r}?"
    if not path and key in APPLICATION_SECTIONS:
        how = f"load(..., sections={{{key!r}: ...}})"
        return f"{here}: unknown key; it is a section of the application, which passes its class: {how}"
    return f"{here}: unknown key; known here: {', '.join(sorted(set(keys.values())))}"


def _leaf_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaf_paths(item, f"{path}.{key}")
    else:
        yield path


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _at(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for part in path.split("."):
        node = node[part]
    return node


def _auto_paths(values: Mapping[str, Any], schema: type[BaseModel] | None, path: str) -> Iterator[str]:
    for key, value in values.items():
        field = schema.model_fields.get(key) if schema else None
        if isinstance(value, Mapping):
            yield from _auto_paths(value, section_of(field.annotation) if field else None, f"{path}{key}.")
        elif isinstance(value, str) and value == "auto" and not (field and allows_auto(field.annotation)):
            yield f"{path}{key}"


# -- values -----------------------------------------------------------------------------------------------------------


def _sentence(item: Any, schema: type[BaseModel]) -> str:
    """One of pydantic's findings as: path, what was given, what is allowed."""
    path = _path(item["loc"], schema) or "configuration"
    if item["type"] == "missing":
        return f"{path}: required and not given"
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key"
    allowed = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{path}: given {item['input']!r} ({type(item['input']).__name__}); allowed: {allowed}"


def _path(location: tuple[int | str, ...], schema: type[BaseModel] | None) -> str:
    """A dotted path; parts that pydantic adds to tell the members of a union apart are left out."""
    parts = []
    for position, part in enumerate(location):
        field = schema.model_fields.get(fields_by_key(schema).get(str(part), "")) if schema else None
        if field is None and schema is not None and not isinstance(part, int):
            continue
        parts.append(str(part))
        schema = section_of(field.annotation) if field else None
        if field is not None and schema is None:
            # Below a plain value only list positions and keys of a mapping are the user's own.
            parts += [str(rest) for rest in location[position + 1 :] if isinstance(rest, int)]
            break
    return ".".join(parts)


def _ranks_of_batch(mesh: Any, world_size: int, origin: str) -> tuple[int, str]:
    """Into how many parts a batch is cut, and where that comes from."""
    if not isinstance(mesh, Mapping) or not mesh.get("axes"):
        return world_size, origin
    try:
        section = Mesh.model_validate(mesh)
    except ValidationError:
        return world_size, origin  # validation says what is wrong
    ranks = section.batch_ranks(world_size)
    return ranks, f"{world_size} ranks, {origin}, along {', '.join(section.batch_axes)} of the mesh"


def _contradictions(section: Section, config: Config) -> list[str]:
    found = list(section.contradictions(config))
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            found += _contradictions(value, config)
    return found


def _world_size(given: int | None) -> tuple[int, str]:
    if given is None:
        text = os.environ.get("WORLD_SIZE")
        origin = "environment WORLD_SIZE" if text else "default"
        try:
            given = int(text) if text else 1
        except ValueError:
            raise ConfigError([f"WORLD_SIZE is {text!r}; allowed is a positive integer"], "environment") from None
    else:
        origin = "argument of load"
    if given < 1:
        raise ConfigError([f"world_size is {given} ({origin}); allowed is a positive integer"])
    return given, origin
