"""`ComponentChoice`: the section that names a component of the registry, and the check of everything that is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import CoreSchema

from zoo.config.errors import ConfigError
from zoo.config.fates import Fate, judge
from zoo.config.schema import or_auto, schema_of
from zoo.config.section import Section
from zoo.registry import Registry, RegistryError, adapter_of, argument_types, config_class, keywords, known_keys

__all__ = ["ComponentChoice", "check_choices", "describe_choices"]

_KIND, _OPTIONS = "x-component-kind", "x-component-options"


class ComponentChoice(Section):
    """Which component of a kind, by its name in the registry, and its own options.

    Each kind has a subclass, which says the kind, and it is used as a section or as a field of one, and of a
    component's ``Config`` where a component is made of others::

        class Gate(ComponentChoice):
            kind: ClassVar[str] = "gate"

    ``zoo.config.load`` looks the name up and checks ``params`` as ``registry.build(kind, type, params, ...)`` will,
    through all levels.
    """

    kind: ClassVar[str]
    """Kind of the component."""
    runtime: ClassVar[tuple[str, ...]] = ()
    """Arguments that it gets when it is built, which ``params`` has none of."""

    type: str
    """Name of the component."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its own options."""

    options: ClassVar[Mapping[str, Fate]] = {}
    """Documented keys of ``params`` that no component has, and what becomes of them."""

    @classmethod
    def translate(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Takes ``options`` out of ``params``."""
        params = raw.get("params")
        if not cls.options or not isinstance(params, Mapping):
            return raw, ()
        settled = judge(cls.options, params, {})
        if settled.problems:
            raise ConfigError([f"params.{problem}" for problem in settled.problems])
        return {**raw, "params": settled.values}, [f"params.{note}" for note in settled.notes]

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema[_KIND] = [cls.kind, *cls.runtime]
        schema[_OPTIONS] = {key: schema_of(fate) for key, fate in cls.options.items()}
        return schema


def describe_choices(schema: dict[str, Any], registry: Registry) -> dict[str, Any]:
    """A JSON schema with the names of all components that may be chosen in it, and what options each of them has."""
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    waiting = [schema, *definitions.values()]
    while waiting:
        choice = waiting.pop()
        if _KIND not in choice:
            continue
        kind, *runtime = choice.pop(_KIND)
        everywhere = choice.pop(_OPTIONS)
        names = registry.names(kind)
        choice["properties"]["type"] |= {"anyOf": [{"enum": names}, {"type": "string"}]}
        choice["properties"]["type"].pop("type", None)
        choice["allOf"] = []
        for name in names:
            options, inner = _options_schema(kind, name, runtime, registry)
            new = {key: value for key, value in inner.items() if key not in definitions}  # a layer may hold layers
            definitions |= new
            waiting += new.values()
            if options is not None:
                options["properties"] = {**everywhere, **options.get("properties", {})}
                named = {"properties": {"type": {"const": name}}, "required": ["type"]}
                needed = {"required": ["params"]} if options.get("required") else {}
                choice["allOf"].append({"if": named, "then": {"properties": {"params": options}, **needed}})
    return schema


def _options_schema(
    kind: str, name: str, runtime: Iterable[str], registry: Registry
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The JSON schema of a component's options, None where they cannot be told, and the definitions that it needs."""
    try:
        factory = registry.get(kind, name)
    except RegistryError:
        return None, {}
    config = config_class(factory)
    if config is None:
        known = keywords(factory, runtime)
        if known is None:
            return None, {}
        types = argument_types(factory)
        properties = {key: _value_schema(types.get(key, Any)) for key in known}
        required = [key for key, needed in known.items() if needed]
        return {"type": "object", "properties": or_auto(properties), "required": required, **_CLOSED}, {}
    try:
        found = TypeAdapter(config).json_schema(by_alias=False, ref_template=f"#/$defs/{kind}.{name}.{{model}}")
    except PydanticInvalidForJsonSchema:  # a value that JSON has no word for; its keys are known all the same
        keys = known_keys(config)
        return (None, {}) if keys is None else ({"properties": {key: {} for key in keys}, **_CLOSED}, {})
    inner = {f"{kind}.{name}.{key}": value for key, value in found.pop("$defs", {}).items()}
    return {**found, "properties": or_auto(found.get("properties", {})), **_CLOSED}, inner


def _value_schema(annotation: Any) -> dict[str, Any]:
    adapter = adapter_of(annotation)
    try:
        found = {} if adapter is None else adapter.json_schema()
    except PydanticInvalidForJsonSchema:
        return {}
    return {} if "$defs" in found else found


_CLOSED = {"additionalProperties": False}


_LEAVES = (str, int, float)


def check_choices(value: Any, registry: Registry, path: str) -> Iterator[str]:
    """A sentence for everything that is wrong with the components named in ``value``, which lies at ``path``."""
    if isinstance(value, ComponentChoice):
        try:
            made, problems = registry.parse(value.kind, value.type, value.params, runtime=value.runtime)
        except RegistryError as error:
            yield f"{path}.type: {error}"
            return
        below = f"{path}.params"
        yield from (f"{below}.{key}: {text}" if key else f"{below}: {text}" for key, text in problems)
        if made is not None and made is not value.params:
            yield from check_choices(made, registry, below)
        return
    for name, item in _items(value):
        if item is not None and not isinstance(item, _LEAVES):
            yield from check_choices(item, registry, f"{path}.{name}" if path else str(name))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
