"""The engine is verbs over collaborators that can be read alone."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo.engine
from zoo.engine import Engine, initialize
from zoo.engine.checkpoint.checkpoints import Checkpoints
from zoo.engine.pipeline import PipelineEngine
from zoo.engine.records import Records

FOLDER = Path(zoo.engine.__file__).parent
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
FORWARDED = {
    Checkpoints: (
        "save_checkpoint", "wait_for_checkpoint", "load_checkpoint", "save_16bit_model", "module_state_dict",
        "load_module_state_dict", "register_state",
    ),
    Records: ("report", "request_stop"),
}  # fmt: skip


def written(kind: type) -> set[str]:
    """What a class and those of zoo.engine that it is made of have in their bodies to be called or read."""
    bodies = [vars(base) for base in kind.__mro__ if base.__module__.startswith("zoo.engine")]
    return {
        name for body in bodies for name, item in body.items() if callable(item) or inspect.isdatadescriptor(item)
    } - {"__dict__", "__weakref__"}


def test_an_engine_has_at_most_forty_methods() -> None:
    assert len(written(Engine)) <= 40, sorted(written(Engine))
    assert len(written(PipelineEngine) - written(Engine)) <= 14


def imports(file: Path) -> set[str]:
    """The modules of zoo.engine that a file imports, somewhere in it or for type checkers alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zoo.engine"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def test_no_file_waits_for_one_that_waits_for_it() -> None:
    files = {
        ".".join(("zoo", "engine", *path.relative_to(FOLDER).with_suffix("").parts)): path
        for path in FOLDER.rglob("*.py")
        if path.name != "__init__.py"
    }
    waits = {name: imports(path) & files.keys() for name, path in files.items()}
    while free := {name for name, others in waits.items() if not others}:
        waits = {name: others - free for name, others in waits.items() if name not in free}
    assert waits == {}


def test_no_file_is_long_and_none_takes_a_part_for_the_whole() -> None:
    for path in FOLDER.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 500, path
        assert 'cast("' not in text, path


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FORWARDED.items() for name in names])
def test_what_a_collaborator_does_is_a_method_of_the_engine(kind: type, name: str) -> None:
    own, there = getattr(Engine, name), getattr(kind, name)
    assert inspect.isfunction(own)
    assert own.__doc__ == there.__doc__
    assert inspect.signature(own) == inspect.signature(there)


class Told:
    """In the place of the engine's own checkpoints."""

    not_loaded = ""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "there"

    def need_weights(self, what: str) -> None: ...

    def close(self) -> None:
        self.calls.append("closed")


def test_another_object_may_take_the_place_of_a_collaborator() -> None:
    engine, *_ = initialize(CONFIG, nn.Linear(2, 1))
    told: Any = Told()
    engine.checkpoints = told
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.save_checkpoint("folder", tag="t") == "there"
    engine.destroy()
    assert told.calls == [(("folder",), {"tag": "t"}), "closed"]
