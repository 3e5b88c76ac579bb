"""From a name's config and runtime arguments to an object.

A component is a class with its own small ``Config`` (a pydantic model or a dataclass) whose constructor takes that
config first and everything that only exists at run time (parameters, process groups, devices) by keyword. A component
without a ``Config`` (a function, a class from elsewhere) receives its config as keyword arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

from zoo.registry.errors import BuildError, nearest

if TYPE_CHECKING:  # pydantic takes as long to import as all else of `zoo --help`
    from pydantic import TypeAdapter

__all__ = [
    "ByKeywords",
    "Problem",
    "adapter_of",
    "argument_types",
    "check_keywords",
    "config_class",
    "config_values",
    "keywords",
    "known_keys",
    "make_config",
    "parse",
    "run",
]

Problem = tuple[str, str]
"""The dotted path of a key below a component's config, "" for the config itself, and what is wrong there."""


def config_class(factory: Any) -> type[Any] | None:
    """The ``Config`` that belongs to a component, or None."""
    found = getattr(factory, "Config", None)
    return found if isinstance(found, type) else None


def make_config(what: str, schema: type[Any], config: Any) -> Any:
    """An instance of ``schema`` from a mapping, from None (all defaults) or from itself.

    Raises:
        BuildError: unknown keys (with the nearest known one), wrong or missing values.
    """
    made, problems = parse(schema, config)
    if problems:
        raise BuildError(f"{what}: " + "; ".join(": ".join(filter(None, problem)) for problem in problems))
    return made


def parse(schema: type[Any], config: Any) -> tuple[Any, list[Problem]]:
    """As :func:`make_config`, with the problems instead of an error; then there is no instance, but None."""
    if isinstance(config, schema):
        return config, []
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        allowed = f"allowed is a mapping or an instance of {schema.__qualname__}"
        return None, [("", f"config is {config!r} ({type(config).__name__}); {allowed}")]
    known = known_keys(schema)
    problems = [] if known is None else [(str(key), _unknown(key, known)) for key in config if key not in known]
    if not problems:
        from pydantic import BaseModel, TypeAdapter, ValidationError

        try:
            if issubclass(schema, BaseModel):
                return schema.model_validate(dict(config)), []
            return TypeAdapter(schema).validate_python(dict(config)), []
        except ValidationError as error:
            for item in error.errors(include_url=False):
                path = ".".join(str(part) for part in item["loc"])
                sentence = item["msg"].removeprefix("Value error, ")  # a validator's own, which says what was given
                own = sentence != item["msg"] or item["type"] == "missing"
                sentence = f"allowed is {sentence}" if item["type"] == "zoo_type" else sentence
                problems.append((path, sentence if own else f"{sentence} (given {item['input']!r})"))
    return None, problems


def keywords(factory: Any, runtime: Iterable[str] = ()) -> dict[str, bool] | None:
    """Keys that the config of a component without ``Config`` may have, and whether each must be given.

    None where its signature does not tell. ``runtime``: arguments that it gets besides.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None  # some classes written in C have no signature; the call itself will speak
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    later = set(runtime)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in later]
    return {p.name: p.default is p.empty for p in named}


def check_keywords(factory: Any, config: Any, runtime: Iterable[str]) -> list[Problem]:
    """What is wrong with the config of a component without ``Config``, as far as its signature tells."""
    if config is not None and not isinstance(config, Mapping):
        return [("", f"config is {config!r} ({type(config).__name__}); allowed is a mapping of arguments")]
    known = keywords(factory, runtime)
    if known is None:
        return []
    given, types = config or {}, argument_types(factory)
    problems = [(str(key), _unknown(key, list(known))) for key in given if key not in known]
    for key, value in given.items():
        if key in known and key in types and (wrong := _mismatch(types[key], value)):
            problems.append((f"{key}{wrong[0]}", f"{wrong[1]} (given {value!r})"))
    return problems + [(k, "required and not given") for k, needed in known.items() if needed and k not in given]


def argument_types(factory: Any) -> dict[str, Any]:
    """The types of a component's arguments, as far as they are written down."""
    function = getattr(factory, "__init__") if isinstance(factory, type) else factory  # noqa: B009
    try:
        return get_type_hints(function)
    except Exception:  # names that exist for type checkers only, of which there are many kinds
        return _types_one_by_one(function)


def _types_one_by_one(function: Any) -> dict[str, Any]:
    """Of those arguments whose types have names that are there."""
    found: dict[str, Any] = {}
    space = getattr(inspect.unwrap(function), "__globals__", {})
    for name, annotation in getattr(function, "__annotations__", {}).items():
        with contextlib.suppress(Exception):
            found |= get_type_hints(SimpleNamespace(__annotations__={name: annotation}), space)
    return found


def adapter_of(annotation: Any) -> TypeAdapter[Any] | None:
    """What checks values of a type; None for a type that says nothing to pydantic."""
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError
    from pydantic_core import SchemaError

    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, SchemaError, TypeError):
        return None


def _mismatch(annotation: Any, value: Any) -> Problem | None:
    """Where and why a value of a document cannot be of this type; None where it can, or where nobody knows."""
    from pydantic import ValidationError

    adapter = adapter_of(annotation)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return None  # no value of a document, but an object of the caller's: the component itself will speak
    if adapter is None:
        return None
    # As JSON, so that a list may stand for a tuple; strict, so that "3" is no number. 5e8 is how sizes are written.
    whole = isinstance(value, float) and value.is_integer()
    for tried in (text, str(int(value))) if whole else (text,):
        try:
            adapter.validate_json(tried, strict=True)
            return None
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
    if found["type"] == "needs_python_object":
        return None  # a type that no document has values of: the component itself will speak
    return "".join(f".{part}" for part in found["loc"] if isinstance(part, int)), found["msg"]


class ByKeywords:
    """A component with a ``Config``, called as one without: the runtime argument ``first``, then keys of its config.

    Attributes of the component are attributes of this.
    """

    def __init__(self, component: Any, first: str) -> None:
        self.component, self._first = component, first
        self.__name__, self.__module__ = component.__name__, component.__module__
        self.__qualname__ = component.__qualname__

    def __call__(self, runtime: Any, **options: Any) -> Any:
        return run(self.__name__, self.component, options, {self._first: runtime})

    def __getattr__(self, name: str) -> Any:
        if name == "component":  # of a copy in the making
            raise AttributeError(name)
        return getattr(self.component, name)


def run(what: str, factory: Callable[..., Any], config: Any, runtime: Mapping[str, Any]) -> Any:
    """Call the component; arguments that do not fit its signature are named before anything runs.

    A class with a ``Config`` whose constructor is for people, and not for a config, has a ``from_config`` besides.

    Raises:
        BuildError: see `make_config`; also missing, unknown or doubly given arguments.
    """
    schema = config_class(factory)
    positional: tuple[Any, ...] = ()
    keywords = dict(runtime)
    if schema is not None:
        positional = (make_config(what, schema, config),)
        factory = getattr(factory, "from_config", factory)
    elif config is not None:
        if not isinstance(config, Mapping):
            raise BuildError(f"{what}: it has no Config, so its config must be a mapping of arguments, not {config!r}")
        twice = sorted(set(config) & set(runtime))
        if twice:
            raise BuildError(f"{what}: {', '.join(twice)} given both in the config and at run time; give each once")
        keywords.update(config)
    _check_call(what, factory, positional, keywords)
    return factory(*positional, **keywords)


def config_values(factory: Any, what: str, config: Any) -> list[tuple[str, Any, bool]]:
    """``(name, value, given)`` of every config value, defaults filled in, in the order of declaration."""
    from pydantic import BaseModel

    schema = config_class(factory)
    given = set(config) if isinstance(config, Mapping) else set()
    if schema is None:
        return [(str(name), value, True) for name, value in config.items()] if isinstance(config, Mapping) else []
    built = make_config(what, schema, config)
    if isinstance(built, BaseModel):
        names = list(type(built).model_fields)
        given = set(built.model_fields_set)
    elif dataclasses.is_dataclass(built):
        names = [field.name for field in dataclasses.fields(built)]
    else:
        names = sorted(vars(built))
    return [(name, getattr(built, name), name in given) for name in names]


def known_keys(schema: type[Any]) -> list[str] | None:
    """Keys that a mapping for ``schema`` may have; None when it says that any may come."""
    from pydantic import BaseModel

    if issubclass(schema, BaseModel):
        if schema.model_config.get("extra") == "allow":
            return None
        keys = list(schema.model_fields)
        keys += [field.alias for field in schema.model_fields.values() if field.alias]
        return keys
    if dataclasses.is_dataclass(schema):
        return [field.name for field in dataclasses.fields(schema) if field.init]
    return None


def _unknown(key: object, known: list[str]) -> str:
    guess = nearest(str(key), known)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"unknown key; {hint}known: {', '.join(known) or 'none'}"


def _check_call(what: str, factory: Any, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # some classes written in C have no signature; the call itself will speak
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise BuildError(f"{what}: {error}; its signature is {signature}") from None
