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
    {code}
print(json.dumps({{
    "environment": before[0] == dict(os.environ), "threads": before[1] == set(threading.enumerate()),
    "filters": before[2] == list(warnings.filters), "random": bool(torch.equal(before[3], torch.get_rng_state())),
    "said": [str(w.message) for w in said], "modules": sorted(set(sys.modules) - before[4]),
}}))
"""


def looked(code: str) -> dict[str, object]:
    run = subprocess.run([sys.executable, "-c", LOOK.format(code=code)], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    found: dict[str, object] = json.loads(run.stdout)
    return found


def test_importing_the_engine_has_no_side_effects() -> None:
    found = looked("import zoo.engine; from zoo.engine import initialize, Engine")
    modules = found.pop("modules")
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


def test_the_name_alone_imports_nothing() -> None:
    modules = looked("import zoo.engine")["modules"]
    assert isinstance(modules, list)
    assert [name for name in modules if name.startswith("zoo.")] == ["zoo.engine"]


def test_names_that_are_not_there() -> None:
    import zoo.engine

    with pytest.raises(AttributeError, match=r"zoo.engine.* initialise"):
        _ = zoo.engine.initialise  # type: ignore[attr-defined]
    assert set(zoo.engine.__all__) <= set(dir(zoo.engine))
