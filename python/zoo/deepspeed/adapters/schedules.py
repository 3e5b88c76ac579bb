"""``deepspeed.runtime.lr_schedules``: the schedules of ``zoo.lr_schedules``, and the names of their options."""

from __future__ import annotations

from typing import Any

from zoo.lr_schedules import LRRangeTest, OneCycle, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"

_OPTIONS = (
    "lr_range_test_min_lr", "lr_range_test_step_rate", "lr_range_test_step_size", "lr_range_test_staircase",
    "edge_value", "mid_value", "cycle_first_stair_count", "cycle_first_step_size", "cycle_second_stair_count",
    "cycle_second_step_size", "decay_step_size", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_min_mom",
    "cycle_max_mom", "decay_mom_rate", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type",
    "warmup_min_ratio", "cos_min_ratio", "total_num_steps",
)  # fmt: skip
globals().update({name.upper(): name for name in _OPTIONS})

_CLASSES: dict[str, type[Schedule]] = {
    LR_RANGE_TEST: LRRangeTest, ONE_CYCLE: OneCycle, WARMUP_LR: WarmupLR, WARMUP_DECAY_LR: WarmupDecayLR,
    WARMUP_COSINE_LR: WarmupCosineLR,
}  # fmt: skip


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """(section ``scheduler``, None), or (None, what is wrong), of an object with ``lr_schedule`` and options."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} is not given; allowed are {', '.join(VALID_LR_SCHEDULES)}"
    if name not in VALID_LR_SCHEDULES:
        return None, f"--{LR_SCHEDULE} {name!r} is no schedule; allowed are {', '.join(VALID_LR_SCHEDULES)}"
    names = _CLASSES[name].Config.__dataclass_fields__
    params = {key: getattr(args, key) for key in names if getattr(args, key, None) is not None}
    return {"type": name, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """(the highest rate of a section ``scheduler``, ""), or (None, what is wrong)."""
    name, params = config.get("type"), config.get("params")
    if name is None or params is None:
        return None, f"the schedule has no {'type' if name is None else 'params'}"
    if name == WARMUP_COSINE_LR:
        return None, f"{name} scales the rate of the optimizer, and has none of its own"
    where = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name!r} is no schedule; allowed are {', '.join(VALID_LR_SCHEDULES)}"
    return params[where.get(name, "warmup_max_lr")], ""
