"""CPU seconds of every test, its processes included: on shared machines wall time says little about the code.

``ZOO_TEST_CPU=20 make test-python`` prints the twenty files and the twenty tests that took most.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "cpu_s"
elsewhere = [0.0]
"""CPU seconds of processes that are no children of this one: the fork server adds those that it waited for."""


def used() -> float:
    """CPU seconds of this process, of its children that have ended, and of those elsewhere."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system + elsewhere[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = used()
    item.user_properties.append((PROPERTY, lambda: used() - began))  # a report has no later moment to be told at
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[Any]:
    report = yield
    measured = {k: v for k, v in item.user_properties if k == PROPERTY and callable(v)}
    kept = [(k, v) for k, v in report.user_properties if k != PROPERTY]
    report.user_properties = [*kept, *((k, v()) for k, v in measured.items() if report.when == "teardown")]
    return report


class Seconds:
    """Writes the wall seconds of every test to ``ZOO_TEST_SECONDS``; registered where that is set."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            Path(os.environ["ZOO_TEST_SECONDS"]).write_text(json.dumps(self.seconds), encoding="utf-8")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    count = int(os.environ.get("ZOO_TEST_CPU", "0"))
    files: dict[str, float] = defaultdict(float)
    tests: dict[str, float] = defaultdict(float)
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        for name, value in getattr(report, "user_properties", ()):
            if name == PROPERTY:
                files[report.nodeid.partition("::")[0]] += value
                tests[report.nodeid] += value
    for title, table in (("files", files), ("tests", tests)):
        terminalreporter.section(f"CPU seconds: {sum(table.values()):.0f}, most by {title}")
        for name, value in sorted(table.items(), key=lambda row: -row[1])[:count]:
            terminalreporter.line(f"{value:8.1f} {name}")
