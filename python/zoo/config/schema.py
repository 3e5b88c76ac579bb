"""JSON schema for editors: what is beside the fields of a section."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zoo.config.fates import Fate, sentence

__all__ = ["finish", "or_auto", "schema_of"]

_SCHEMA: dict[Any, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"
}  # fmt: skip
_NOTHING = [{"enum": ["auto", None]}]
_NO_SECTION = [{"enum": ["auto", None, False]}]

_OPTIONAL = "x-optional"


def finish(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with what most keys of tables may be among its definitions, written once."""
    words = sorted(_SCHEMA.values())
    nothing = {"object": _NO_SECTION}
    schema["$defs"] |= {f"optional.{word}": {"anyOf": [{"type": word}, *nothing.get(word, _NOTHING)]} for word in words}
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if _OPTIONAL in node:
                node["$ref"] = f"#/$defs/optional.{node.pop(_OPTIONAL)}"
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return schema


def or_auto(properties: Mapping[str, Any]) -> dict[str, Any]:
    """A value may be "auto" until it is resolved, and a whole section null."""
    plain = ("number", "integer", "boolean", "array")
    return {
        key: _or_auto(value)
        if value.get("type") in plain or any(word in value for word in ("anyOf", "enum", "$ref"))
        else value
        for key, value in properties.items()
    }


def _or_auto(value: Mapping[str, Any]) -> dict[str, Any]:
    about = {key: item for key, item in value.items() if key in ("title", "description", "default", "deprecated")}
    rest = {key: item for key, item in value.items() if key not in about}
    if "$ref" in rest:
        return {**about, "anyOf": [rest, {"type": "null"}]}
    options = rest.get("anyOf", [rest])
    if any("$ref" in option or option == {"const": "auto"} or "auto" in option.get("enum", ()) for option in options):
        return dict(value)
    return {**about, "anyOf": [*options, {"const": "auto"}]}


def schema_of(fate: Fate, *, inside: bool = False) -> dict[str, Any]:
    """Schema of a key's values: what it may be, whether or not it may ask for something."""
    about: dict[str, Any] = {} if inside else {"description": sentence(fate)}
    if fate.what == "translated":
        about["deprecated"] = True
    kinds = fate.kind if isinstance(fate.kind, tuple) else (fate.kind,)
    words = [_SCHEMA[kind] for kind in kinds if isinstance(kind, type)]
    values = [kind for kind in kinds if not isinstance(kind, type)]
    if fate.keys:
        named = {
            key: schema_of(inner, inside=True) for name, inner in fate.keys.items() for key in (name, *inner.aliases)
        }
        mapping = {"type": "object", "properties": named, "additionalProperties": fate.open}
        return {**about, "anyOf": [mapping, *_NO_SECTION]}
    if values or len(words) > 1:
        enum = [{"enum": [*sorted({*values, "auto"}, key=json.dumps), None]}]
        return {**about, "anyOf": [*({"type": word} for word in words), *enum]}
    return {**about, _OPTIONAL: words[0]}
