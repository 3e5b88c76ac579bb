"""What becomes of documented keys that are no fields of a section.

A ds_config document has keys that this design does not need, keys of former times, and keys of features that are not
there. Each section's class keeps them in one table, ``fates``: key → :class:`Fate`. A key that is a field needs none:
it is carried out, and its docstring says how.

* :func:`unnecessary`: zoo does it anyway, or has nothing that it could choose. Asking for something else is a note.
* :func:`translated`: another key says it now.
* :func:`refused`: asking for it is an error that says why. What asks for nothing (null, false, the default) is taken.
* :func:`waits`: the same, for a feature of a later part.

A fate may have ``keys`` of its own, which makes it a whole section that is known and not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from zoo.config.errors import ConfigError
from zoo.registry import nearest

if TYPE_CHECKING:
    from zoo.config.section import Section

__all__ = [
    "Fate",
    "Setting",
    "Settled",
    "allowed",
    "fates_of",
    "judge",
    "of_today",
    "refused",
    "sentence",
    "setting",
    "settle",
    "spread",
    "translated",
    "unknown",
    "unnecessary",
    "waits",
]

What = Literal["unnecessary", "translated", "refused", "waits"]
Kind = type | tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of one key.

    Attributes:
        text: why it is unnecessary or refused; what a translated one is now; which feature it waits for.
        kind: bool, int, float, str, list, dict, or a tuple of the values that are allowed.
        default: the documented default. It asks for nothing, and so do null, "auto", and false for a mapping.
        nothing: other values that ask for nothing.
        aliases: other spellings.
        to: of a translated key, path → its own value → the value there, or None for the same value; a value that is
            not listed leaves it alone.
        keys: of a mapping, what becomes of its keys.
        open: the mapping may have other keys too, such as names that users choose.
        whole: whatever is in the mapping asks for something.
        alone: where the mapping has a key ``enabled``, nothing else in it asks for anything.
        asks: does a value beside the default ask for something? Not where another key switches the feature on.
    """

    what: What
    text: str
    kind: Kind
    default: Any = None
    nothing: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    to: Mapping[str, Mapping[Any, Any] | None] = field(default_factory=dict)
    keys: Mapping[str, Fate] = field(default_factory=dict)
    open: bool = False
    whole: bool = False
    alone: bool = True
    asks: bool = True

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether a value means what happens anyway."""
        return value is None or any(_same(value, other) for other in (self.default, "auto", *self.nothing))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A key of a section that is known and not there: what it may be. It has the section's fate."""

    kind: Kind
    default: Any = None
    asks: bool = True
    open: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    nothing: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settled:
    """Keys of a section as its class has them, notes on what was changed, and problems; paths are of the section."""

    values: dict[str, Any]
    notes: list[str]
    problems: list[str]


def setting(default: Any = None, kind: Kind | None = None, *, asks: bool = True, **more: Any) -> Setting:
    """A key below another one, see :class:`Fate` for what is given."""
    return Setting(kind=kind or _kind_of(default), default=default, asks=asks, **more)


def unnecessary(text: str, default: Any = None, kind: Kind | None = None, **more: Any) -> Fate:
    """A key whose effect is there anyway, or that would choose between things of which there is one."""
    return _fate("unnecessary", text, default, kind, **more)


def translated(to: Mapping[str, Mapping[Any, Any] | None], kind: Kind = bool, default: Any = None, **more: Any) -> Fate:
    """A key of former times: path → its value → the value there, see :class:`Fate`."""
    return _fate("translated", " and ".join(to), default, kind, to=to, **more)


def refused(text: str, default: Any = None, kind: Kind | None = None, **more: Any) -> Fate:
    """A key that asks for what zoo does not do."""
    return _fate("refused", text, default, kind, **more)


def waits(feature: str, default: Any = None, kind: Kind | None = None, **more: Any) -> Fate:
    """A key of a feature that is not there yet."""
    return _fate("waits", feature, default, kind, **more)


def _fate(what: What, text: str, default: Any, kind: Kind | None, **more: Any) -> Fate:
    keys = {name: _below(what, text, given) for name, given in more.pop("keys", {}).items()}
    if keys:
        kind, default = dict, default if default is not None else {}
    return Fate(what=what, text=text, kind=kind or _kind_of(default), default=default, keys=keys, **more)


def _below(what: What, text: str, given: Any) -> Fate:
    """The fate of a key below another, from a fate, a setting, a mapping of keys, or a default."""
    if isinstance(given, Fate):
        return given
    if isinstance(given, Mapping):
        return _fate(what, text, {}, dict, keys=given, open=not given)
    if not isinstance(given, Setting):
        given = setting(given)
    return _fate(
        what, text, given.default, given.kind, keys=given.keys, nothing=given.nothing, aliases=given.aliases,
        open=given.open, asks=given.asks,
    )  # fmt: skip


def _kind_of(default: Any) -> Kind:
    if default is None:
        raise TypeError("a key whose default is null says of what kind it is")
    return type(default)


# -- a section's table ------------------------------------------------------------------------------------------------


def fates_of(section: type[Section]) -> dict[str, Fate]:
    """Every spelling of every key of the section's table, and of the classes that it comes from."""
    found = _fates.get(section)
    if found is None:
        found = {}
        for owner in reversed(section.__mro__):
            for name, fate in vars(owner).get("fates", {}).items():
                found |= dict.fromkeys((name, *fate.aliases), fate)
        _fates[section] = found
    return dict(found)


_fates: WeakKeyDictionary[type[Section], dict[str, Fate]] = WeakKeyDictionary()


def of_today(section: type[Section], raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Values by keys that the section, and sections in it, have, and a sentence for each change.

    Raises:
        ConfigError: everything that tables refuse, with the path of each.
    """
    values, notes, problems = _of_today(section, raw, "")
    if problems:
        raise ConfigError(problems, where)
    return values, notes


def _of_today(section: type[Section], raw: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str], list[str]]:
    from zoo.config.section import fields_by_key, section_of

    settled = settle(section, raw)
    values, names = dict(settled.values), fields_by_key(section)
    notes = [f"{path}{note}" for note in settled.notes]
    problems = [f"{path}{problem}" for problem in settled.problems]
    for key, value in values.items():
        field = section.model_fields.get(names.get(key, ""))
        inner = section_of(field.annotation) if field else None
        if inner is not None and isinstance(value, Mapping):
            values[key], more, wrong = _of_today(inner, value, f"{path}{key}.")
            notes, problems = notes + more, problems + wrong
    return values, notes, problems


def settle(section: type[Section], raw: Mapping[str, Any]) -> Settled:
    """What a document says, by keys that the section has: its table, then `Section.translate`."""
    from zoo.config.section import fields_by_key

    spellings = fields_by_key(section)
    table = {key: fate for key, fate in fates_of(section).items() if key not in spellings}
    settled = judge(table, raw, spellings)
    if settled.problems:
        return settled
    try:
        given, sentences = section.translate(settled.values)
    except ConfigError as error:
        return Settled({}, settled.notes, error.problems)
    except ValueError as error:
        return Settled({}, settled.notes, [str(error)])
    return Settled(dict(given), [*settled.notes, *sentences], [])


def judge(table: Mapping[str, Fate], raw: Mapping[str, Any], spellings: Mapping[str, str]) -> Settled:
    """What a table says about keys; those that it does not have stay. ``spellings``: key → name of what they may be
    translated to."""
    values: dict[str, Any] = {key: value for key, value in raw.items() if key not in table}
    notes: list[str] = []
    problems: list[str] = []
    seen: dict[int, str] = {}
    for key, value in raw.items():
        fate = table.get(key)
        if fate is None:
            continue
        other = seen.setdefault(id(fate), key)
        if other != key:
            problems.append(f"{key}: given twice, as {other!r} and as {key!r}; they are one option, remove one")
        elif fate.what == "translated":
            _translate(spellings, values, fate, key, value, notes, problems)
        else:
            problems += _judge(fate, key, value, notes, judged=True)
    return Settled(values, notes, problems)


def _judge(fate: Fate, path: str, value: Any, notes: list[str], *, judged: bool) -> Iterator[str]:
    """A sentence for everything that is wrong with a value; ``judged``: nothing above it is switched off."""
    if value is None or value == "auto" or (value is False and fate.kind is dict):
        return
    if not _is_of(value, fate.kind):
        yield f"{path}: given {value!r} ({type(value).__name__}); allowed: {allowed(fate.kind)}"
        return
    if fate.kind is dict and (fate.keys or fate.open):
        yield from _judge_mapping(fate, path, value, notes, judged=judged)
        return
    if not judged or not fate.asks or fate.asks_for_nothing(value):
        return
    if fate.what == "unnecessary":
        notes.append(f"{path}={value!r} has no effect: {fate.text}.")
    else:
        yield f"{path}: given {value!r}; {_no(fate)}"


def _judge_mapping(fate: Fate, path: str, value: Mapping[Any, Any], notes: list[str], *, judged: bool) -> Iterator[str]:
    keys = {spelling: inner for name, inner in fate.keys.items() for spelling in (name, *inner.aliases)}
    switch = fate.keys.get("enabled") if fate.alone else None
    on = value.get("enabled", switch.default) is True if switch is not None else True
    if fate.whole and value and judged:
        yield f"{path}: given; {_no(fate)}"
        judged = False
    for key, item in value.items():
        here = f"{path}.{key}"
        inner = keys.get(key)
        if inner is None:
            if not fate.open:
                yield unknown(here, str(key), keys)
            continue
        # Where the section has a switch, it alone asks.
        counts = judged and on and (switch is None or key == "enabled" or inner.what != fate.what or bool(inner.keys))
        yield from _judge(inner, here, item, notes, judged=counts)


def _no(fate: Fate) -> str:
    if fate.what == "waits":
        return f"it waits for {fate.text}, which zoo does not have yet; leave it out"
    default = "" if fate.default is None or isinstance(fate.default, Mapping) else f"; allowed: {fate.default!r}"
    return f"not supported: {fate.text}{default}"


def unknown(path: str, key: str, keys: Iterable[str], shown: Iterable[str] | None = None) -> str:
    """The sentence on a key that nobody knows; without one that is near, those in ``shown`` are listed."""
    keys = list(keys)
    guess = nearest(key, keys)
    if guess:
        return f"{path}: unknown key; did you mean {guess!r}?"
    return f"{path}: unknown key; known here: {', '.join(sorted(shown or keys))}"


def _translate(
    spellings: Mapping[str, str], values: dict[str, Any], fate: Fate, key: str, value: Any, notes: list[str],
    problems: list[str],
) -> None:  # fmt: skip
    if value is None or value == "auto":
        return
    if not _is_of(value, fate.kind):
        problems.append(f"{key}: given {value!r} ({type(value).__name__}); allowed: {allowed(fate.kind)}")
        return
    said = {
        path: value if meant is None else meant[value]
        for path, meant in fate.to.items()
        if meant is None or value in meant
    }
    for path, meant in said.items():
        clash = _write(spellings, values, path, meant)
        if clash is not None:
            problems.append(f"{key}={value!r} and {clash} contradict each other; remove the former, it is deprecated")
            return
    if said:
        listed = " and ".join(f"{path}={meant!r}" for path, meant in said.items())
        notes.append(f"{key} is deprecated: {key}={value!r} was read as {listed}.")


def _write(spellings: Mapping[str, str], values: dict[str, Any], path: str, value: Any) -> str | None:
    """Set a dotted path; where something else is there, say what."""
    head, _, leaf = path.partition(".")
    name = next((key for key in values if spellings.get(key) == head), head)
    if not leaf:
        node, last = values, name
    else:
        inner = values.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            return None  # validation says what is wrong with it
        node, last = dict(inner or {}), leaf
        values[name] = node
    if node.get(last) not in (None, "auto", value):
        return f"{name}.{leaf}={node[last]!r}" if leaf else f"{name}={node[last]!r}"
    node[last] = value
    return None


# -- values -----------------------------------------------------------------------------------------------------------


def _is_of(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return any(_is_of(value, one) if isinstance(one, type) else _same(value, one) for one in kind)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return number and value == value and value not in (float("inf"), float("-inf")) and value == int(value)
    if kind is float:
        return number
    if kind is dict:
        return isinstance(value, Mapping)
    if kind is list:
        return isinstance(value, list | tuple)
    return isinstance(value, kind)


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


_WORDS: dict[Any, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a mapping",
}  # fmt: skip


def allowed(kind: Kind) -> str:
    """A kind in words."""
    one = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(_WORDS[value] if isinstance(value, type) else repr(value) for value in one)


def sentence(fate: Fate) -> str:
    """What becomes of a key, for editors and pages."""
    if fate.what == "translated":
        return f"Now {fate.text}."
    if fate.what == "waits":
        return f"Waits for {fate.text}."
    text = f"{fate.text[0].upper()}{fate.text[1:]}."
    return f"Accepted, without effect: {fate.text}." if fate.what == "unnecessary" else text


def spread(table: Mapping[str, Fate], path: str = "") -> Iterator[tuple[str, Fate]]:
    """Dotted path and fate of every key of a table and below."""
    for name, fate in table.items():
        yield f"{path}{name}", fate
        yield from spread(fate.keys, f"{path}{name}.")
