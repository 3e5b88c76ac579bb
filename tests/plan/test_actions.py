"""Actions as data: they compare, print and count; the example of the page."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from zoo.plan import Action, Actions, Collective, Kind, Moment

GATHER = Collective(op="all_gather", size=2, num_bytes=64)


def on(kind: Kind, bucket: int, **options: object) -> Action:
    return Action(kind=kind, bucket=bucket, num_bytes=64, label=f"'unit {bucket}'", **options)  # type: ignore[arg-type]


def test_equal_lists_of_two_ranks_compare_equal() -> None:
    first, second = (Actions([on(Kind.UNSHARD, 0, collectives=(GATHER,)), on(Kind.RESHARD, 0)]) for _ in range(2))
    assert first == second
    assert first != Actions(reversed(second))
    with pytest.raises(AttributeError):
        first[0].bucket = 3  # type: ignore[misc]


def test_starts_collectives_and_bytes() -> None:
    alone = Collective(op="all_gather", size=1, num_bytes=64)
    actions = Actions(
        [
            on(Kind.UNSHARD, 0, collectives=(GATHER,)), on(Kind.WAIT, 0, of=Kind.UNSHARD),
            on(Kind.PREFETCH, 1, collectives=(alone,)), on(Kind.RESHARD, 0), on(Kind.RESHARD, 0), on(Kind.RESHARD, 1),
            Action(kind=Kind.VOTE),
        ]
    )  # fmt: skip
    assert [a.kind for a in actions.starts()] == [Kind.UNSHARD, Kind.PREFETCH, Kind.VOTE]
    assert actions.collectives() == [GATHER]
    assert actions.whole_bytes() == [64, 64, 128, 64, 64, 0, 0]
    assert [a.bucket for a in actions.of_kind(Kind.PREFETCH)] == [1]


def test_what_is_printed() -> None:
    assert str(Actions()) == "no actions"
    action = on(Kind.UNSHARD, 3, moment=Moment.BACKWARD, context="micro-batch 0", unit="a", collectives=(GATHER,))
    assert str(action) == "backward of micro-batch 0  a  unshard  3: 'unit 3'  all_gather of 64 bytes over 2"
    wait = on(Kind.WAIT, 3, of=Kind.UNSHARD)
    assert str(wait) == "outside  wait unshard  3: 'unit 3'"
    lines = str(Actions([action, wait])).splitlines()
    assert [line.index("3: 'unit") for line in lines[1:]] == [lines[0].index("bucket")] * 2


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "python/zoo/plan/README.md").read_text(encoding="utf-8")
    code, printed = page.split("```python\n")[1].split("```\n\n```\n")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code, {})
    assert shown.getvalue() == printed.split("```")[0]
