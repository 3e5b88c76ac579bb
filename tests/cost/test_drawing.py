"""A timeline as SVG: every span has its bar where it belongs, and what cannot be drawn is refused."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.cost.drawing import LEFT, WIDTH, draw, svg
from zoo.cost.events import Compute, Program, Start, Timeline, Wait, simulate_events

NAMESPACE = "{http://www.w3.org/2000/svg}"


def timeline(seconds: list[float], message_s: float) -> Timeline:
    """Two ranks that compute, send, and wait."""
    programs: list[Program] = []
    for rank in range(2):
        program: list[Compute | Start | Wait] = []
        for number, one in enumerate(seconds):
            program += [
                Start(number, (0, 1), "link", "all_gather", 8.0, "unshard"),
                Compute(one * (rank + 1), f"layer <{number}>"),
                Wait((number,)),
            ]
        programs.append(program)
    return simulate_events(programs, lambda start: message_s)


def bars(picture: str) -> list[tuple[str, float, float]]:
    """(what is said of it, left, width) of each bar."""
    root = ElementTree.fromstring(picture)
    found = []
    for box in root.iter(f"{NAMESPACE}rect"):
        said = box.find(f"{NAMESPACE}title")
        if said is not None:
            found.append((str(said.text), float(box.attrib["x"]), float(box.attrib["width"])))
    return found


@given(seconds=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), message_s=st.floats(0.01, 1.0))
def test_each_span_has_a_bar_at_its_time(seconds: list[float], message_s: float) -> None:
    found = timeline(seconds, message_s)
    scale = (WIDTH - LEFT - 20) / found.makespan_s
    spans = [span for span in found.spans if span.end_s > span.start_s]
    drawn = bars(svg(found, title="a & b"))
    assert len(drawn) == len(spans)
    for span, (said, x, width) in zip(spans, drawn, strict=True):
        assert said.startswith(span.name or span.stream)
        assert x == pytest.approx(LEFT + span.start_s * scale, abs=0.06)
        assert width == pytest.approx(max((span.end_s - span.start_s) * scale, 0.6), abs=0.06)


def test_the_critical_path_has_frames() -> None:
    found = timeline([1.0, 2.0], 0.5)
    plain, critical = svg(found), svg(found, critical=True)
    frames = len(re.findall('stroke-width="2.5"', critical))
    assert frames == len([span for span in found.critical_path() if span.end_s > span.start_s]) > 0
    assert 'stroke-width="2.5"' not in plain


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    found = timeline([1.0], 1.0)
    with pytest.raises(ValueError, match=r"give a name that ends in \.svg"):
        draw(found, tmp_path / "step.png")
    with pytest.raises(ValueError, match="nothing takes time"):
        svg(simulate_events([[]], lambda start: 0.0))
    draw(found, tmp_path / "step.svg")
    ElementTree.parse(tmp_path / "step.svg")
