"""`docs/reference/config`: every key of a document and what becomes of it, from fields and tables of the sections."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from zoo.config.choice import ComponentChoice
from zoo.config.core import Config
from zoo.config.fates import Fate, allowed
from zoo.config.section import Documented, Section, aliases_of, descriptions_of, is_own, section_of
from zoo.config.tree import Tree
from zoo.registry import DEFAULT, LoadError, Registry, argument_types, config_class, keywords

__all__ = ["FATES", "Row", "pages", "place", "rows"]

CARRIED_OUT = "carried out"
_EFFECTLESS = {"Refused": "refused", "Taken, and without effect": "unnecessary"}
"""How the docstring of a component's option begins that is not carried out."""

FATES = {
    CARRIED_OUT: "the key is an option of zoo.",
    "unnecessary": "zoo does it anyway, or has no choice there. A value that asks for something else gives a note.",
    "translated": "a key of former times, read as another one, with a note.",
    "refused": 'a value that asks for it is an error. null, "auto" and the default are taken.',
    "waits": "the same as refused, until the feature is there.",
}
"""What becomes of a key, and what that means."""

HEAD = """# Configuration

Every key of a configuration, one page a section. `zoo config explain KEY` prints one of them. Keys of a ds_config of
DeepSpeed are all here. The column *in zoo* says what becomes of each:

| in zoo | what it means |
|---|---|
"""

TAIL = """
Words such as *rank*, *unit* and *bucket* are in the [glossary](../zero/glossary.md). A size of tensors or buckets
counts elements, unless its name or its sentence says bytes.

A second spelling stands in brackets. Keys without a sentence have that of the section. Any value may be `"auto"` until
it is resolved (`Document.resolve_auto`). Written by `make schema` from the fields and tables of the sections;
[zoo.config](../../python/zoo/config/README.md) says how documents are read.

## Sections

| section | |
|---|---|
"""

ABOVE = """[All sections](../configuration.md). Words such as *rank*, *unit* and *bucket* are in the
[glossary](../../zero/glossary.md). A size of tensors or buckets counts elements, unless its name or its sentence says
bytes.
"""
"""What stands above the table of a section."""

FIRST, FOLDER = "configuration.md", "config"
"""The first page, and the folder beside it where those of the sections are."""


@dataclass(frozen=True)
class Row:
    """One key: its dotted path, other spellings, type, default, fate and a sentence. All but the path are text."""

    path: str
    aliases: tuple[str, ...]
    type: str
    default: str
    fate: str
    sentence: str


def rows(registry: Registry = DEFAULT) -> dict[str, list[Row]]:
    """Title of a table → its rows: the root, each section, and the options of each component of zoo."""
    tables: dict[str, list[Row]] = {}
    root = Tree.of(Config, registry).whole().root
    _section_rows("", root, tables)
    _fate_rows("", {key: fate for key, fate in _table(root).items() if key not in root.model_fields}, tables)
    for kind, section in (("optimizer", "optimizer"), ("lr_schedule", "scheduler")):
        choice = section_of(root.model_fields[section].annotation)
        runtime = choice.runtime if choice is not None and issubclass(choice, ComponentChoice) else ()
        for name in registry.names(kind):
            found = list(_option_rows(registry, kind, name, f"{section}.params", runtime))
            if found:
                tables[f'{section} "{name}"'] = found
        if isinstance(choice, type) and issubclass(choice, ComponentChoice):
            _fate_rows(f"{section}.params.", choice.options, tables)
    return tables


def pages(registry: Registry = DEFAULT) -> dict[str, str]:
    """Path from ``docs/reference`` → Markdown: the first page, with the keys of the root, and one for each section."""
    tables = rows(registry)
    root = {row.path: row for row in tables[""]}
    by_place: dict[str, list[str]] = {}
    for title in tables:
        by_place.setdefault(place(title), []).append(title)
    found: dict[str, str] = {}
    listed = []
    for where, titles in sorted(by_place.items()):
        if where == FIRST:
            continue
        name = where.removeprefix(f"{FOLDER}/").removesuffix(".md")
        listed.append(f"| [{name}]({where}) | {root[name].sentence if name in root else ''} |")
        parts = [f"# {name}\n\n{ABOVE}"]
        for title in titles:
            heading = f"`{title}`" if " " not in title else title
            parts += ([] if title == name else [f"## {heading}\n"]) + [_table_of(tables[title])]
        found[where] = "\n".join(parts)
    fates = "\n".join(f"| **{fate}** | {meaning} |" for fate, meaning in FATES.items())
    sections = {row.path for row in tables[""] if row.type == "section"}
    plain = _table_of([row for row in tables[""] if row.path not in sections])
    found[FIRST] = f"{HEAD}{fates}\n{TAIL}" + "\n".join(listed) + f"\n\n## Keys outside of sections\n\n{plain}"
    return found


def place(title: str) -> str:
    """The page on which the table of this title is."""
    if not title:
        return FIRST
    return f"{FOLDER}/{title.split(' ')[0].split('.')[0]}.md"


def _table_of(found: Iterable[Row]) -> str:
    return "\n".join(["| key | type | default | in zoo | |\n|---|---|---|---|---|", *map(_line, found), ""])


def _line(row: Row) -> str:
    key = row.path.rpartition(".")[2]
    other = f" ({', '.join(f'`{alias}`' for alias in row.aliases)})" if row.aliases else ""
    cells = (f"`{key}`{other}", row.type, f"`{row.default}`" if row.default else "", row.fate, row.sentence)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# -- fields and tables ------------------------------------------------------------------------------------------------


def _table(section: type[Section]) -> dict[str, Fate]:
    found: dict[str, Fate] = {}
    for owner in reversed(section.__mro__):
        found |= vars(owner).get("fates", {})
    return found


def _section_rows(path: str, section: type[Section], tables: dict[str, list[Row]]) -> None:
    """Rows of a section under its path, then of the sections in it."""
    own = tables.setdefault(path.rstrip("."), [])
    inner: list[tuple[str, type[Section]]] = []
    said = descriptions_of(section)
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is None:
            own.append(_field_row(path, name, field, said.get(name), CARRIED_OUT))
        else:
            inner.append((f"{path}{name}.", below))
            text = _text(said.get(name)) or _first(below.__doc__)
            own.append(Row(f"{path}{name}", tuple(aliases_of(field)), "section", "", CARRIED_OUT, text))
    if path:
        _fate_rows(path, _table(section), tables)
    for below_path, below in inner:
        _section_rows(below_path, below, tables)
    if not own:
        del tables[path.rstrip(".")]


def _fate_rows(path: str, table: Mapping[str, Fate], tables: dict[str, list[Row]], above: Fate | None = None) -> None:
    own = tables.setdefault(path.rstrip("."), [])
    inner = []
    for name, fate in table.items():
        if fate.keys:
            inner.append((f"{path}{name}.", fate))
        kind = "section" if fate.keys else allowed(fate.kind)
        default = "" if fate.keys else _default(fate.default)
        said = _meaning(fate) if above is None or fate.text != above.text else ""
        own.append(Row(f"{path}{name}", fate.aliases, kind, default, fate.what, said))
    for below, fate in inner:
        _fate_rows(below, fate.keys, tables, fate)


def _meaning(fate: Fate) -> str:
    if fate.what == "translated":
        return f"Now {' and '.join(f'`{path}`' for path in fate.to)}."
    return f"Waits for {fate.text}." if fate.what == "waits" else f"{fate.text[0].upper()}{fate.text[1:]}."


def _field_row(path: str, name: str, field: FieldInfo, said: str | None, fate: str) -> Row:
    bounds = "".join(
        f" {sign} {getattr(item, word)}" for item in field.metadata
        for word, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")) if getattr(item, word, None) is not None
    )  # fmt: skip
    default = _default(field.default) if field.default is not PydanticUndefined else _made(field)
    if field.json_schema_extra is not None and callable(field.json_schema_extra):
        default = ""  # a value that is derived from others
    text = " ".join(filter(None, (_text(said), _documented(field))))
    return Row(f"{path}{name}", tuple(aliases_of(field)), _type(field.annotation) + bounds, default, fate, text)


def _documented(field: FieldInfo) -> str:
    """What is said of a key that DeepSpeed does not have, or has with another default."""
    if is_own(field):
        return "DeepSpeed has no such key."
    found = [item.default for item in field.metadata if isinstance(item, Documented)]
    return f"DeepSpeed's default is `{_default(found[0])}`." if found else ""


def _made(field: FieldInfo) -> str:
    return "required" if field.is_required() else _default(field.get_default(call_default_factory=True))


# -- options of components --------------------------------------------------------------------------------------------


def _option_rows(registry: Registry, kind: str, name: str, path: str, runtime: Iterable[str]) -> Iterator[Row]:
    # What torch has is described by torch, and differs between its releases.
    if not registry.entry(kind, name).where.startswith("zoo."):
        return
    try:
        factory = registry.get(kind, name)
    except LoadError:
        return
    config = config_class(factory)
    if config is None:
        needed, annotations = keywords(factory, runtime) or {}, argument_types(factory)
        for key, required in needed.items():
            yield Row(f"{path}.{key}", (), _type(annotations.get(key, Any)), "required" if required else "",
                      CARRIED_OUT, f"See {factory.__module__}.{factory.__name__}.")  # fmt: skip
    elif issubclass(config, BaseModel):
        said = descriptions_of(config)
        for key, field in config.model_fields.items():
            row = _field_row(f"{path}.", key, field, said.get(key), CARRIED_OUT)
            fate = next((fate for start, fate in _EFFECTLESS.items() if row.sentence.startswith(start)), CARRIED_OUT)
            yield dataclasses.replace(row, fate=fate)
        if issubclass(config, Section):
            own: dict[str, list[Row]] = {}
            _fate_rows(f"{path}.", _table(config), own)
            yield from own[path]
    elif dataclasses.is_dataclass(config):
        annotations = argument_types(config)
        for item in dataclasses.fields(config):
            default = "required" if item.default is dataclasses.MISSING else _default(item.default)
            yield Row(f"{path}.{item.name}", (), _type(annotations.get(item.name, Any)), default, CARRIED_OUT,
                      f"See {factory.__module__}.{factory.__name__}.")  # fmt: skip


# -- texts ------------------------------------------------------------------------------------------------------------

_WORDS: dict[Any, str] = {
    bool: "true or false", int: "integer", float: "number", str: "string", types.NoneType: "null", list: "list",
    tuple: "list", dict: "mapping", Mapping: "mapping", Path: "path", Any: "any value",
}  # fmt: skip


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    if origin is Union or origin is types.UnionType:
        return " or ".join(dict.fromkeys(_type(part) for part in get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    plain = origin or annotation
    return _WORDS.get(plain, getattr(plain, "__name__", str(plain)))


def _default(value: Any) -> str:
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError):
        return str(value)


def _text(description: str | None) -> str:
    return " ".join((description or "").split())


def _first(doc: str | None) -> str:
    return _text((doc or "").split("\n\n")[0])
