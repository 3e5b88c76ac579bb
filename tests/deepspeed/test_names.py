"""Every name that programs touch is there, or absent with a reason that the program gets to read."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from tests.deepspeed.names import is_there, listed

from zoo.deepspeed import FINDER
from zoo.deepspeed.modules import Refused
from zoo.deepspeed.surface import TABLE
from zoo.deepspeed.surface.absent import ABSENT, FILE, reason

LISTED = listed()
GONE = [path for path in ABSENT if path not in FINDER.table and FINDER.entry(path) is None]


def refused(path: str) -> bool:
    """Whether a program gets something that refuses to be used."""
    return isinstance(FINDER.entry(path), Refused)


def test_the_list_is_whole() -> None:
    groups = [one.group for one in LISTED]
    assert {group: groups.count(group) for group in (1, 2, 3)} == {1: 133, 2: 114, 3: 279}


def test_every_name_is_there_or_absent_with_a_reason_and_never_both() -> None:
    there = {one.path: is_there(one.path) for one in LISTED}
    untold = [path for path, found in there.items() if not found and FINDER.why(path) is None]
    assert not untold, "a home in python/zoo/deepspeed/surface, or a reason in surface/absent.py"
    told = [path for path, found in there.items() if found and FINDER.why(path) and not refused(path)]
    assert not told, "it is there now: it leaves surface/absent.py"


def test_nothing_of_the_tables_is_told_to_be_absent() -> None:
    names = [path for path in TABLE if path]
    names += [f"{path}.{name}".strip(".") for path, of in TABLE.items() if not isinstance(of, str) for name in of]
    assert [name for name in names if FINDER.why(name) is not None and not refused(name)] == []


@pytest.mark.parametrize("path", sorted(GONE))
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
    with pytest.raises(ImportError, match=r"deepspeed\.nebula is not in zoo: Azure's service"):
        import_module("zoo.deepspeed.nebula.config")
    with pytest.raises(ImportError, match=r"deepspeed\.compile\.tomorrow is not in zoo: its compiler passes"):
        import_module("zoo.deepspeed.compile.tomorrow")
    assert FINDER.why("compiler") is None
    assert FINDER.why("") is None


REFUSED = [
    (path, name, entry)
    for path, names in TABLE.items()
    if not isinstance(names, str)
    for name, entry in names.items()
    if isinstance(entry, Refused)
]


@pytest.mark.parametrize("tree", sorted({path.partition(".")[0] for path, *_ in REFUSED}))
def test_what_is_imported_before_it_is_wanted_refuses_when_it_is_used(tree: str) -> None:
    for path, name, entry in REFUSED:
        if path.partition(".")[0] == tree:
            refuses(path, name, entry)


def refuses(path: str, name: str, entry: Refused) -> None:
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


def test_every_part_to_come_has_its_reason_and_is_named_once() -> None:
    lines = FILE.read_text().splitlines()
    modules = [line.split(":")[0] for line in lines if not line.startswith(" ")]
    assert modules == sorted(set(modules))
    with pytest.raises(ValueError, match=r"names 'nowhere\.nothing', for which"):
        reason("nowhere.nothing")
    unused = [path for path in ABSENT if FINDER.entry(path) is not None and not refused(path)]
    assert unused == [], "it is there now: it leaves surface/absent.py"


def test_a_class_of_a_part_to_come_can_be_a_base_and_asked_about_at_import() -> None:
    from zoo.deepspeed.module_inject import DSPolicy
    from zoo.deepspeed.runtime.hybrid_engine_graph import DecodeGraphCache

    class Mine(DSPolicy, torch.nn.Module):  # type: ignore[misc, valid-type]
        """As a library defines one at its top."""

    model = torch.nn.Linear(2, 2)
    assert not any(isinstance(m, (DSPolicy, DecodeGraphCache)) for m in model.modules())
    with pytest.raises(NotImplementedError, match=r"DSPolicy is not in zoo: a model is cut by the section"):
        Mine(model)


def test_constants_of_parts_to_come_have_their_values() -> None:
    from zoo.deepspeed.autotuning import constants as tuning
    from zoo.deepspeed.profiling.constants import FLOPS_PROFILER_ENABLED, FLOPS_PROFILER_PROFILE_STEP_DEFAULT
    from zoo.deepspeed.runtime.swap_tensor import MIN_SWAPPABLE_BYTES

    assert (tuning.AUTOTUNING_TUNER_TYPE_DEFAULT, tuning.AUTOTUNING_FAST_DEFAULT) == ("gridsearch", True)
    assert (FLOPS_PROFILER_ENABLED, FLOPS_PROFILER_PROFILE_STEP_DEFAULT, MIN_SWAPPABLE_BYTES) == ("enabled", 1, 2**20)
    with pytest.raises(AttributeError, match="NOTHING"):
        tuning.NOTHING  # noqa: B018


def test_an_exception_of_a_part_to_come_can_be_waited_for() -> None:
    from zoo.deepspeed.compile.profilers.graph_profile import ProfileAborted

    def asks() -> None:
        try:
            {}["missing"]
        except ProfileAborted:
            pytest.fail("it is none")

    with pytest.raises(KeyError):
        asks()
    with pytest.raises(NotImplementedError, match="ProfileAborted is not in zoo: its compiler passes are zoo's own"):
        raise ProfileAborted("as a program of its own would")
