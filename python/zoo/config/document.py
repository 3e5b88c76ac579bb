"""`Document`: a configuration that has been read but not validated, with the origin of every value."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from zoo.config.batch import BATCH_KEYS, BatchSizeError, solve
from zoo.config.choice import ComponentChoice, check_choices
from zoo.config.core import Config, make_config
from zoo.config.errors import ConfigError
from zoo.config.fates import fates_of, settle, unknown
from zoo.config.mesh import PART_AXES, Mesh, MeshError
from zoo.config.reading import nest, read_overrides, read_source
from zoo.config.section import Section, allows_auto, allows_none, fields_by_key, section_of, section_of_items
from zoo.config.tree import SECTION_KIND, Tree, default_of
from zoo.registry import DEFAULT, Registry, RegistryError, config_class, nearest

__all__ = ["Document", "read", "read_section"]

APPLICATION_SECTIONS = ("model", "data", "training")


@dataclass(frozen=True)
class Document:
    """Values by their fields' own names (``values``) and dotted path → where it came from (``sources``).

    ``notes`` are the sentences of the sections about keys that they translated; ``tree`` has the classes of the
    keys that are in the document.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    tree: Tree
    where: str = "configuration"
    notes: tuple[str, ...] = ()

    def auto_paths(self) -> list[str]:
        """Dotted paths whose value is still ``"auto"``."""
        return list(_auto_paths(self.values, self.tree.root, "", self.tree.registry))

    def resolve_auto(self, values: Mapping[str, Any]) -> Document:
        """Fill in what was left to be chosen: dotted path → value, for paths that are ``"auto"`` now; others stay.

        What a program knows (hidden size, learning rate) goes here; an explicit value in the document wins over it.

        Raises:
            ConfigError: a path that the schema does not have.
        """
        _, layer, _ = _layer(self.tree, nest(values.items(), "resolve_auto"), "resolved auto", "resolve_auto")
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
        tree, layer, notes = _layer(self.tree, read_overrides(overrides), "override", "overrides")
        return replace(self._put(*layer), tree=tree, notes=(*self.notes, *notes))

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
            config = make_config(self.tree, values, sources, ranks, self.notes)
        except ValidationError as error:
            problems += _sentences(error, self.tree.root, values)
            raise ConfigError(problems, self.where) from None
        problems += [*_contradictions(config, config), *check_choices(config, self.tree.registry, "")]
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

    def _mesh(self, values: Mapping[str, Any]) -> Any:
        """The section ``mesh``; without axes of its own, with those along which sections ask for parts of layers."""
        mesh = values.get("mesh")
        if isinstance(mesh, Mapping) and mesh.get("axes"):
            return mesh
        needed: dict[str, int] = {}
        for name, (section, _) in self.tree.sections.items():
            if hasattr(section, "mesh_axes") and isinstance(values.get(name), Mapping):
                with contextlib.suppress(ValidationError):  # validation says what is wrong
                    needed |= section.model_validate(values[name]).mesh_axes
        needed = {axis: size for axis, size in needed.items() if axis in PART_AXES and size > 1}
        return {**(mesh or {}), "axes": {"data": -1, **needed}} if needed else mesh

    def _with_batch_sizes(self, ranks: int, origin: str, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
        values, sources = dict(self.values), dict(self.sources)
        given = {key: values[key] for key in BATCH_KEYS if key in values and values[key] is not None}
        for key in BATCH_KEYS:
            if values.get(key, 1) is None:
                del values[key]
        whole = all(
            (type(value) is int and value > 0) or (type(value) is float and 0 < value < 2**63 and value == int(value))
            for value in given.values()
        )
        if not whole:
            return values, sources  # validation says which one is wrong
        try:
            ranks, origin = _ranks_of_batch(self._mesh(values), ranks, origin)
            sizes = {key: int(value) for key, value in given.items()}
            elastic = _elastic(values)
            if elastic is not None:
                derived = elastic.sizes(sizes, ranks)
            else:
                derived = solve(sizes, {**sources, "world_size": origin}, ranks)
        except (BatchSizeError, MeshError) as error:
            problems.append(str(error))
            return values, sources
        known = " and ".join([*given, *(["elasticity"] if elastic else []), f"world_size = {ranks}"])
        for key, value in derived.items():
            if key in given and value == sizes[key]:
                continue
            values[key] = value
            sources[key] = f"derived from {known}"
        return values, sources


def _elastic(values: Mapping[str, Any]) -> Any:
    """The section ``elasticity`` where it is enabled, which few documents have."""
    if not isinstance(values.get("elasticity"), Mapping):
        return None
    from zoo.config.elastic import of

    return of(values)


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
    tree, layer, notes = _layer(Tree.of(Config, registry, sections), raw, where, where)
    document = Document(*layer, tree, where, tuple(notes))
    return document.override(overrides) if overrides else document


def read_section(
    name: str, source: str | Path | Mapping[str, Any], *, where: str | None = None, registry: Registry = DEFAULT
) -> Any:
    """One section of a document alone: what is "auto" has its default for the time being, and no other key counts.

    For what has to know a section before the whole can be known, such as ``zoo.zero.Init``. Contradictions with other
    sections are found by `load`.

    Args:
        name: of the section, by any of its spellings.
        source: path of a .json, .yaml or .yml file, or a mapping: the whole document.
        where: what errors call it.
        registry: where the packages' sections come from.

    Returns:
        the section; None where the document has none and it cannot be without values.

    Raises:
        ConfigError: there is no such section, or something is wrong with it; all of it, with paths.
    """
    raw, called = read_source(source)
    where = where or called
    tree, missing = Tree.of(Config, registry).opened([name])
    if missing:
        raise ConfigError([f"{key}: {why}" for key, why in missing.items()], where)
    keys = fields_by_key(tree.root)
    field = tree.root.model_fields.get(keys.get(name, ""))
    section = section_of(field.annotation) if field else None
    if section is None:
        known = [key for key, found in tree.root.model_fields.items() if section_of(found.annotation)]
        raise ConfigError([f"{name}: no section; known: {', '.join([*known, *registry.names(SECTION_KIND)])}"], where)
    given = {key: value for key, value in raw.items() if keys.get(key) == keys[name]}
    _, (values, _), notes = _layer(tree, given, where, where)
    inside = values.get(keys[name])
    if inside is None:
        return default_of(section)
    if isinstance(inside, Mapping):
        inside = _without_auto(inside, section, registry)
    try:
        found = section.model_validate(inside)
    except ValidationError as error:
        raise ConfigError(_sentences(error, section, inside, keys[name]), where) from None
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return found


# -- keys -------------------------------------------------------------------------------------------------------------


def _layer(
    tree: Tree, raw: Mapping[str, Any], origin: str, where: str
) -> tuple[Tree, tuple[dict[str, Any], dict[str, str]], list[str]]:
    """Values and sources of one source, notes, and the tree with what it uses; raises ConfigError for its keys."""
    tree, missing = tree.opened(raw)
    problems = [f"{name}: {why}" for name, why in missing.items()]
    notes: list[str] = []
    known = {key: value for key, value in raw.items() if key not in missing}
    layer = _normalise(known, tree.root, origin, problems, notes, others=tree.names())
    if problems:
        raise ConfigError(problems, where)
    return tree, layer, notes


def _normalise(
    raw: Mapping[str, Any],
    schema: type[Section],
    origin: str,
    problems: list[str],
    notes: list[str],
    path: str = "",
    others: Iterable[str] = (),
) -> tuple[dict[str, Any], dict[str, str]]:
    """Keys → field names; what is unknown or given twice goes to ``problems``, what was translated to ``notes``."""
    settled = settle(schema, raw)
    problems += [f"{path}{problem}" for problem in settled.problems]
    notes += [f"{path}{note}" for note in settled.notes]
    keys = fields_by_key(schema)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    spelled: dict[str, str] = {}
    for key, value in settled.values.items():
        here = f"{path}{key if key != '' else repr(key)}"
        name = keys.get(key)
        if name is None:
            shown = {*keys.values(), *others}
            problems.append(_unknown(here, str(key), {*shown, *keys, *fates_of(schema)}, shown, path))
            continue
        if name in values or name in spelled:
            problems.append(
                f"{here}: given twice, as {spelled[name]!r} and as {key!r}; they are one option, remove one"
            )
            continue
        spelled[name] = key
        said = origin if key == name else f"{origin}, alias {key!r}"
        if key not in raw or raw[key] is not value:
            said = f"{origin}, translated"
        annotation = schema.model_fields[name].annotation
        inner = section_of(annotation)
        if inner is not None and value is None and not allows_none(annotation):
            continue  # null asks for nothing
        if inner is not None and isinstance(value, Mapping):
            values[name], below = _normalise(value, inner, said, problems, notes, f"{path}{name}.")
            sources.update(below)
        elif (each := section_of_items(annotation)) is not None and isinstance(value, Mapping):
            values[name] = {}
            for item_key, item in value.items():
                where = f"{path}{name}.{item_key}"
                if isinstance(item, Mapping):
                    values[name][item_key], below = _normalise(item, each, said, problems, notes, f"{where}.")
                    sources.update(below)
                else:
                    values[name][item_key], sources[where] = item, said
        else:
            values[name] = value
            sources.update(dict.fromkeys(_leaf_paths(value, f"{path}{name}"), said))
    return values, sources


def _unknown(here: str, key: str, keys: Collection[str], shown: Iterable[str], path: str) -> str:
    if not path and key in APPLICATION_SECTIONS and not nearest(key, keys):
        how = f"load(..., sections={{{key!r}: ...}})"
        return f"{here}: unknown key; it is a section of the application, which passes its class: {how}"
    return unknown(here, key, keys, shown)


def _without_auto(
    values: Mapping[str, Any], schema: type[BaseModel] | None, registry: Registry
) -> dict[str, Any]:  # fmt: skip
    """Without what is still to be chosen, which leaves it its default."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            kept[key] = _without_auto(value, _schema_of(values, schema, key, registry), registry)
        elif not _is_auto(value, schema.model_fields.get(key) if schema else None):
            kept[key] = value
    return kept


def _schema_of(
    values: Mapping[str, Any], schema: type[BaseModel] | None, key: str, registry: Registry
) -> type[BaseModel] | None:  # fmt: skip
    """Of what lies at ``key`` of ``values``, which have a schema: a section, or the options of a component."""
    field = schema.model_fields.get(key) if schema else None
    if schema is not None and issubclass(schema, ComponentChoice) and key == "params":
        try:
            found = config_class(registry.get(schema.kind, str(values.get("type"))))
        except RegistryError:  # load says so
            return None
        return found if found is not None and issubclass(found, BaseModel) else None
    return section_of(field.annotation) if field else None


def _is_auto(value: Any, field: Any) -> bool:
    return isinstance(value, str) and value == "auto" and not (field and allows_auto(field.annotation))


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


def _auto_paths(
    values: Mapping[str, Any], schema: type[BaseModel] | None, path: str, registry: Registry
) -> Iterator[str]:  # fmt: skip
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _auto_paths(value, _schema_of(values, schema, key, registry), f"{path}{key}.", registry)
        elif _is_auto(value, schema.model_fields.get(key) if schema else None):
            yield f"{path}{key}"


# -- values -----------------------------------------------------------------------------------------------------------


def _sentences(error: ValidationError, schema: type[BaseModel], values: Any, path: str = "") -> list[str]:
    """Pydantic's findings as: path, what was given, what is allowed. Members of a union that one value fits neither of
    are one finding."""
    found: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for item in error.errors(include_url=False):
        where = ".".join([*([path] if path else []), *_path(item, schema, values)]) or "configuration"
        if item["type"] == "missing":
            said = "required and not given"
        elif item["type"] == "extra_forbidden":
            said = "unknown key"
        elif item["type"] in ("value_error", "assertion_error"):
            said = item["msg"].removeprefix("Value error, ")  # a validator's own sentence
        else:
            given[where] = f"given {_shown(item['input'])} ({type(item['input']).__name__}); allowed: "
            said = item["msg"].removeprefix("Input should be ")
        said = " ".join(said.split())
        if said not in found.setdefault(where, []):
            found[where].append(said)
    return [f"{where}: {given.get(where, '')}{' or '.join(texts)}" for where, texts in found.items()]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _path(item: Any, schema: type[BaseModel] | None, values: Any) -> list[str]:
    """Parts of a dotted path; those that pydantic adds to tell the members of a union apart are left out."""
    parts: list[str] = []
    for part in item["loc"]:
        if schema is not None and isinstance(values, Mapping):
            name = fields_by_key(schema).get(part) if isinstance(part, str) else None
            if name is None:
                continue
            schema, values = section_of(schema.model_fields[name].annotation), values.get(name)
            parts.append(name)
        elif (isinstance(values, Mapping) and part in values) or (
            isinstance(values, list | tuple) and type(part) is int
        ):
            schema, values = None, values[part]
            parts.append(str(part))
    return parts


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
    asked: Any = given
    if isinstance(asked, bool) or not isinstance(asked, (int, float)) or asked < 1 or asked != int(asked):
        raise ConfigError([f"world_size is {given!r} ({origin}); allowed is a positive integer"])
    return int(given), origin
