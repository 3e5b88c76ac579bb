"""Pictures, and the commands that print and draw."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from zoo.cli import app
from zoo.cost.stages import StageCosts
from zoo.pipe import build
from zoo.pipe.plot import check_measured, draw
from zoo.pipe.schedules import from_csv
from zoo.pipe.simulate import simulate, write_spans

FOUND = simulate(build("zb_v", 2, 3))


def zoo(*args: object) -> Result:
    return CliRunner().invoke(app, ["pipe", *map(str, args)])


def bars(path: Path) -> int:
    """Filled shapes with a white edge in an SVG file."""
    tree = ElementTree.parse(path)
    return sum("stroke: #ffffff" in shape.get("style", "") for shape in tree.iter("{http://www.w3.org/2000/svg}path"))


@pytest.mark.dear
@pytest.mark.long
def test_a_picture_has_a_bar_for_each_computation_predicted_and_measured(tmp_path: Path) -> None:
    num_computations = len(FOUND.spans)
    draw(FOUND, tmp_path / "one.svg")
    assert bars(tmp_path / "one.svg") == num_computations
    # A clock that begins elsewhere.
    measured = [replace(s, start_s=s.start_s + 1e6, end_s=s.end_s + 1e6) for s in FOUND.spans]
    document = tmp_path / "measured.json"
    document.write_text(json.dumps(write_spans(measured)))
    result = zoo(
        "plot",
        "--schedule",
        "zb_v",
        "--ranks",
        2,
        "--micro-batches",
        3,
        "--measured",
        document,
        "-o",
        tmp_path / "two.svg",
    )
    assert result.exit_code == 0, result.output
    assert bars(tmp_path / "two.svg") == 2 * num_computations
    draw(FOUND, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def size(path: Path) -> tuple[float, float]:
    """Width and height of an SVG file, in points."""
    root = ElementTree.parse(path).getroot()
    width, height = (float(root.get(name, "").removesuffix("pt")) for name in ("width", "height"))
    return width, height


def test_what_takes_a_thousandth_as_long_is_seen_too(tmp_path: Path) -> None:
    costs = StageCosts(forward_s=0.001, input_s=0.001, weight_s=0.001)
    measured = simulate(FOUND.table, costs).spans
    draw(FOUND, tmp_path / "other_scale.svg", measured=measured)
    assert bars(tmp_path / "other_scale.svg") == 2 * len(FOUND.spans)
    uneven = simulate(build("1f1b", 2, 8), StageCosts(forward_s=[1.0, 1000.0], input_s=[1.0, 1000.0]))
    draw(uneven, tmp_path / "uneven.svg")
    assert size(tmp_path / "uneven.svg")[0] <= 72 * 20  # and not as wide as numbers in the shortest bars would need
    assert bars(tmp_path / "uneven.svg") == 2 * 8  # the others have no edge, which would cover them


def test_forwards_that_are_half_as_long_as_backwards_have_numbers(tmp_path: Path) -> None:
    draw(simulate(build("1f1b", 4, 12)), tmp_path / "numbers.svg")
    text = (tmp_path / "numbers.svg").read_text()
    assert text.count("<!-- 11 -->") == 2 * 4
    draw(simulate(build("data_parallel", 1, 1)), tmp_path / "one.svg")
    assert "<!-- data_parallel: 1 rank, 1 micro-batch -->" in (tmp_path / "one.svg").read_text()


def test_what_was_measured_must_be_of_the_schedule() -> None:
    check_measured(FOUND.table, FOUND.spans)
    for spans, said in (
        (FOUND.spans[1:], "has not 0F0 on rank 0"),
        ([*FOUND.spans, replace(FOUND.spans[0], rank=1)], "also has 0F0 on rank 1"),
        ([*FOUND.spans, FOUND.spans[0]], "twice"),
    ):
        with pytest.raises(ValueError, match=said):
            check_measured(FOUND.table, spans)
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.pdf"):
        draw(FOUND, Path("picture.jpg"))


def test_show_prints_the_table_and_its_figures() -> None:
    result = zoo("show", "--ranks", 2, "--micro-batches", 2, "--forward", 2, "--input", 2, "--weight", 2)
    assert result.output.splitlines() == [
        "1f1b: 2 ranks, 2 stages, 2 micro-batches",
        "rank 0  0F0     0F1 0B0     0B1",
        "rank 1      1F0 1B0 1F1 1B1",
        "time of a batch        9 s",
        "bubble                 33.33%",
        "exposed communication  0 0 s, by rank",
        "kept for backwards     2 1 micro-batches of a stage, by rank",
        "messages waiting       1 on a channel, at most",
    ]


def test_a_table_printed_as_csv_can_be_used_as_a_schedule(tmp_path: Path) -> None:
    result = zoo("show", "--schedule", "interleaved_1f1b", "--option", "num_chunks=3", "--csv")
    table = build("interleaved_1f1b", 4, 8, num_chunks=3)
    assert from_csv(result.output).rows == table.rows
    path = tmp_path / "mine.csv"
    path.write_text(result.output)
    again = zoo("show", "--schedule", "csv", "--option", f"path={path}")
    time = simulate(table, StageCosts(forward_s=1 / 12, input_s=1 / 12, weight_s=1 / 12)).makespan_s
    assert f"time of a batch        {time:.4g} s" in again.output


def test_choose_prints_all_and_why() -> None:
    result = zoo("choose", "--ranks", 4, "--micro-batches", 16)
    assert result.output.splitlines()[-1].startswith("zb_v: 12.38 s a batch, bubble 3.0%; dualpipe_v is as fast")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("show", "--schedule", "1f2b"), "no pipe_schedule is named '1f2b'"),
        (("show", "--option", "num_chunks"), "write KEY=VALUE"),
        (("plot", "--schedule", "dualpipe_v", "--micro-batches", 2), "two a rank"),
        (("plot", "--measured", "nowhere.json"), "nowhere.json cannot be read as JSON"),
    ],
)
def test_mistakes_are_one_sentence(args: tuple[object, ...], said: str) -> None:
    result = zoo(*args)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
