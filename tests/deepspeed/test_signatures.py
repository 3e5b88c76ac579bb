"""Every call that a signature of DeepSpeed allows is allowed by ours, with the same defaults."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from tests.deepspeed import signatures

PEER = json.loads(signatures.FILE.read_text())["names"]
ABSENT = {
    ":init_inference": "inference",
    ":tp_model_init": "tensor parallelism by injection",
    "ops.adam:ZenFlowSelectiveAdamW": "ZenFlow",
    "ops.adam:ZenFlowSelectiveAdamW_stage3": "ZenFlow",
    "profiling.flops_profiler:FlopsProfiler": "profiling",
    "profiling.flops_profiler:get_model_profile": "profiling",
}
"""What zoo does not have, and what brings it."""
DIFFERS = {
    ("accelerator:get_accelerator().create_op_builder", "op_name"): "class_name, as DeepSpeed's of CUDA has it",
    ("accelerator:get_accelerator().create_op_builder", "class_name"): "op_name in DeepSpeed's of the CPU",
    ("pipe:PipelineModule", "dynamic_shape"): "the configuration says it: pipeline.dynamic_shapes",
    ("runtime.lr_schedules:WarmupLR", "warmup_max_lr"): "0.001 is documented; None is the optimizer's rate in both",
    ("zero:Init", "pin_memory"): "None is what the configuration says, False without one",
    ("zero:Init", "tensor_overrides"): "of DeepSpeed's own layers",
}
"""(name, parameter) → why it is another one."""


def wrong(name: str, theirs: list[list[Any]], ours: list[list[Any]]) -> list[str]:
    """Calls that theirs takes and ours does not."""
    kinds = {kind for _, kind, _ in ours}
    by_name = {p[0]: p for p in ours}
    slots = [p for p in ours if p[1] in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    found = []
    for place, (parameter, kind, default) in enumerate(theirs):
        if (name, parameter) in DIFFERS:
            continue
        if kind in ("VAR_POSITIONAL", "VAR_KEYWORD"):
            if kind not in kinds:
                found.append(f"{kind} {parameter}")
            continue
        mine = by_name.get(parameter)
        if mine is None:
            if "VAR_KEYWORD" not in kinds or (kind != "KEYWORD_ONLY" and "VAR_POSITIONAL" not in kinds):
                found.append(f"no {parameter}")
            continue
        if kind == "POSITIONAL_OR_KEYWORD" and (place >= len(slots) or slots[place][0] != parameter):
            found.append(f"{parameter} is in another place")
        if default not in ("<none>", mine[2]) and "<object>" not in (default, mine[2]):
            found.append(f"{parameter}={default!r} is {mine[2]!r}")
    known = {p[0] for p in theirs} | {parameter for one, parameter in DIFFERS if one == name}
    asked = {p[0] for p in ours if p[2] == "<none>" and not p[1].startswith("VAR")}
    return found + [f"{parameter} must be given" for parameter in sorted(asked - known)]


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return signatures.dump("zoo.deepspeed")


@pytest.mark.parametrize("name", sorted(PEER))
def test_what_deepspeed_takes_is_taken(name: str, ours: dict[str, Any]) -> None:
    if name in ABSENT:
        assert ours[name] is None, f"{name} is there now: it leaves the list"
        return
    theirs, mine = PEER[name], ours[name]
    assert mine is not None, f"{name} is not there"
    if theirs is None:
        return
    if "parameters" in theirs:
        assert wrong(name, theirs["parameters"], mine["parameters"]) == []
    else:
        assert theirs["value"] == mine["value"]


@pytest.mark.slow
def test_what_is_written_down_is_what_the_package_says() -> None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or "zoo" in str(spec.origin):
        pytest.skip("needs the package deepspeed")
    assert signatures.dump("deepspeed") == PEER
