"""``deepspeed.runtime.lr_schedules``: the schedules of ``zoo.lr_schedules``, and the names of their options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zoo import registry
from zoo.config import ConfigError
from zoo.deepspeed.adapters.configuration.plain_values import options_as_meant
from zoo.lr_schedules import LRRangeTest, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR
from zoo.lr_schedules import OneCycle as _OneCycle
from zoo.registry.building import check_keywords

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
    LR_RANGE_TEST: LRRangeTest, WARMUP_LR: WarmupLR, WARMUP_DECAY_LR: WarmupDecayLR, WARMUP_COSINE_LR: WarmupCosineLR,
}  # fmt: skip


class OneCycle(_OneCycle):
    """As :class:`zoo.lr_schedules.OneCycle`; where it cycles momentum, the second of ``betas`` becomes 0.99, and groups
    without ``betas`` keep their momentum."""

    def __init__(
        self, optimizer: Any, cycle_min_lr: Any, cycle_max_lr: Any, decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None, cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None, decay_step_size: int = 0, cycle_momentum: bool = True,
        cycle_min_mom: Any = 0.8, cycle_max_mom: Any = 0.9, decay_mom_rate: float = 0.0, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        config = self.Config(
            cycle_min_lr, cycle_max_lr, decay_lr_rate, cycle_first_step_size, cycle_second_step_size,
            cycle_first_stair_count, cycle_second_stair_count, decay_step_size, cycle_momentum, cycle_min_mom,
            cycle_max_mom, decay_mom_rate,
        )  # fmt: skip
        self._begin(optimizer, config, last_batch_iteration)

    @staticmethod
    def _has_momentum(group: dict[str, Any]) -> bool:
        return "betas" in group

    def values(self, step: int, group: int) -> dict[str, Any]:
        """Rate; and (momentum, 0.99) where the group has ``betas``."""
        found = super().values(step, group)
        if "betas" in found:
            found["betas"] = (found["betas"][0], 0.99)
        return found

    @property
    def total_size(self) -> float:
        """Steps of a cycle."""
        first, second = self.config.cycle_first_step_size, self.config.cycle_second_step_size
        return float(first + (first if second is None else second))

    @property
    def step_ratio(self) -> float:
        """The part of a cycle in which the rate rises."""
        return self.config.cycle_first_step_size / self.total_size

    def get_mom(self) -> list[Any] | None:
        """For each group (momentum, 0.99) by the formula; None without ``cycle_momentum``."""
        found = super().get_mom()
        return None if found is None else [(m[0], 0.99) if isinstance(m, tuple) else m for m in found]


_CLASSES[ONE_CYCLE] = OneCycle


def schedule_of(document: dict[str, Any]) -> Callable[[Any], Any] | None:
    """Takes the section ``scheduler`` out of a document where it names OneCycle or a class of
    ``torch.optim.lr_scheduler``: a callable optimizer → schedule.

    Raises:
        ConfigError: options that it does not have, or values that they cannot have.
    """
    section = document.get("scheduler")
    name = section.get("type") if isinstance(section, dict) else None
    made = OneCycle if name == ONE_CYCLE else _of_torch(name)
    if made is None:
        return None
    given = document.pop("scheduler").get("params") or {}
    params = _of_cycle(dict(given)) if made is OneCycle else options_as_meant(made, given)
    _check(str(name), check_keywords(made, params, ("self", "optimizer")))

    def make(optimizer: Any) -> Any:
        try:
            return made(optimizer, **params)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"scheduler.params of {name}: {error}") from error

    return make


def _of_cycle(params: dict[str, Any]) -> dict[str, Any]:
    """Options of OneCycle, as zoo's own takes them."""
    own = {key: value for key, value in params.items() if key != "last_batch_iteration"}
    made, problems = registry.DEFAULT.parse(LR_SCHEDULE, ONE_CYCLE, own)
    _check(ONE_CYCLE, problems)
    return options_as_meant(OneCycle, params) | {key: getattr(made, key) for key in own}


def _check(name: str, problems: Sequence[tuple[str, str]]) -> None:
    if problems:
        raise ConfigError([f"scheduler.params{'.' * bool(key)}{key} of {name}: {text}" for key, text in problems])


def _of_torch(name: Any) -> Any:
    if not isinstance(name, str) or name in VALID_LR_SCHEDULES or name.startswith("_"):
        return None
    found = getattr(torch.optim.lr_scheduler, name, None)
    return found if isinstance(found, type) and issubclass(found, torch.optim.lr_scheduler.LRScheduler) else None


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer itself, or the one that it wraps.

    Raises:
        TypeError: it is neither.
    """
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer, and wraps none")


def add_tuning_arguments(parser: Any) -> Any:
    """``--lr_schedule`` and an option for each option of the schedules; gives the parser back."""
    group = parser.add_argument_group("Convergence Tuning", "options of learning-rate schedules")
    group.add_argument(f"--{LR_SCHEDULE}", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    added: set[str] = set()
    for name, schedule in _CLASSES.items():
        for field in dataclasses.fields(schedule.Config):
            default = None if field.default is dataclasses.MISSING else field.default
            if field.name not in added and field.name not in ("cos_min_ratio", "warmup_min_ratio", "total_num_steps"):
                value = _TUNING.get(field.name, default)
                group.add_argument(f"--{field.name}", type=_kind(value), default=value, help=f"of {name}")
                added.add(field.name)
    return parser


_TUNING = {
    "lr_range_test_min_lr": 0.001, "lr_range_test_step_rate": 1.0, "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False, "cycle_first_step_size": 1000, "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1, "cycle_second_stair_count": -1, "decay_step_size": 1000, "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1, "decay_lr_rate": 0.0, "cycle_momentum": False, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0, "warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log",
}  # fmt: skip


def _kind(value: Any) -> Callable[[str], Any]:
    if isinstance(value, bool):
        return _flag
    return type(value) if isinstance(value, (int, str)) else float


def _flag(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes")


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
    key = where.get(name, "warmup_max_lr")
    if params.get(key) is None:
        return None, f"{name} has no {key}: the rate is the optimizer's own"
    return params[key], ""


def first_required(step: Callable[..., Any]) -> str | None:
    """The name of the one argument without which ``step`` cannot be called; None where it can, or wants more."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # a function of C that does not say
        return None
    wanted = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)
    ]
    return wanted[0] if len(wanted) == 1 else None
