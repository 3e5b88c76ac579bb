"""`Section`: the base class of every part of a configuration.

A subpackage describes its options as one frozen class::

    class ZeroConfig(Section):
        stage: int = Field(default=0, ge=0, le=3, description="which roles are sharded")
        prefetch_bucket_size: int = Field(default=50_000_000, ge=0, alias="stage3_prefetch_bucket_size")

An alias is a second spelling of a key: either may be used, both at once are an error. Keys of former times, and keys
that this design does not need, are not fields: the table `Section.fates` has them. Fields and table together are the
one list of a section's keys: its page, its schema, and the sections and getters of ``zoo.deepspeed`` are made of it.
``Annotated[int | None, Documented(500_000_000)]`` says that DeepSpeed's default is another one than zoo's,
``Annotated[bool, OWN]`` that DeepSpeed has no such key.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from zoo.config.fates import Fate, fates_of
from zoo.config.schema import or_auto, schema_of

if TYPE_CHECKING:
    from zoo.config.core import Config

__all__ = [
    "OWN",
    "Documented",
    "Section",
    "aliases_of",
    "allows_auto",
    "allows_none",
    "descriptions_of",
    "documented_default",
    "fields_by_key",
    "is_own",
    "section_of",
    "section_of_items",
]


def _add_aliases(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """An editor must accept the second spelling too."""
    properties = schema.get("properties", {})
    described = descriptions_of(model)
    for name, field in model.model_fields.items():
        if name in properties and name in described:
            properties[name]["description"] = described[name]
        for alias in aliases_of(field):
            if name in properties:
                properties[alias] = {**properties[name], "description": f"Another name of {name}."}
    if issubclass(model, Section):
        properties |= or_auto(properties)
        for key, fate in fates_of(model).items():
            properties.setdefault(key, schema_of(fate))


class Section(BaseModel):
    """Options that belong together: frozen, no unknown keys, no silent conversion between kinds of values."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,  # most sections of an import are never validated
        json_schema_extra=_add_aliases,
    )

    carried_by: ClassVar[str] = ""
    """Who carries the section out, such as "zoo.zero"; empty: an engine part or a sink of the section's name does, and
    to ask for it without one is an error."""

    runner: ClassVar[str] = ""
    """The runner that carries the section out ("pipeline"), if one does: to ask for it with a model that is run by
    another one is an error."""

    def contradictions(self, config: Config) -> Iterable[str]:
        """Sentences about values that are fine alone and wrong together; `load` calls it with the whole tree."""
        return ()

    fates: ClassVar[Mapping[str, Fate]] = {}
    """Documented keys that are no fields, and what becomes of them (``zoo.config.fates``)."""

    @classmethod
    def translate(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """What a table of fates cannot say: keys in the words of today, and a sentence for each change that users
        should know.

        Reading calls it after ``fates``, before keys are checked; unknown keys are to be left as they are. The
        sentences become warnings and lines of ``explain``.

        Raises:
            ValueError: keys that contradict each other; the sentence becomes a problem of the document.
        """
        return raw, ()

    @field_validator("*", mode="before")
    @classmethod
    def _no_silent_conversion(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read "3" as 3, True as 1 and 1 as True. In a configuration each of these is a mistake.
        # Whole floats stay welcome where an integer is wanted, because 5e8 is how bucket sizes are written.
        accepted = set(_leaf_types(cls.model_fields[info.field_name or ""].annotation))
        plain = accepted <= {int, float, bool, types.NoneType}
        wrong = plain and (
            isinstance(value, str)
            or (isinstance(value, bool) and bool not in accepted)
            or (isinstance(value, int | float) and not isinstance(value, bool) and not accepted & {int, float})
        )
        if wrong:
            names = sorted("null" if leaf is types.NoneType else leaf.__name__ for leaf in accepted)
            raise PydanticCustomError("zoo_type", "{names}", {"names": " or ".join(names)})
        return value


@dataclass(frozen=True)
class Documented:
    """In ``Annotated`` of a field: DeepSpeed's default of the key, where zoo's is another."""

    default: Any


OWN = "a key of zoo alone"
"""In ``Annotated`` of a field: DeepSpeed has no such key."""


def is_own(field: FieldInfo) -> bool:
    """Whether a key is of zoo alone."""
    return any(item is OWN for item in field.metadata)


def documented_default(field: FieldInfo) -> Any:
    """DeepSpeed's default of a key: what ``Documented`` says, or the field's own."""
    for item in field.metadata:
        if isinstance(item, Documented):
            return item.default
    return field.get_default(call_default_factory=True)


def descriptions_of(section: type[BaseModel]) -> dict[str, str]:
    """Field → what is said of it: its ``description``, or the string below it in the source of its class.

    Sources are read when somebody asks. pydantic's ``use_attribute_docstrings`` reads them in each import.
    """
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            found |= _strings_below(owner)
    given = {name: field.description for name, field in section.model_fields.items() if field.description}
    return {name: text for name, text in found.items() if name in section.model_fields} | given


def _strings_below(owner: type) -> dict[str, str]:
    if owner not in _strings:
        _strings[owner] = _read_strings(owner)
    return _strings[owner]


_strings: WeakKeyDictionary[type, dict[str, str]] = WeakKeyDictionary()


def _read_strings(owner: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):  # a class made by a program: only ``description`` says anything
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip


def fields_by_key(section: type[BaseModel]) -> dict[str, str]:
    """Every spelling of every key of a section → the field's name."""
    fields = section.model_fields
    known = _keys.get(section)
    if known is None or known[0] is not fields:  # pydantic gives a class that is built again another table
        keys = {name: name for name in fields}
        for name, field in fields.items():
            for alias in aliases_of(field):
                keys.setdefault(alias, name)
        known = _keys[section] = fields, keys
    return dict(known[1])


_keys: WeakKeyDictionary[type[BaseModel], tuple[Any, dict[str, str]]] = WeakKeyDictionary()


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in an annotation such as ``ZeroConfig`` or ``Offload | None``; None for plain values."""
    found = [leaf for leaf in _leaf_types(annotation) if isinstance(leaf, type) and issubclass(leaf, Section)]
    return found[0] if len(found) == 1 else None


def section_of_items(annotation: Any) -> type[Section] | None:
    """The section class of the values of ``dict[str, Metric]``, whose keys users choose; None for anything else."""
    arguments = get_args(annotation)
    return section_of(arguments[1]) if get_origin(annotation) is dict and len(arguments) == 2 else None


def allows_auto(annotation: Any) -> bool:
    """Is ``"auto"`` one of the values that the field itself lists?"""
    if get_origin(annotation) is Literal:
        return "auto" in get_args(annotation)
    return any(allows_auto(part) for part in get_args(annotation))


def allows_none(annotation: Any) -> bool:
    """Is null one of the values?"""
    return types.NoneType in _leaf_types(annotation)


def aliases_of(field: FieldInfo) -> Iterator[str]:
    """Second spellings of a field's key."""
    seen = set()
    for alias in (field.alias, field.validation_alias):
        spellings = alias.choices if isinstance(alias, AliasChoices) else [alias]
        for spelling in spellings:
            if isinstance(spelling, str) and spelling not in seen:
                seen.add(spelling)
                yield spelling


def _leaf_types(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _leaf_types(get_args(annotation)[0])
    elif origin is Union or origin is types.UnionType:
        for part in get_args(annotation):
            yield from _leaf_types(part)
    elif origin is Literal:
        yield from {type(value) for value in get_args(annotation)}
    else:
        yield origin or annotation
