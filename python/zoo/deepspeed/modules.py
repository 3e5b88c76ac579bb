"""Modules that are made of a table: each of their names is imported from its home when it is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import _bootstrap, import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

ROOT = "zoo.deepspeed"
NICKNAME = "deepspeed"
_find_and_load = _bootstrap._find_and_load.__code__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Name:
    """Where a name is at home ("module:attribute", or "module" for a module), and what differs from DeepSpeed's."""

    home: str
    differs: str = ""


@dataclass(frozen=True)
class Refused:
    """A name that libraries import before they look whether the feature is wanted: it is there, and refuses when it is
    used (called, or instantiated, subclasses too) with the reason, one sentence. A class unless ``function``."""

    why: str
    function: bool = False


Why = Callable[[str], "str | None"]
Entry = Name | Refused | str
Names = Mapping[str, Entry]
Table = Mapping[str, "Names | str"]
"""Module path beneath the root ("" for the root itself) → its names; or the one module that it is."""


def home_of(entry: Entry) -> str:
    """The home of a table's entry, "" for one that is refused."""
    return entry if isinstance(entry, str) else entry.home if isinstance(entry, Name) else ""


def resolve(home: str) -> Any:
    """The object, or the module, at a home."""
    module, _, attribute = home.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


class Reexports(ModuleType):
    """A module with names of a table. What is set in it stays in it, as in any module."""

    def __init__(self, name: str, names: Names, below: Sequence[str], why: Why, doc: str) -> None:
        super().__init__(name, doc)
        self.__dict__.update(__path__=[], _names=dict(names), _below=tuple(below), _why=why, __all__=sorted(names))

    def __getattr__(self, name: str) -> Any:
        return attribute(self.__dict__, name)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._names, *self._below} - {"_names", "_below", "_why"})


def attribute(space: dict[str, Any], name: str) -> Any:
    """The value of a name in a module whose ``__dict__`` is ``space``, which keeps it.

    Raises:
        AttributeError: DeepSpeed has it and zoo does not, or neither has. Programs probe for features so.
        ModuleNotFoundError: what it needs is not installed.
    """
    entry = space["_names"].get(name)
    if isinstance(entry, Refused):
        from zoo.deepspeed.refused import refused

        value = space[name] = refused(space["__name__"].removeprefix("zoo."), name, entry)
        return value
    if entry is not None:
        value = space[name] = _imported(home_of(entry), f"{space['__name__']}.{name}")
        return value
    if name in space["_below"]:
        return import_module(f"{space['__name__']}.{name}")
    shown = space["__name__"].removeprefix("zoo.")
    raise AttributeError(
        space["_why"](f"{shown}.{name}".partition(".")[2])
        or f"{shown} has no {name!r} in zoo: it does not exist there (yet), or DeepSpeed does not have it either. "
        "docs/reference/deepspeed-names.md lists what is there."
    )


def _imported(home: str, wanted: str) -> Any:
    try:
        return resolve(home)
    except ModuleNotFoundError as error:
        package = str(error.name or "").split(".")
        if package[:1] == ["zoo"] and len(package) == 2 and package[1] in ("moe", "compression", "kernels"):
            raise ModuleNotFoundError(
                f"{wanted.removeprefix('zoo.')} needs the distribution zoo-{package[1]}, which is not installed.",
                name=error.name,
            ) from error
        raise


class TableFinder(MetaPathFinder, Loader):
    """Finds the modules of a table under the root; and, once there is a nickname, each of them under that as well.

    Both are one module object. What is absent with a reason, a path and all beneath it, is refused with it.
    """

    def __init__(self, table: Table, absent: Mapping[str, str]) -> None:
        self.table, self.absent = dict(table), absent
        for path in list(self.table):
            while path:
                path = path.rpartition(".")[0]
                self.table.setdefault(path, {})
        self.nickname: str | None = None

    def below(self, path: str) -> list[str]:
        """Names of the modules right beneath a module."""
        head = f"{path}." if path else ""
        return sorted({p[len(head) :].split(".")[0] for p in self.table if p and p.startswith(head)})

    def entry(self, path: str) -> Entry | None:
        """What the table has for a name, not a module."""
        module, _, name = path.rpartition(".")
        names = self.table.get(module, {})
        return None if isinstance(names, str) else names.get(name)

    def why(self, inside: str) -> str | None:
        """The sentence about what is absent, or refuses, with a reason that is told for it or for what it is in; None
        for what is there, and for anything else."""
        path, entry = inside, self.entry(inside)
        if inside in self.table or isinstance(entry, (Name, str)):
            return None
        while path and path not in self.absent and not isinstance(entry, Refused):
            path = path.rpartition(".")[0]
            entry = self.entry(path)
            if isinstance(entry, (Name, str)):  # a name of a class that is there
                return None
        if not path:
            return None
        reason = entry.why if isinstance(entry, Refused) else self.absent[path]
        return f"{NICKNAME}.{inside} is not in zoo: {reason} docs/reference/deepspeed-names.md lists what is there."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`.

        Raises:
            ModuleNotFoundError: an import asks for what zoo does not have. ``importlib.util.find_spec`` gets None for
                what would be right beneath a package that is there.
        """
        for root in (ROOT, self.nickname):
            if root is None or not fullname.startswith(f"{root}."):
                continue
            inside = fullname[len(root) + 1 :]
            if inside in self.table:
                return ModuleSpec(fullname, self, origin=f"names of {ROOT}", is_package=True)
            if not _is_imported():
                return None
            why = self.why(inside)
            if why is not None:
                # Under the nickname always: of an error that has the name which "from x import y" looked for Python
                # drops the sentence.
                raise ModuleNotFoundError(why, name=f"{NICKNAME}.{inside}")
            if root == self.nickname:
                raise ModuleNotFoundError(
                    f"{fullname} does not exist in zoo (yet), whose {ROOT} stands in for DeepSpeed here; "
                    "docs/reference/deepspeed-names.md lists what is there.",
                    name=fullname,
                )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the module, or give the one that is there under the other name."""
        head = self.nickname if self.nickname and spec.name.startswith(f"{self.nickname}.") else ROOT
        inside = spec.name[len(head) + 1 :]
        if head != ROOT:
            return self._again(import_module(f"{ROOT}.{inside}"), spec)
        names = self.table[inside]
        if isinstance(names, str):
            return self._again(import_module(names), spec)
        doc = f"``{NICKNAME}.{inside}``, with zoo behind its names; made of the tables of ``{ROOT}.surface``."
        return Reexports(spec.name, names, self.below(inside), self.why, doc)

    def _again(self, module: ModuleType, spec: ModuleSpec) -> ModuleType:
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Importing under another name must not change what the module says of itself."""
        spec = module.__spec__
        if spec is not None and spec.loader is self and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def _is_imported() -> bool:
    """Whether the finder that calls this is asked by an import, which shows its error, and not by a probe, which wants
    None. Both call it alike: only the callers tell."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == _find_and_load.co_filename:
        if frame.f_code is _find_and_load:
            return True
        frame = frame.f_back
    return False


def install(finder: TableFinder) -> None:
    """Let Python's import ask it, before it looks into folders."""
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)
