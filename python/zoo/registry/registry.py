"""`Registry`: components by kind and name, from code, from tables of strings and from entry points."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, overload

from zoo.registry.building import Problem, check_keywords, config_class, parse, run
from zoo.registry.errors import DuplicateError, LoadError, RegistryError, UnknownError, alternatives

__all__ = ["GROUP", "Entry", "Registry"]

GROUP = "zoo.components"
"""The entry-point group: ``"<kind>.<name>" = "module:attribute"``."""

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One claim on a name: ``target`` is the component itself or the ``"module:attribute"`` where it will be found."""

    kind: str
    name: str
    target: Any
    origin: str

    @property
    def where(self) -> str:
        """``module:attribute`` of the component, without importing it."""
        if isinstance(self.target, str):
            return self.target
        module = getattr(self.target, "__module__", type(self.target).__module__)
        return f"{module}:{getattr(self.target, '__qualname__', type(self.target).__qualname__)}"

    def __str__(self) -> str:
        return f"{self.where} from {self.origin}"


class Registry:
    """Components by kind and name; names that differ in the case of letters only are one name.

    Nothing is imported before a name is asked for: entry points and tables hold ``"module:attribute"`` strings. Entry
    points are read once, at the first question. All methods may be called from several threads; overrides are seen by
    all of them (ranks of one process must agree) and must end in the reverse order in which they began.

    Args:
        table: kind → name → component or ``"module:attribute"``.
        origin: who speaks through ``table``, for error messages.
        discover: where entry points come from; the default reads the group ``zoo.components`` of everything installed.
            ``None`` asks nobody.
    """

    def __init__(
        self,
        table: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        origin: str = "table",
        discover: Callable[[], Iterable[EntryPoint]] | None = None,
    ) -> None:
        self._claims: dict[tuple[str, str], list[Entry]] = {}
        self._names: dict[str, list[str]] = {}  # by kind, what `names` has found; emptied where claims change
        self._problems: list[str] = []
        self._discover = discover
        self._lock = threading.RLock()
        for kind, names in (table or {}).items():
            for name, target in names.items():
                self.register(kind, name, target, origin=origin)

    # -- registering ------------------------------------------------------------------------------------------------

    @overload
    def register(self, kind: str, name: str, factory: str, *, origin: str | None = ...) -> str: ...
    @overload
    def register(self, kind: str, name: str, factory: T, *, origin: str | None = ...) -> T: ...
    @overload
    def register(self, kind: str, name: str, *, origin: str | None = ...) -> Callable[[T], T]: ...
    def register(self, kind: str, name: str, factory: Any = None, *, origin: str | None = None) -> Any:
        """Give a component a name; without ``factory``, a decorator that does so. Returns the component.

        Registering the very same object again changes nothing.

        Args:
            kind: such as "optimizer"; letters, digits and underscores.
            name: unique within the kind; no spaces.
            factory: the component, or ``"module:attribute"`` to import it when it is first asked for.
            origin: who registers it; the file and line of the component when left out.

        Raises:
            DuplicateError: the name is taken; both origins are named.
            RegistryError: a kind or name that cannot be written down.
        """
        if factory is None:
            return lambda component: self.register(kind, name, component, origin=origin)
        problem = _bad_name(kind, name, factory)
        if problem:
            raise RegistryError(problem)
        entry = Entry(kind, name, factory, origin or _origin_of(factory))
        with self._lock:
            claims = self._claims.setdefault(_key(kind, name), [])
            self._names.clear()
            same = any(
                claim.target is factory or (isinstance(factory, str) and claim.target == factory) for claim in claims
            )
            if claims and not same:
                raise DuplicateError(_contested([*claims, entry]))
            if not claims:
                claims.append(entry)
        return factory

    @contextmanager
    def override(self, kind: str, name: str, factory: Any, *, origin: str | None = None) -> Iterator[None]:
        """Within the block, ``name`` means ``factory``: the swap of one experiment.

        Raises:
            UnknownError: there is no such name to override (`scope` and `register` add a new one for a while).
        """
        with self._lock:
            self._load_entry_points()
            key = _key(kind, name)
            if key not in self._claims:
                self._find(kind, name)
            before = self._claims[key]  # contested or not: an override is how a contested name is decided
            known = before[0].name
            self._names.clear()
            self._claims[key] = [Entry(kind, known, factory, origin or f"override, {_origin_of(factory)}")]
        try:
            yield
        finally:
            with self._lock:
                self._names.clear()
                self._claims[key] = before

    @contextmanager
    def scope(self) -> Iterator[Registry]:
        """Whatever is registered within the block is forgotten at its end."""
        with self._lock:
            self._load_entry_points()
            before = {key: list(claims) for key, claims in self._claims.items()}
        try:
            yield self
        finally:
            with self._lock:
                self._names.clear()
                self._claims = before

    # -- asking -----------------------------------------------------------------------------------------------------

    def kinds(self) -> list[str]:
        """All kinds that have at least one name, sorted."""
        with self._lock:
            self._load_entry_points()
            return sorted({kind for kind, _ in self._claims})

    def names(self, kind: str) -> list[str]:
        """All names of a kind, sorted; empty for a kind nobody has used. Nothing is imported."""
        with self._lock:
            self._load_entry_points()
            if kind not in self._names:
                found = (claims[0].name for (known, _), claims in self._claims.items() if known == kind)
                self._names[kind] = sorted(found)
            return list(self._names[kind])

    def entry(self, kind: str, name: str) -> Entry:
        """Who claims a name and where the component is, without importing it.

        Raises:
            UnknownError: nobody does; lists the alternatives and the nearest one.
            DuplicateError: two origins do.
            RegistryError: the kind or the name is no text.
        """
        with self._lock:
            return self._find(kind, name)

    def get(self, kind: str, name: str) -> Any:
        """The component, imported if need be.

        Raises:
            UnknownError, DuplicateError: see `entry`.
            LoadError: the import failed; names the component and its origin.
        """
        entry = self.entry(kind, name)
        return _resolve(entry) if isinstance(entry.target, str) else entry.target

    def build(self, kind: str, name: str, config: Any = None, **runtime: Any) -> Any:
        """``component(Config(**config), **runtime)``.

        Args:
            kind: kind of the component.
            name: name within the kind.
            config: mapping for the component's ``Config``, an instance of it, or None for all defaults.
            **runtime: what exists only at run time and therefore in no config: parameters, process groups, devices.

        Raises:
            UnknownError, DuplicateError, LoadError: see `get`.
            BuildError: a config or an argument that the component does not accept.
        """
        entry = self.entry(kind, name)
        return run(f"{kind} {name!r} ({entry})", self.get(kind, name), config, runtime)

    def parse(
        self, kind: str, name: str, config: Any = None, *, runtime: Iterable[str] = ()
    ) -> tuple[Any, list[Problem]]:
        """What `build` would make of a config, and every problem that it has, without building anything.

        Args:
            runtime: names of the arguments that `build` will get besides.

        Returns:
            an instance of the component's ``Config`` (of one without: the mapping); path and sentence of each problem.

        Raises:
            UnknownError, DuplicateError, LoadError: see `get`.
        """
        factory = self.get(kind, name)
        schema = config_class(factory)
        if schema is not None:
            return parse(schema, config)
        return config, check_keywords(factory, config, runtime)

    def problems(self) -> list[str]:
        """One sentence for each unreadable entry point and each contested name. Names are not imported to find out."""
        with self._lock:
            self._load_entry_points()
            contested = [_contested(claims) for claims in self._claims.values() if len(claims) > 1]
            return [*self._problems, *contested]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _find(self, kind: str, name: str) -> Entry:
        self._load_entry_points()
        claims = self._claims.get(_key(kind, name))
        if not claims:
            options = self.names(kind)
            if options:
                message = f"no {kind} is named {name!r}; {alternatives(name, options)}"
            else:
                message = f"no kind is named {kind!r}; {alternatives(kind, self.kinds())}"
            if self._problems:
                message += ". Entry points that could not be read: " + "; ".join(self._problems)
            raise UnknownError(message)
        if len(claims) > 1:
            raise DuplicateError(_contested(claims))
        return claims[0]

    def _load_entry_points(self) -> None:
        discover, self._discover = self._discover, None
        if discover is None:
            return
        for point in discover():
            origin = f"{point.dist.name} {point.dist.version}" if point.dist else "an entry point"
            kind, dot, name = point.name.partition(".")
            problem = _bad_name(kind, name, point.value) if dot else "its name is not <kind>.<name>"
            if problem:
                self._problems.append(f"entry point {point.name!r} of {origin}: {problem}")
                continue
            claims = self._claims.setdefault(_key(kind, name), [])
            entry = Entry(kind, name, point.value, origin)
            # The core may say twice what it says once in a table and once as an entry point; a plug-in may not.
            if entry not in claims:
                claims.append(entry)
        self._names.clear()


def installed() -> Iterable[EntryPoint]:
    """The entry points of the group ``zoo.components`` in this environment."""
    return entry_points(group=GROUP)


def _key(kind: str, name: str) -> tuple[str, str]:
    if problem := _no_text(kind, name):
        raise RegistryError(problem)
    return kind, name.casefold()


def _no_text(kind: Any, name: Any) -> str | None:
    """A component in the place of its name, or None, say."""
    for what, value in (("kind", kind), ("name", name)):
        if not isinstance(value, str):
            return f"a {what} is {value!r}, a {type(value).__name__}; it is a text, such as 'optimizer' or 'AdamW'"
    return None


def _resolve(entry: Entry) -> Any:
    module, _, attribute = entry.target.partition(":")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        # Whatever a plug-in's module raises at import, the user must learn which component it was.
        raise LoadError(
            f"{entry.kind} {entry.name!r} ({entry}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return found


def _bad_name(kind: str, name: str, target: Any) -> str | None:
    if problem := _no_text(kind, name):
        return problem
    if not kind.isidentifier():
        return f"kind {kind!r} is not a word of letters, digits and underscores"
    if not name or any(letter.isspace() for letter in name):
        return f"name {name!r} of kind {kind!r} is empty or has spaces in it"
    if isinstance(target, str):
        module, colon, attribute = target.partition(":")
        words = [*module.split("."), *attribute.split(".")]
        if not colon or not all(word.isidentifier() for word in words):
            return f"{kind} {name!r}: {target!r} is not of the form 'module:attribute'"
    return None


def _contested(claims: Iterable[Entry]) -> str:
    claims = list(claims)
    listed = " and by ".join(str(claim) for claim in claims)
    return (
        f"{claims[0].kind} {claims[0].name!r} is claimed by {listed}; rename or uninstall one of them, "
        "or choose with `with registry.override(kind, name, factory)`"
    )


def _origin_of(factory: Any) -> str:
    if isinstance(factory, str):
        return "the caller"
    return _line_of_class(factory) if isinstance(factory, type) else _line_of(factory)


@lru_cache(maxsize=128)
def _line_of_class(factory: type) -> str:
    return _line_of(factory)  # which reads all of its file


def _line_of(factory: Any) -> str:
    try:
        file = inspect.getsourcefile(factory)
        return f"{file}:{inspect.getsourcelines(factory)[1]}"
    except (TypeError, OSError):
        return str(getattr(factory, "__module__", type(factory).__module__))
