"""From a file, a mapping or ``key=value`` strings to nested dicts; nothing here knows what a key means."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zoo.config.errors import ConfigError

__all__ = ["nest", "parse_value", "read_overrides", "read_source"]


TOO_DEEP = "is nested too deeply to be a configuration, or contains itself"


def read_source(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The document and what to call it: ``file ds_config.json`` or ``dict``.

    Raises:
        ConfigError: not a mapping, a syntax error, a key given twice, or a file name that ends in neither .json nor
            .yaml nor .yml.
        FileNotFoundError: no such file.
    """
    if isinstance(source, Mapping):
        check_values(source, "dict")
        return dict(source), "dict"
    if not isinstance(source, str | Path):
        raise ConfigError([f"a configuration is a path or a mapping, not {source!r} ({type(source).__name__})"])
    path = Path(source)
    name = f"file {path.name}"
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError([f"{path} ends in {path.suffix or 'nothing'!r}; allowed are .json, .yaml and .yml"])
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        value = _json(text) if path.suffix == ".json" else _yaml(text)
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path} is not UTF-8 ({error}); convert it"], name) from None
    except RecursionError:
        raise ConfigError([f"{path} {TOO_DEEP}"], name) from None
    except (json.JSONDecodeError, DocumentError) as error:
        raise ConfigError([" ".join(str(error).split())], name) from None
    check_values(value, name)
    if not isinstance(value, dict):
        raise ConfigError([f"the document is {type(value).__name__}; allowed is an object of keys and values"], name)
    return value, name


def read_overrides(overrides: Mapping[str, Any] | Iterable[str]) -> dict[str, Any]:
    """Nested dicts from ``{"a.b": 1}`` or from ``["a.b=1"]``, whose values are read as JSON if they are JSON.

    Raises:
        ConfigError: a string without ``=``, an empty part in a path, or one path below another's value.
    """
    if isinstance(overrides, Mapping):
        pairs = list(overrides.items())
    else:
        pairs = []
        if isinstance(overrides, str) or not isinstance(overrides, Iterable):
            what = f"overrides are a mapping of paths, or strings key.path=value, not {overrides!r}"
            raise ConfigError([f"{what} ({type(overrides).__name__})"], "overrides")
        for text in overrides:
            if not isinstance(text, str):
                raise ConfigError([f"override {text!r} is not of the form key.path=value"], "overrides")
            path, equals, value = text.partition("=")
            if not equals:
                raise ConfigError([f"override {text!r} is not of the form key.path=value"], "overrides")
            pairs.append((path.strip(), parse_value(value.strip())))
    return nest(pairs, "overrides")


def nest(pairs: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    """``[("a.b", 1)]`` → ``{"a": {"b": 1}}``; a later value of the same path wins."""
    tree: dict[str, Any] = {}
    for path, value in pairs:
        _check_integers({path: value}, where)
        if not isinstance(path, str):
            raise ConfigError([f"{path!r} is not a dotted path such as zero_optimization.stage"], where)
        *parents, last = path.split(".")
        if not all([*parents, last]):
            raise ConfigError([f"{path!r} is not a dotted path such as zero_optimization.stage"], where)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError([f"{path!r} lies below {parent!r}, which another override sets to {node!r}"], where)
        node[last] = value
    return tree


def parse_value(text: str) -> Any:
    """A command-line value: JSON (``1e-3``, ``true``, ``[1, 2]``, ``"1"``), ``True``/``None``, else a string."""
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text, parse_int=integer)
    except json.JSONDecodeError:
        pass
    try:
        return float(text)  # .5 and 1_000.0 are numbers to a Python programmer
    except ValueError:
        return text


class DocumentError(Exception):
    """A key is given twice, or the text is no document."""


def _yaml(text: str) -> Any:
    from zoo.config.strict_yaml import parse  # its package costs more than all others, and most documents are JSON

    return parse(text)


def _json(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise DocumentError(f"key {key!r} is given twice, as {seen[key]!r} and as {value!r}; remove one")
            seen[key] = value
        return seen

    return json.loads(text, object_pairs_hook=once, parse_int=integer)


def integer(text: str) -> int:
    """What the digits say. Python refuses to read more than 4,300 of them, without a word of where they stand: of more
    the number is another one as large, which is refused with its path."""
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    return sign * int(digits[:20]) * 10 ** (len(digits) - 20) if len(digits) > 4000 else int(text)


def check_values(value: Any, where: str) -> None:
    """Raise ConfigError for a document that contains itself, and for a whole number that no float can hold."""
    try:
        _check_integers(value, where)
    except RecursionError:
        raise ConfigError([f"it {TOO_DEEP}"], where) from None


def _check_integers(value: Any, where: str, path: str = "") -> None:
    """Raise ConfigError for a whole number that no float can hold, nor a message show."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_integers(item, where, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _check_integers(item, where, f"{path}[{place}]")
    elif isinstance(value, int) and value.bit_length() > 1024:
        digits = round(value.bit_length() * math.log10(2))
        allowed = "allowed are those below 2^1024, which a float can hold"
        raise ConfigError([f"{path}: given a whole number of about {digits} digits; {allowed}"], where)
