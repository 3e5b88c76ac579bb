"""How a difficulty grows with steps: pure functions, one value a step.

Names, keys and formulas are those that configurations have for curriculum learning (Li, Zhang, He 2022, "The
Stability-Efficiency Dilemma", section 4 and appendix A, for ``fixed_linear``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Schedule = Callable[[int], int]
"""The difficulty at a step; the first step is 1."""


@dataclass(frozen=True, kw_only=True)
class FixedRoot:
    """d(t) = (t / T)^(1/r) (M - m) + m, rounded down to a multiple of ``difficulty_step``, at least m and at most M.

    Departs from the usual formula in one point: where m is no multiple of ``difficulty_step``, no value falls below m.

    Args:
        min_difficulty, max_difficulty: m and M.
        total_curriculum_step: T, the step from which on the difficulty is M.
        difficulty_step: values are multiples of it, but for m and M. 8 suits lengths on GPUs with tensor cores.
        root_degree: r.
    """

    min_difficulty: int
    max_difficulty: int
    total_curriculum_step: int
    difficulty_step: int
    root_degree: int

    def __post_init__(self) -> None:
        for name in ("total_curriculum_step", "difficulty_step", "root_degree"):
            _at_least_one(name, getattr(self, name))

    def __call__(self, step: int) -> int:
        low, high = self.min_difficulty, self.max_difficulty
        if step >= self.total_curriculum_step:
            return high
        share: float = (step / self.total_curriculum_step) ** (1.0 / self.root_degree)
        value = math.floor(share * (high - low) + low)
        return min(high, max(low, value - value % self.difficulty_step))


class FixedLinear(FixedRoot):
    """:class:`FixedRoot` with r = 1."""

    def __init__(
        self, *, min_difficulty: int, max_difficulty: int, total_curriculum_step: int, difficulty_step: int
    ) -> None:
        super().__init__(
            min_difficulty=min_difficulty, max_difficulty=max_difficulty, root_degree=1,
            total_curriculum_step=total_curriculum_step, difficulty_step=difficulty_step,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FixedDiscrete:
    """d(t) = difficulty[i] with the first i for which t <= max_step[i]; the last difficulty after all of them.

    Args:
        min_difficulty, max_difficulty: between these lies every difficulty.
        difficulty: one value a phase.
        max_step: the last step of each phase but the last one.
    """

    min_difficulty: int
    max_difficulty: int
    difficulty: tuple[int, ...]
    max_step: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.difficulty or len(self.max_step) != len(self.difficulty) - 1:
            raise ValueError(
                f"schedule_config has {len(self.difficulty)} values of difficulty and {len(self.max_step)} of "
                "max_step; there is one max_step less than difficulties, because the last phase has no end."
            )
        if list(self.max_step) != sorted(set(self.max_step)):
            raise ValueError(f"schedule_config.max_step = {list(self.max_step)}; each step is later than the last.")
        wrong = [d for d in self.difficulty if not self.min_difficulty <= d <= self.max_difficulty]
        if wrong:
            raise ValueError(
                f"schedule_config.difficulty has {wrong[0]}; every value lies between min_difficulty "
                f"{self.min_difficulty} and max_difficulty {self.max_difficulty}."
            )

    def __call__(self, step: int) -> int:
        for value, last in zip(self.difficulty, self.max_step, strict=False):
            if step <= last:
                return value
        return self.difficulty[-1]


CUSTOM = "custom"
_KEYS: dict[str, dict[str, type]] = {
    "fixed_linear": {"total_curriculum_step": int, "difficulty_step": int},
    "fixed_root": {"total_curriculum_step": int, "difficulty_step": int, "root_degree": int},
    "fixed_discrete": {"difficulty": list, "max_step": list},
    CUSTOM: {},
}
_CLASSES: dict[str, Callable[..., Schedule]] = {
    "fixed_linear": FixedLinear, "fixed_root": FixedRoot, "fixed_discrete": FixedDiscrete,
}  # fmt: skip


def build_schedule(kind: str, options: Mapping[str, Any], *, low: int, high: int) -> Schedule | None:
    """The schedule that ``schedule_type`` and ``schedule_config`` describe; None for "custom", which a program sets.

    Raises:
        ValueError: what is wrong with them, in one sentence.
    """
    if not 1 <= low <= high:
        raise ValueError(
            f"min_difficulty = {low} and max_difficulty = {high}; both are at least 1, the first no larger."
        )
    if kind not in _KEYS:
        raise ValueError(f"schedule_type = {kind!r}; it is one of {', '.join(_KEYS)}.")
    known = _KEYS[kind]
    given = {key: _whole(key, value, known[key]) for key, value in options.items() if key in known}
    unknown, missing = sorted(set(options) - set(known)), sorted(set(known) - set(options))
    if unknown or missing:
        which = f"has the unknown key {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
        needed = ", ".join(known) or "no keys, because the program sets the schedule"
        raise ValueError(f"schedule_config {which}; with schedule_type {kind!r} it has {needed}.")
    if kind == CUSTOM:
        return None
    return _CLASSES[kind](min_difficulty=low, max_difficulty=high, **given)


def checked(value: Any, low: int, high: int, step: int) -> int:
    """What a custom schedule returned.

    Raises:
        ValueError: it is no whole number within the limits.
    """
    try:  # numpy's whole numbers too
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not low <= found <= high:
        raise ValueError(
            f"the custom schedule returned {value!r} for step {step}; it returns a whole number between min_difficulty "
            f"{low} and max_difficulty {high}."
        )
    return found


def _whole(key: str, value: Any, kind: type) -> Any:
    def number(item: Any) -> int:
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        if not is_number or not math.isfinite(item) or item != int(item):
            raise ValueError(f"schedule_config.{key} = {value!r}; it takes whole numbers.")
        return int(item)

    if kind is int:
        return number(value)
    if not isinstance(value, list | tuple):
        raise ValueError(f"schedule_config.{key} = {value!r}; it takes a list of whole numbers.")
    return tuple(number(item) for item in value)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"schedule_config.{name} = {value}; it is at least 1.")
