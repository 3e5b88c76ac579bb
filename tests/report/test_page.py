"""The page of a run: what stands in it, what cannot get out of it, and how large it is."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zoo.cli import app
from zoo.report import write_report
from zoo.report.page import LARGEST
from zoo.report.timeline import SPANS, timeline_of

from .runs import EVIL, evil_run, whole_run


class Elements(HTMLParser):
    """Names of elements, their attributes, and text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words, self.scripts = "", list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.names and self.names[-1] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.words += data


def made(folder: Path) -> Elements:
    return Elements(write_report(folder).read_text(encoding="utf-8"))


def data_of(page: Elements) -> Any:
    return json.loads(page.scripts[0])


def test_a_whole_run_has_all_parts(tmp_path: Path) -> None:
    page = made(whole_run(tmp_path / "my run"))
    for text in (
        "my run", "Loss", "Learning rate", "Gradient norm", "Throughput", "Resident memory", "Model states",
        "Sent in a step", "One step", "What the ranks spent it on", "ratio", "zero_optimization.stage",
        "override", "EPYC", "all_gather", "user/accuracy",
    ):  # fmt: skip
        assert text in page.words, text
    assert "json is not there" not in page.words
    data = data_of(page)
    assert data["last"] == 40
    assert data["series"]["loss"]["mean"][0] == pytest.approx(4.0)
    assert data["charts"]["loss"]["levels"] == [{"name": "byte bigram", "value": 2.434, "colour": 6}]
    assert len(data["timeline"]["ranks"]) == 2


@pytest.mark.parametrize(
    ("records", "files"),
    [
        ([{"step": 1, "loss": 1.0, "step_s": 0.1, "state_bytes": [1]}, {"step": 1, "loss": 2.0}], {}),  # began anew
        ([{"step": 9000, "loss": 1e308, "step_s": 1e308}, {"step": 9001, "loss": 1e308, "step_s": 1e308}], {}),
        ([{"step": 1, "loss": 1.0}], {"environment.json": {"command": "zoo train --out caf\udce9"}}),
    ],
)
def test_no_number_and_no_name_of_a_file_stops_a_report(
    tmp_path: Path, records: list[dict[str, Any]], files: dict[str, Any]
) -> None:
    forecast = {"parameters_bytes": 1, "optimizer_bytes": 2, "time": {"step_s": 0.1}}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, content in {"forecast.json": forecast, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert "Training" in made(tmp_path).words


def test_tokens_of_launches_before_count(tmp_path: Path) -> None:
    assert "327,680 tokens in all" in made(whole_run(tmp_path)).words


def test_what_is_measured_stands_beside_the_forecast(tmp_path: Path) -> None:
    row = re.search(r"<tr><td>sent in the last step, rank 1.*?</tr>", write_report(whole_run(tmp_path)).read_text())
    assert row is not None
    cells = [re.sub("<.*?>", "", cell) for cell in re.findall("<td.*?</td>", row[0])]
    assert cells[1:4] == ["1,000 B", "1.07 KiB", "1.1"]


@pytest.mark.parametrize("missing", ["timeline", "forecast", "origins", "environment", "result", "log"])
def test_a_part_that_is_missing_says_how_to_get_it(tmp_path: Path, missing: str) -> None:
    folder = whole_run(tmp_path / "run")
    (folder / ("log.jsonl" if missing == "log" else f"{missing}.json")).unlink()
    words = made(folder).words
    said = {
        "log": "neither log.jsonl nor records.jsonl is there", "result": "there is no result.json",
        "origins": "not known",  # config.json has the values
        "forecast": "sent in the last step",  # result.json has it too
        "environment": "2.15",  # run.json has something
    }.get(missing, f"{missing}.json is not there. A run of zoo train writes it")  # fmt: skip
    assert said in words


def test_a_run_of_an_engine_has_a_page_by_its_jsonl_monitor(tmp_path: Path) -> None:
    lines = [
        {"step": i, "loss": 2.0, "lr": [0.1, 0.2], "tokens": 64, "step_s": 0.5, "wire_bytes": 5, "memory_bytes": 7}
        for i in (1, 2)
    ]
    lines.append({"step": 3, "loss": "NaN", "lr": [0.1], "grad_norm": "Infinity", "skipped": True})
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    data = data_of(page := made(tmp_path))
    assert data["series"]["tokens_per_s"]["mean"][:2] == [128, 128]
    assert data["series"]["loss"]["mean"] == [2, 2, None]
    assert "1 skipped" in page.words
    assert "infinite are in no curve: grad_norm (1)" in page.words


def test_nothing_of_a_file_is_code(tmp_path: Path) -> None:
    page = made(evil_run(tmp_path))
    assert page.names.count("script") == 2
    assert page.names.count("style") == 1
    assert not {"img", "iframe", "object", "embed", "base", "form", "a:href"} & {*page.names}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "style", "srcset")]
    links = [value for name, value in page.attributes if name == "href"]
    assert all(value is not None and value.startswith(("#", "data:,")) for value in links)
    assert EVIL in page.words, "it is shown as text"


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    text = write_report(whole_run(tmp_path)).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy[1]
    # The one address in it names the language of pictures, and is never asked for.
    assert set(re.findall(r"https?://[^\"'<> ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_secrets_are_not_told(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    (folder / "origins.json").write_text(json.dumps([["comet.api_key", "'swordfish'", "c.json"], ["seed", "1", "x"]]))
    text = write_report(folder).read_text()
    assert "swordfish" not in text
    assert "not told" in text
    (folder / "origins.json").unlink()
    (folder / "config.json").write_text(json.dumps({"wandb": {"token": "swordfish"}}))
    assert "swordfish" not in write_report(folder).read_text()


@pytest.mark.dear
def test_a_page_is_never_larger_than_a_megabyte(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    with open(folder / "log.jsonl", "w") as file:
        for step in range(1, 2501):
            record: dict[str, Any] = {f"user/{i}": (step * 7919 * (i + 1) % 100_003) / 9973 for i in range(30)}
            record |= {"loss": step % 11 / 7, "rss_bytes": [step * 977] * 8}
            file.write(json.dumps({"step": step, **record}) + "\n")
    rows = [[f"a.{i}." + "k" * 200, "v" * 290, "f" * 200] for i in range(3000)]
    (folder / "origins.json").write_text(json.dumps(rows))
    (folder / "environment.json").write_text(json.dumps({f"v{i}": "w" * 300 for i in range(3000)}))
    spans = [["compute", "forward", "n" * 90 + str(i), i / 9, i / 9 + 0.1, 0] for i in range(4000)]
    ranks = [{"rank": r, "spans": spans, "left_out": 0} for r in range(4)]
    (folder / "timeline.json").write_text(json.dumps({"step": 3, "device": "cpu", "ranks_of_job": 4, "ranks": ranks}))
    path = write_report(folder)
    assert path.stat().st_size <= LARGEST
    words = Elements(path.read_text()).words
    assert "more values are in origins.json" in words
    assert "of the shortest spans are left out" in words


@pytest.mark.parametrize("given", [
    None, [], {}, {"ranks": 1}, {"ranks": [1, {}]}, {"ranks": [{"spans": [1, [], ["compute"] * 6]}]},
    {"ranks": [{"spans": [["compute", "forward", "x", 2.0, 1.0, 0]]}]},
    {"ranks": [{"spans": [["compute", "<b>", "x", 0.0, 1.0, 0], ["compute", "forward", "x", -1, 1.0, 0]]}]},
])  # fmt: skip
def test_a_timeline_that_is_none_is_none(given: Any) -> None:
    assert timeline_of(given) is None


def test_times_of_a_rank_add_up() -> None:
    spans: list[Any] = [
        ["compute", "forward", "a", 0.0, 1.0, 0], ["compute", "wait", "b", 1.0, 1.5, 8],
        ["communication", "gather", "b", 0.5, 1.5, 8], ["communication", "reduce", "c", 1.25, 2.0, 8],
        ["compute", "forward", "b", 1.5, 3.0, 0], "no span",
    ]  # fmt: skip
    found = timeline_of({"step": 2, "ranks_of_job": 1, "device": "cuda", "ranks": [{"rank": 0, "spans": spans}]})
    assert found is not None
    (one,) = found.times
    assert one.by_kind == {"forward": 2.5, "wait": 0.5}
    assert one.under_way_s == 1.5
    assert (found.end_s, found.on_device, found.left_out) == (3.0, True, 1)
    many = [["compute", "forward", str(i), i, i + (2 if i % 4 else 1), 0] for i in range(2 * SPANS)]
    found = timeline_of({"ranks": [{"rank": 0, "spans": many}]})
    assert found is not None
    assert sum(len(rank["compute"]) for rank in found.data["ranks"]) + found.left_out == 2 * SPANS


@pytest.mark.parametrize(("name", "said"), [
    ("nowhere", "is not there; name the directory of a run"), ("file", "is a file; name the directory"),
    ("empty", "there is no run in"),
])  # fmt: skip
def test_a_folder_that_is_no_run(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["report", str(tmp_path / name)])
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_command_says_where_the_page_is(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.output == f"the report is in {folder / 'report.html'}\n"
    before = sorted(path.name for path in folder.iterdir())
    other = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(folder), "--out", str(other)]).exit_code == 0
    assert other.read_bytes() == (folder / "report.html").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == before, "nothing else is left"
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(folder)])
    assert "is a directory; name a file" in result.stderr
