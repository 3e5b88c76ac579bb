"""Values as DeepSpeed's sections take them: 0, 1 and "true" where true or false is meant, "3" where a number is."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from zoo.config import Config
from zoo.config.choice import ComponentChoice
from zoo.config.fates import Fate, fates_of
from zoo.config.section import fields_by_key, section_of, section_of_items
from zoo.config.tree import Tree
from zoo.registry import DEFAULT, RegistryError, argument_types, config_class

_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


_OURS = {"managed_gradient_accumulation": bool}
"""Root keys of DeepSpeed that zoo's own configuration does not have."""


def as_meant(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with true or false where a key takes nothing else and 0, 1, "true", "off" and their like are given,
    and with numbers where a key takes nothing else and their digits are given. Everything else is as it was."""
    found = _section(Tree.of(Config, DEFAULT).opened(document)[0].root, document)
    return {key: value_as_meant(_OURS.get(key), value) for key, value in found.items()}


def said_in(section: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a section says: null and "auto" say nothing."""
    return {key: value for key, value in (section or {}).items() if value is not None and value != "auto"}


def options_as_meant(factory: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a component, by the types that it writes down."""
    known = argument_types(factory)
    return {key: value_as_meant(_only_kind(known.get(key)), value) for key, value in options.items()}


def _section(section: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    names, fates = fields_by_key(section), fates_of(section)
    found: dict[str, Any] = {}
    for key, value in given.items():
        field = section.model_fields.get(names.get(key, ""))
        found[key] = value if field is None else _field(field.annotation, value)
        if key in fates:  # of a section that is carried out in part
            found[key] = _fate(fates[key], found[key])
    if issubclass(section, ComponentChoice) and isinstance(found.get("params"), Mapping):
        found["params"] = _options(section, found.get("type"), found["params"])
    return found


def _options(choice: type[ComponentChoice], name: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    try:
        factory = DEFAULT.get(choice.kind, str(name))
    except RegistryError:  # the check of the configuration says so
        return dict(params)
    config: Any = config_class(factory)
    known = argument_types(factory) if config is None else _types_of(config)
    found = {key: value_as_meant(_only_kind(known.get(key)), value) for key, value in params.items()}
    return {key: _fate(choice.options[key], value) if key in choice.options else value for key, value in found.items()}


@lru_cache(maxsize=128)
def _types_of(config: type) -> Mapping[str, Any]:
    """Of its fields; they are text that is compiled each time."""
    return get_type_hints(config)


def _field(annotation: Any, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value_as_meant(_only_kind(annotation), value)
    if (inner := section_of(annotation)) is not None:
        return _section(inner, value)
    if (items := section_of_items(annotation)) is not None:
        return {name: _section(items, item) if isinstance(item, Mapping) else item for name, item in value.items()}
    return value


def _fate(fate: Fate, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _fate(fate.keys[key], item) if key in fate.keys else item for key, item in value.items()}
    return value_as_meant(fate.kind, value)


def _only_kind(annotation: Any) -> Any:
    """The one type that is not None; None where there are several."""
    if get_origin(annotation) is Annotated:
        return _only_kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [_only_kind(one) for one in get_args(annotation) if one is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else None
    return annotation


def value_as_meant(kind: Any, value: Any) -> Any:
    """``value``, or the bool or number that it stands for where ``kind`` is one."""
    if kind is bool and not isinstance(value, bool):
        word = value.strip().lower() if isinstance(value, str) else value
        if isinstance(word, str):
            return word in _TRUE if word in _TRUE | _FALSE else value
        return bool(word) if isinstance(word, (int, float)) and word in (0, 1) else value
    if kind in (int, float) and isinstance(value, str):
        try:
            number = float(value)
            whole = int(value) if value.strip().lstrip("+-").isdigit() else None
        except ValueError:
            return value
        if whole is not None:
            return whole
        return number if kind is float or number.is_integer() else value
    return value
