"""The page in a browser: drawn at two widths in both schemes; nothing is on the console or asked of a network."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from zoo.report import write_report

from .chromium import PACKAGE, Page, browser, program
from .runs import evil_run, whole_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program() is None, reason=f"there is no browser: apt-get install {PACKAGE}"),
]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as found:
        yield found


def pixels(png: bytes) -> tuple[int, int, dict[tuple[int, ...], int]]:
    """Width, height, and how often there is which colour."""
    found = np.rint(imread(io.BytesIO(png))[..., :3] * 255).astype(np.int64)
    codes, counts = np.unique(found @ [1 << 16, 1 << 8, 1], return_counts=True)
    colours = {(c >> 16, c >> 8 & 255, c & 255): n for c, n in zip(codes.tolist(), counts.tolist(), strict=True)}
    return found.shape[1], found.shape[0], colours


BACK = {False: (246, 247, 249), True: (17, 22, 29)}
CURVE = {False: (31, 95, 174), True: (125, 179, 242)}
TEXTS = """
(() => {
  const seen = (node) => node.getClientRects().length > 0;
  const bad = [];
  for (const svg of document.querySelectorAll(".plot svg")) {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter(seen).map((t) => [t.textContent, t.getBoundingClientRect()]);
    for (const [words, a] of texts)
      if (a.left < box.left - 1 || a.right > box.right + 1 || a.bottom > box.bottom + 1) bad.push(`outside: ${words}`);
    for (const [i, [words, a]] of texts.entries()) for (const [others, b] of texts.slice(i + 1)) {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) bad.push(`over each other: ${words} and ${others}`);
    }
  }
  return bad;
})()
"""
CONTRAST = """
(() => {
  const light = (name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255);
    probe.remove();
    const [r, g, b] = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const between = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const found = {};
  for (const name of ["blue", "orange", "green", "purple", "teal", "red", "grey"]) found[name] = between(name, "card");
  for (const name of ["ink", "soft"]) found[name] = between(name, "card");
  return found;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_is_drawn_at_two_widths_in_both_schemes(page: Page, tmp_path: Path, width: int, dark: bool) -> None:
    path = write_report(whole_run(tmp_path / "run"))
    page.said.clear()
    page.requests.clear()
    page.open(path.as_uri(), width=width, dark=dark)
    assert page.value("document.querySelectorAll('.plot svg').length") == 10
    assert page.value("document.documentElement.scrollWidth") == width, "nothing to scroll sideways"
    assert page.value(TEXTS) == []
    wide, high, colours = pixels(page.picture())
    assert wide == width
    assert high > 2000
    assert colours[BACK[dark]] > 0.1 * wide * high
    assert colours[CURVE[dark]] > 300
    assert not colours.keys() & {BACK[not dark]}
    assert page.said == []
    assert page.requests == [path.as_uri()]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_can_be_told_from_what_is_behind_them(page: Page, tmp_path: Path, dark: bool) -> None:
    # WCAG 2.2, 1.4.3 and 1.4.11: 4.5 for text, 3 for pictures.
    page.open(write_report(whole_run(tmp_path / "run")).as_uri(), width=1400, dark=dark)
    found = page.value(CONTRAST)
    assert {name: ratio for name, ratio in found.items() if ratio < (4.5 if name in ("ink", "soft") else 3)} == {}


def test_values_are_read_by_pointer_and_keys(page: Page, tmp_path: Path) -> None:
    page.open(write_report(whole_run(tmp_path / "run")).as_uri(), width=1400, dark=False)
    read = "document.querySelector('figure[data-chart=loss] .read').textContent"
    assert page.value(read).startswith("step 40, 4 s after the start: training 1.3")
    page.value("document.querySelector('figure[data-chart=loss] .plot').focus()")
    for key in ("Home", "ArrowRight"):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert page.value(read).startswith("step 2, ")
    box = page.value(
        "(() => { const b = document.querySelector('figure[data-chart=loss] .plot').getBoundingClientRect();"
        " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    assert page.value(read).startswith(("step 20, ", "step 21, "))
    page.value("document.querySelector('figure[data-chart=loss] button').click()")
    assert page.value("document.querySelector('figure[data-chart=loss]').dataset.log") == "1"
    page.value("document.querySelector('[data-act=in]').click()")
    assert page.value("[...document.querySelectorAll('#keys tbody tr')].filter((r) => r.offsetHeight).length") == 1
    page.value("document.querySelector('[data-act=defaults]').click()")
    assert page.value("[...document.querySelectorAll('#keys tbody tr')].filter((r) => r.offsetHeight).length") == 2
    assert page.said == []


def test_what_files_say_does_not_run(page: Page, tmp_path: Path) -> None:
    page.said.clear()
    page.requests.clear()
    path = write_report(evil_run(tmp_path))
    page.open(path.as_uri(), width=1400, dark=False)
    assert page.value("document.scripts.length") == 2
    assert page.value("document.querySelectorAll('.plot svg').length") > 8
    assert page.said == []
    assert len(page.requests) == 1


def test_many_steps_are_few_elements(page: Page, tmp_path: Path) -> None:
    # How long it takes depends on this alone: a page of a million steps has as many points.
    path = write_report(whole_run(tmp_path / "run", steps=100_000))
    assert path.stat().st_size < 500_000
    page.open(path.as_uri(), width=1400, dark=False)
    assert page.value("document.querySelectorAll('*').length") < 5_000
    assert page.said == []
