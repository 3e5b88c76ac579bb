"""Every call that a signature of DeepSpeed allows is allowed by ours, with the same defaults."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Container
from typing import Any

import pytest
from tests.deepspeed import signatures

from zoo.deepspeed import FINDER
from zoo.deepspeed.modules import Refused

PEER = json.loads(signatures.FILE.read_text())["names"]
_INIT = {
    "pin_memory": "None is what the configuration says, False without one",
    "tensor_overrides": "of DeepSpeed's own layers",
}
_OFFLOAD = {
    "pin_memory": "False is documented",
}
DIFFERS = {
    ("accelerator:get_accelerator().create_op_builder", "op_name"): "class_name, as DeepSpeed's of CUDA has it",
    ("accelerator:get_accelerator().create_op_builder", "class_name"): "op_name in DeepSpeed's of the CPU",
    ("runtime.engine:DeepSpeedEngine.compile", "backend"): "None is what the configuration or the accelerator says",
    ("runtime.utils:PartitionedTensor.from_meta", "device"): "None is that of the accelerator; theirs, of a CPU, is it",
    **{
        (f"{module}:Init", p): why
        for module in ("zero", "runtime.zero", "runtime.zero.partition_parameters", "runtime.zero.stage3")
        for p, why in _INIT.items()
    },
    **{
        (f"runtime.zero.{module}:DeepSpeedZeroOffload{what}Config", p): why
        for module in ("config", "offload_config")
        for what in ("Optimizer", "Param")
        for p, why in _OFFLOAD.items()
    },
    **{
        ("runtime.zero.config:DeepSpeedZeroConfig", p): why
        for p, why in {
            "cpu_offload_param": "of former times",
            "cpu_offload_use_pin_memory": "of former times",
            "cpu_offload": "of former times",
            "stage3_gather_fp16_weights_on_model_save": "of former times",
        }.items()
    },
}  # fmt: skip
"""(name, parameter) → why it is another one."""
_MADE = "initialize makes it"
_FUNCTION = ".apply alone is what programs use of an autograd function"
_FORMER = "keys of former times are taken, and put where they are now"
WHOLE = {
    ":DeepSpeedInferenceConfig": _FORMER,
    "inference.config:DeepSpeedInferenceConfig": _FORMER,
    ":DeepSpeedEngine": _MADE,
    ":dist": "None in theirs, until something has joined the ranks",
    "git_version_info:version": "it ends in +zoo",
    "checkpointing:CheckpointFunction": _FUNCTION,
    "runtime.activation_checkpointing.checkpointing:CheckpointFunction": _FUNCTION,
    "runtime.pipe.engine:DeepSpeedEngine": _MADE,
    "comm:ReduceOp": "torch's own",
    "ops.op_builder:FusedLambBuilder.NAME": "theirs, of a CPU, has none",
    "runtime.bf16_optimizer:BF16_Optimizer": _MADE,
    "runtime.config:DEEPSPEED_OPTIMIZERS": "without those of mup",
    "runtime.engine:BF16_Optimizer": _MADE,
    "runtime.engine:DeepSpeedEngine": _MADE,
    "runtime.engine:DeepSpeedZeRoOffload": _MADE,
    "runtime.engine:DeepSpeedZeroOptimizer": _MADE,
    "runtime.engine:FP16_Optimizer": _MADE,
    "runtime.engine:FP16_UnfusedOptimizer": _MADE,
    "runtime.fp16.fused_optimizer:FP16_Optimizer": _MADE,
    "runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer": _MADE,
    "runtime.sequence_parallel.ulysses_sp:SequenceTiledCompute": _FUNCTION,
    "runtime.sequence_parallel.ulysses_sp:TiledFusedLogitsLoss": _FUNCTION,
    "runtime.sequence_parallel.ulysses_sp:TiledMLP": _FUNCTION,
    "runtime.zero.linear:LinearFunctionForZeroStage3": _FUNCTION,
    "runtime.zero.stage3:DeepSpeedZeRoOffload": _MADE,
    "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": _MADE,
    "runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": _MADE,
    "accelerator.real_accelerator:SUPPORTED_ACCELERATOR_LIST": "what torch has under other names is not asked for",
}
"""Names that differ as a whole, and why."""


def wrong(
    name: str, theirs: list[list[Any]], ours: list[list[Any]], differs: Container[tuple[str, str]] = DIFFERS
) -> list[str]:
    """Calls that theirs takes and ours does not."""
    kinds = {kind for _, kind, _ in ours}
    by_name = {p[0]: p for p in ours}
    slots = [p for p in ours if p[1] in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    found = []
    for place, (parameter, kind, default) in enumerate(theirs):
        if (name, parameter) in differs:
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
    known = {p[0] for p in theirs} | {p[0] for p in ours if (name, p[0]) in differs}
    asked = {p[0] for p in ours if p[2] == "<none>" and not p[1].startswith("VAR")}
    return found + [f"{parameter} must be given" for parameter in sorted(asked - known)]


def departures(name: str, theirs: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """What differs of one name. Of an "attribute" only that it is there is known."""
    if "parameters" in theirs:
        return wrong(name, theirs["parameters"], mine["parameters"]) if "parameters" in mine else ["no signature"]
    same = theirs["value"] == "attribute" or theirs["value"] == mine.get("value")
    return [] if same else [f"{theirs['value']!r} is {mine.get('value')!r}"]


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return signatures.dump("zoo.deepspeed")


@pytest.mark.matrix
@pytest.mark.parametrize("module", sorted({name.partition(":")[0] for name in PEER}))
def test_what_deepspeed_takes_is_taken(module: str, ours: dict[str, Any]) -> None:
    told = [f"{name} {why}" for name in PEER if name.partition(":")[0] == module and (why := amiss(name, ours))]
    assert told == []


def amiss(name: str, ours: dict[str, Any]) -> str:
    """What is wrong with a name, or with what is written down about it."""
    dotted = name.replace(":", ".").strip(".")
    if isinstance(FINDER.entry(dotted), Refused):
        return ""  # what is refused takes every call
    theirs, mine = PEER[name], ours[name]
    if FINDER.why(dotted) is not None:
        return "" if mine is None else "is there now: it leaves surface/absent.py"
    if mine is None:
        return "is not there"
    if theirs is None:
        return ""
    found = departures(name, theirs, mine)
    if found and name not in WHOLE:
        return f"differs: {found}"
    return "" if found or name not in WHOLE else "is as theirs: it leaves the list"


def test_every_listed_departure_is_one(ours: dict[str, Any]) -> None:
    stale = [
        (name, parameter)
        for name, parameter in DIFFERS
        if not wrong(name, PEER[name]["parameters"], ours[name]["parameters"], DIFFERS.keys() - {(name, parameter)})
    ]
    assert stale == []


@pytest.mark.slow
def test_what_is_written_down_is_what_the_package_says() -> None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or "zoo" in str(spec.origin):
        pytest.skip("needs the package deepspeed")
    assert signatures.dump("deepspeed") == PEER
