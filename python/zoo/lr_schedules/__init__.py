"""Learning-rate schedules, one a file: a closed form from the number of the step to the learning rate.

Every schedule is a component of the kind "lr_schedule": a small ``Config`` with the field's parameter names, and a
class built as ``Schedule(optimizer, option=...)``, or by its name.
"""

from __future__ import annotations

from zoo.lr_schedules.one_cycle import OneCycle
from zoo.lr_schedules.range_test import LRRangeTest
from zoo.lr_schedules.schedule import HasParamGroups, Schedule
from zoo.lr_schedules.warmup import WarmupLR
from zoo.lr_schedules.warmup_cosine import WarmupCosineLR
from zoo.lr_schedules.warmup_decay import WarmupDecayLR

__all__ = ["HasParamGroups", "LRRangeTest", "OneCycle", "Schedule", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
