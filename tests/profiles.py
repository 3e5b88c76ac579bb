"""How many examples a property gets, decided in one place.

``ZOO_TEST_PROFILE`` chooses: ``quick`` (`make test`) and ``deep`` (`make test-slow`), with the same examples each time,
so that a commit passes or fails and not a throw of the dice; ``campaign`` (`make campaign`), with others each time.
A property takes the profile's number by default; one whose examples cost next to nothing asks for a multiple.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, example, settings

T = TypeVar("T", bound=Callable[..., object])

EXAMPLES = {"quick": 3, "deep": 250, "campaign": 1000}


def profile() -> str:
    """The name of the chosen profile."""
    return os.environ.get("ZOO_TEST_PROFILE", "quick")


def load() -> None:
    """Make the chosen profile the default of all properties.

    Raises:
        ValueError: there is no such profile.
    """
    name = profile()
    if name not in EXAMPLES:
        raise ValueError(f"ZOO_TEST_PROFILE={name}; it is one of {', '.join(EXAMPLES)}")
    # Machines are shared: how long an example takes says nothing about the code.
    settings.register_profile(
        "zoo",
        max_examples=EXAMPLES[name],
        derandomize=name != "campaign",
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    settings.load_profile("zoo")


def examples(*, times: float, quick: float | None = None) -> Callable[[T], T]:
    """A property of cheap examples takes ``times`` as many as others; ``quick`` times under ``make test``."""
    times = quick if quick is not None and profile() == "quick" else times
    return settings(max_examples=max(1, round(settings.default.max_examples * times)))


def deep_example(**values: object) -> Callable[[T], T]:
    """An ``example`` that ``make test`` leaves to the other profiles: another that it has takes the same paths."""
    return (lambda test: test) if profile() == "quick" else example(**values)
