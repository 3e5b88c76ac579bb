"""Every name that programs touch is there, or absent with a reason that the program gets to read."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from tests.deepspeed.names import is_there, listed

from zoo.deepspeed import FINDER
from zoo.deepspeed.modules import Refused
from zoo.deepspeed.surface import TABLE
from zoo.deepspeed.surface.absent import ABSENT

LISTED = listed()


def test_the_list_is_whole() -> None:
    groups = [one.group for one in LISTED]
    assert {group: groups.count(group) for group in (1, 2, 3)} == {1: 133, 2: 114, 3: 279}


def test_every_name_is_there_or_absent_with_a_reason_and_never_both() -> None:
    there = {one.path: is_there(one.path) for one in LISTED}
    untold = [path for path, found in there.items() if not found and FINDER.why(path) is None]
    assert not untold, "a home in python/zoo/deepspeed/surface, or a reason in surface/absent.py"
    told = [path for path, found in there.items() if found and path and FINDER.why(path) is not None]
    assert not told, "it is there now: it leaves surface/absent.py"


def test_nothing_of_the_tables_is_told_to_be_absent() -> None:
    names = [path for path in TABLE if path]
    names += [f"{path}.{name}".strip(".") for path, of in TABLE.items() if not isinstance(of, str) for name in of]
    assert [name for name in names if FINDER.why(name) is not None] == []


@pytest.mark.parametrize("path", sorted(ABSENT))
def test_what_is_absent_says_why_however_it_is_asked_for(path: str) -> None:
    why = ABSENT[path]
    assert why.endswith("."), "a sentence"
    parent, _, name = path.rpartition(".")
    sentence = f"deepspeed.{path} is not in zoo: {why}"
    with pytest.raises(ImportError) as told:
        import_module(f"zoo.deepspeed.{path}")
    owner = f"zoo.deepspeed.{parent}".rstrip(".")
    try:
        found = import_module(owner)
    except ModuleNotFoundError:  # a class, which says what Python says; or a module that is nowhere
        return
    assert sentence in str(told.value)
    with pytest.raises(ImportError) as told:
        exec(f"from {owner} import {name}")
    assert sentence in str(told.value)
    assert not hasattr(found, name)
    with pytest.raises(AttributeError) as asked:
        getattr(found, name)
    assert sentence in str(asked.value)


def test_what_is_beneath_something_absent_is_refused_with_its_reason() -> None:
    with pytest.raises(ImportError, match=r"deepspeed\.compile is not in zoo: there are no compiler passes"):
        import_module("zoo.deepspeed.compile.backend")
    assert FINDER.why("compiler") is None
    assert FINDER.why("") is None


REFUSED = [
    (path, name, entry)
    for path, names in TABLE.items()
    if not isinstance(names, str)
    for name, entry in names.items()
    if isinstance(entry, Refused)
]


@pytest.mark.parametrize(("path", "name", "entry"), REFUSED, ids=[f"{path}.{name}" for path, name, _ in REFUSED])
def test_what_is_imported_before_it_is_wanted_refuses_when_it_is_used(path: str, name: str, entry: Refused) -> None:
    assert entry.why.endswith("."), "a sentence"
    module = ".".join(filter(None, ("deepspeed", path)))
    found: Any = getattr(import_module(f"zoo.{module}"), name)
    assert (found.__module__, found.__name__) == (module, name)
    sentence = f"{module}.{name} is not in zoo: {entry.why}"
    with pytest.raises(NotImplementedError) as told:
        found(1, of="anything")
    assert sentence in str(told.value)
    if entry.function:
        return
    subclass = type("Subclass", (found,), {"__init__": lambda self: None, "mine": 1})
    with pytest.raises(NotImplementedError):
        subclass()
    assert subclass.mine == 1
    assert not hasattr(found, "apply")
    assert not isinstance(1, found)
    with pytest.raises(AttributeError) as asked:
        found.apply(1)
    assert sentence in str(asked.value)
