"""Importing the engine: nothing happens, and little is read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOOK = """
import json, os, sys, threading, warnings
import torch
before = dict(os.environ), set(threading.enumerate()), list(warnings.filters), torch.get_rng_state(), set(sys.modules)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import zoo.engine
    name_alone = sorted(set(sys.modules) - before[4])
    from zoo.engine import initialize, Engine
print(json.dumps({
    "environment": before[0] == dict(os.environ), "threads": before[1] == set(threading.enumerate()),
    "filters": before[2] == list(warnings.filters), "random": bool(torch.equal(before[3], torch.get_rng_state())),
    "said": [str(w.message) for w in said], "modules": sorted(set(sys.modules) - before[4]),
    "name_alone": name_alone,
}))
"""


@pytest.fixture(scope="module")
def looked() -> dict[str, object]:
    run = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    found: dict[str, object] = json.loads(run.stdout)
    return found


@pytest.mark.dear
def test_importing_the_engine_has_no_side_effects(looked: dict[str, object]) -> None:
    found = dict(looked)
    modules = found.pop("modules")
    del found["name_alone"]
    assert found == {"environment": True, "threads": True, "filters": True, "random": True, "said": []}
    assert isinstance(modules, list)
    foreign = (
        "torch._dynamo",
        "torch._inductor",
        "yaml",
        "matplotlib",
        "rich",
        "typer",
        "tensorboard",
        "wandb",
        "zoo.train",
    )
    assert [name for name in modules if name.startswith(foreign)] == []


def test_the_name_alone_imports_nothing(looked: dict[str, object]) -> None:
    modules = looked["name_alone"]
    assert isinstance(modules, list)
    assert [name for name in modules if name.startswith("zoo.")] == ["zoo.engine"]


def test_names_that_are_not_there() -> None:
    import zoo.engine

    with pytest.raises(AttributeError, match=r"zoo.engine.* initialise"):
        _ = zoo.engine.initialise  # type: ignore[attr-defined]
    assert set(zoo.engine.__all__) <= set(dir(zoo.engine))
