"""A bound on the time of a whole run that cuts off politely, and a page that says what ran.

``ZOO_TEST_MINUTES=30``: no test begins later than 30 minutes after the run did; those not reached are reported as
skipped, "not run", and listed at the end. A failure before that fails the run as always. The order is drawn by
the week of the checked out commit: it passes or fails and not a throw of the dice, a mend is tried by the tests that
failed, and another week has other tests cut off. ``ZOO_TEST_ORDER=2`` draws another order, and a campaign another one
each time.

``ZOO_TEST_PAGE=page.md`` writes what ran, how many, what tests have counted (``record_property``), and the failures. Of
tests that are one draw each, ``record_property("drawn", (kind, when, seconds))`` makes a table of all: how many of each
kind, at each time, and the longest.
"""

from __future__ import annotations

import datetime
import os
import platform
import random
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import matrices
from tests.profiles import profile

STARTED = "ZOO_TEST_STARTED"
NOT_RUN = "not run: the time of this run"
SEED = "ZOO_TEST_ORDER"


def bound_s() -> float:
    """Seconds that tests may begin in; infinity without a bound."""
    return 60 * float(os.environ["ZOO_TEST_MINUTES"]) if "ZOO_TEST_MINUTES" in os.environ else float("inf")


def pytest_configure(config: pytest.Config) -> None:
    # Workers inherit both: they count from the same moment and must collect in the same order.
    os.environ.setdefault(STARTED, str(time.time()))
    week = zlib.crc32(matrices.told_by_git("log", "-1", "--format=%ad", "--date=format:%G-%V").encode())
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(2**32) if profile() == "campaign" else week))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if bound_s() < float("inf"):
        random.Random(int(os.environ[SEED])).shuffle(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() - float(os.environ[STARTED]) > bound_s():
        pytest.skip(f"{NOT_RUN} ({os.environ['ZOO_TEST_MINUTES']} minutes) was over")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    skipped = [r for r in stats.get("skipped", []) if NOT_RUN in str(r.longrepr)]
    if skipped:
        terminalreporter.section(f"{len(skipped)} tests were not run")
        for report in skipped:
            terminalreporter.line(report.nodeid)
    if "ZOO_TEST_PAGE" in os.environ:
        failed = [r.nodeid for kind in ("failed", "error") for r in stats.get(kind, [])]
        passed = stats.get("passed", [])
        properties = {r.nodeid: [(k, v) for k, v in r.user_properties if k != "drawn"] for r in passed}
        counted = [f"{name}: {', '.join(f'{k} {v}' for k, v in found)}" for name, found in properties.items() if found]
        drawn = [value for r in passed for key, value in r.user_properties if key == "drawn"]
        write_page(
            Path(os.environ["ZOO_TEST_PAGE"]), len(passed), failed, [r.nodeid for r in skipped], sorted(counted),
            table_of(drawn),
        )  # fmt: skip


def write_page(
    path: Path, num_passed: int, failed: list[str], not_run: list[str], counted: Sequence[str] = (),
    table: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the page of a campaign; what stands under "## Remarks" stays."""
    from hypothesis import settings

    remarks = "\n(what was looked for, and what became of the failures)\n"
    if path.exists():
        remarks = path.read_text(encoding="utf-8").partition("## Remarks\n")[2] or remarks
    minutes = (time.time() - float(os.environ[STARTED])) / 60
    lines = [
        f"# Campaign of {datetime.date.today().isoformat()}", "",
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores; profile "
        f"`{os.environ.get('ZOO_TEST_PROFILE', 'quick')}`, {settings.default.max_examples} examples of a property "
        f"(times its own factor); {minutes:.0f} minutes.", "",
        "| passed | failed | not run |", "|---|---|---|", f"| {num_passed} | {len(failed)} | {len(not_run)} |", "",
        *(["## Counted", "", *_listed(counted), ""] if counted else []),
        *(["## Drawn", "", *table, ""] if table else []),
        "## Failures", "", *_listed(failed), "",
        "## Not run", "", *_listed(not_run), "",
        "## Remarks",
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n" + remarks, encoding="utf-8")


def table_of(drawn: Sequence[tuple[str, str, float]]) -> list[str]:
    """Lines of a table: how many draws that passed are of each kind (row) and time (column), and the most seconds."""
    if not drawn:
        return []
    columns = sorted({when for _, when, _ in drawn})
    lines = ["| | " + " | ".join([*columns, "most seconds"]) + " |", "|---" * (len(columns) + 2) + "|"]
    for kind in sorted({kind for kind, *_ in drawn}):
        mine = [(when, seconds) for name, when, seconds in drawn if name == kind]
        counts = [str(sum(when == column for when, _ in mine)) for column in columns]
        lines.append(f"| {kind} | " + " | ".join([*counts, f"{max(seconds for _, seconds in mine):.1f}"]) + " |")
    most = max(seconds for *_, seconds in drawn)
    return [*lines, "", f"{len(drawn)} in all; the longest took {most:.1f} s."]


def _listed(names: Sequence[str]) -> list[str]:
    return [f"- `{name}`" for name in names] or ["none"]
