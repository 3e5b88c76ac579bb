"""`Tree`: the classes that the root of a configuration is made of, loaded when a key needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from pydantic import Field, create_model

from zoo.config.errors import ConfigError
from zoo.config.fates import fates_of
from zoo.config.section import Section, fields_by_key
from zoo.registry import DEFAULT, LoadError, Registry

__all__ = ["ROOT_KIND", "SECTION_KIND", "Tree"]

SECTION_KIND = "config_section"
ROOT_KIND = "config_root"

Sections = Mapping[str, tuple[type[Section], bool]]


@dataclass(frozen=True)
class Tree:
    """Whose keys a document may have, and the classes of those that it has.

    Attributes:
        core: `Config`, whose own keys are always there.
        registry: where packages have registered sections (kind "config_section") and keys of the root ("config_root").
        sections: name → (class, demanded by the application?) of sections in use.
        roots: classes with keys of the root in use.
    """

    core: type[Section]
    registry: Registry = DEFAULT
    sections: Sections = field(default_factory=dict)
    roots: tuple[type[Section], ...] = ()

    @classmethod
    def of(cls, core: type[Section], registry: Registry, application: Mapping[str, Any] | None = None) -> Tree:
        """With nothing but the core's keys and the application's sections.

        Raises:
            ConfigError: an application section that is no `Section` or takes a name that is taken; two packages with
                one key.
        """
        tree = cls(core, registry)
        own = set(fields_by_key(core))
        sections, roots = set(registry.names(SECTION_KIND)), set(registry.names(ROOT_KIND))
        twice = sorted((own & sections) | (own & roots) | (sections & roots))
        if twice:
            raise ConfigError(
                [f"{key}: two packages, or one and the core, have this key; rename one" for key in twice], "sections"
            )
        found: dict[str, tuple[type[Section], bool]] = {}
        for name, section in (application or {}).items():
            if name in own | sections | roots:
                raise ConfigError([f"{name}: the name of an application section is taken; choose another"], "sections")
            if not (isinstance(section, type) and issubclass(section, Section)):
                raise ConfigError(
                    [f"{name}: given {section!r}; allowed is a class derived from zoo.config.Section"], "sections"
                )
            found[name] = (section, True)
        return replace(tree, sections=found)

    def names(self) -> list[str]:
        """Keys of the root that packages have registered, in use or not."""
        return [*self.registry.names(ROOT_KIND), *self.registry.names(SECTION_KIND)]

    def opened(self, keys: Iterable[Any]) -> tuple[Tree, dict[str, str]]:
        """With the classes of these keys too, and why some of them cannot be loaded."""
        sections, roots, missing = dict(self.sections), list(self.roots), {}
        registered = {kind: set(self.registry.names(kind)) for kind in (SECTION_KIND, ROOT_KIND)}
        for key in keys:
            kind = next((kind for kind, names in registered.items() if key in names), None)
            if kind is None or key in sections:
                continue
            try:
                found = self.registry.get(kind, key)
            except LoadError as error:
                missing[key] = str(error)
                continue
            if kind == SECTION_KIND:
                sections[key] = (found, False)
            elif found not in roots:
                _check_names(found, registered[kind])
                roots.append(found)
        if len(sections) == len(self.sections) and len(roots) == len(self.roots):
            return self, missing
        ordered = {name: sections[name] for name in sorted(sections, key=lambda name: (sections[name][1], name))}
        return replace(self, sections=ordered, roots=tuple(sorted(roots, key=lambda root: root.__qualname__))), missing

    def whole(self) -> Tree:
        """With everything that is registered and can be loaded."""
        return self.opened(self.names())[0]

    @property
    def root(self) -> Any:
        """The class of the root: one per set of classes, so that two configurations of one kind have one type."""
        return _root(self.core, tuple(self.sections.items()), self.roots)

    def unused(self, name: str) -> Any:
        """The default of a registered key that is not in use.

        Raises:
            AttributeError: there is no such key, or its package cannot be loaded.
        """
        if name not in self.names():
            raise AttributeError(f"a configuration has no key {name!r}; registered are {', '.join(self.names())}")
        opened, missing = self.opened([name])
        if missing:
            raise AttributeError(f"{name}: {missing[name]}")
        if name in opened.sections:
            return default_of(opened.sections[name][0])
        return opened.root.model_fields[name].get_default(call_default_factory=True)

    def __reduce__(self) -> tuple[Callable[..., Tree], tuple[Any, ...]]:
        # A registry holds functions and locks: the default one is there on the other side, of another the classes are.
        if self.registry is DEFAULT:
            return _again, (self.core, None, dict(self.sections), self.roots)
        whole = self.whole()
        return _again, (self.core, _unused(whole, self), dict(self.sections), self.roots)


def default_of(section: type[Section]) -> Section | None:
    """A section that a document does not have: its defaults, or None where it cannot be without values."""
    return None if any(given.is_required() for given in section.model_fields.values()) else section()


def root_keys(core: type[Section], registry: Registry) -> set[str]:
    """Every key that the root of a document may have, in every spelling, whatever becomes of it; imports nothing."""
    return {*_keys(core), *Tree.of(core, registry).names()}


def _unused(whole: Tree, tree: Tree) -> dict[str, dict[str, Any]]:
    return {
        SECTION_KIND: {name: found for name, (found, _) in whole.sections.items() if not whole.sections[name][1]},
        ROOT_KIND: {key: root for root in whole.roots for key in _keys(root)},
    }


def _again(
    core: type[Section], table: Mapping[str, Mapping[str, Any]] | None, sections: Sections,
    roots: tuple[type[Section], ...],
) -> Tree:  # fmt: skip
    return Tree(core, DEFAULT if table is None else Registry(table), sections, roots)


def _keys(root: type[Section]) -> Iterator[str]:
    yield from fields_by_key(root)
    yield from fates_of(root)


def _check_names(root: type[Section], registered: set[str]) -> None:
    missing = sorted(set(_keys(root)) - registered)
    if missing:
        raise ConfigError(
            [f'{key}: a key of {root.__qualname__} that is not registered as "{ROOT_KIND}"' for key in missing],
            "sections",
        )


@lru_cache(maxsize=64)
def _root(
    core: type[Section], sections: tuple[tuple[str, tuple[type[Section], bool]], ...], roots: tuple[type[Section], ...]
) -> Any:
    fields: dict[str, Any] = {}
    for name, (section, demanded) in sections:
        if default_of(section) is not None:
            fields[name] = (section, Field(default_factory=section))
        elif demanded:
            fields[name] = (section, ...)
        else:
            fields[name] = (section | None, None)
    return create_model(core.__name__, __base__=(core, *roots), __module__=core.__module__, **fields)
