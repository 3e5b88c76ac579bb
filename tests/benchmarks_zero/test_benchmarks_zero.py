"""What the pages of benchmarks/zero decide by themselves: bytes against the papers, bandwidths, verdicts, pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import commits, turns
from benchmarks.common import ROOT, interval
from benchmarks.launch import ContenderError, run_ranks
from benchmarks.zero import compare, init, memory, traffic
from benchmarks.zero.workloads import GPT, WORKER
from torch import nn

FIGURES = {"wall_s": 1.0, "cpu_s": 0.5, "losses": [2.0, 1.0], "inter_bytes": 3000}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["stage 3", "stage 3, hpZ", "stage 3, MiCS 4", "the same, `mics_hierarchical_params_gather`"]
)
def test_bytes_are_those_of_the_papers_and_of_the_forecast(name: str) -> None:
    options, predicted = traffic.PLACEMENTS[name]
    got = traffic.count(options, 2, 64)  # nothing to pad at this size
    assert predicted is not None
    # More scales: groups are smaller where chunks are no multiple of 256 elements.
    rel = 0.02 if "zero_quantized_weights" in options else 1e-12
    assert (got["inter"] / got["M"], got["intra"] / got["M"]) == pytest.approx(predicted, rel=rel)
    assert (got["forecast"], got["forecast_inter"]) == (got["all"], got["inter"])


def raw_traffic(cpu_s: float) -> dict[str, Any]:
    sent = {"M": 100, "all": 200, "intra": 50, "inter": 150, "forecast": 200, "forecast_inter": 150}
    other = {**FIGURES, "cpu_s": cpu_s, "inter_bytes": 1000}
    return {
        "machine": {"cores": 1}, "bytes": dict.fromkeys(traffic.PLACEMENTS, sent),
        "rounds": [{"stage 3": [FIGURES, {**FIGURES, "cpu_s": 1.5}], "qwZ": [other, other]}],
        "failures": {"DeepSpeed qwZ": "ValueError: no"},
    }  # fmt: skip


def test_quantising_pays_below_the_bytes_that_it_spares_over_the_seconds_that_it_costs() -> None:
    raw = raw_traffic(1.5)
    plain, other = raw["rounds"][0]["stage 3"], raw["rounds"][0]["qwZ"]
    assert traffic.pays_below(plain, other) == 2000 / 0.5
    assert "failed: ValueError: no" in traffic.seconds_table(raw)
    assert "at any" not in traffic.seconds_table(raw)
    assert "at any" in traffic.seconds_table(raw_traffic(0.9))


def test_the_page_keeps_its_remarks(tmp_path: Path) -> None:
    page = tmp_path / "TRAFFIC.md"
    page.write_text("figures of last year\n\n## Remarks\n\nby hand\n")
    traffic.write_page(raw_traffic(2.0), page)
    assert page.read_text().endswith("## Remarks\n\nby hand\n")
    assert "last year" not in page.read_text()


def test_deferred_initialisation_gives_the_same_bits_whole_and_in_parts(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return GPT(1, 16, 8)

    for how, like in (("zoo", "plain"), ("zoo-meta", "plain"), ("zoo-later", "plain-later")):
        found, expected = (dict(init.digests(init.construct(h, w, str(tmp_path), build), h))
                           for h, w in ((how, "nvme"), (like, "cpu")))  # fmt: skip
        assert found == expected, how
    assert found != dict(init.digests(init.construct("plain", "cpu", "", build), "plain"))


def test_files_without_a_name_are_counted(tmp_path: Path) -> None:
    assert init.bytes_in_files(str(tmp_path)) == 0
    with (tmp_path / "a").open("wb", buffering=0) as file:
        file.write(bytes(8192))
        (tmp_path / "a").unlink()
        assert init.bytes_in_files(str(tmp_path)) == 8192


def test_a_wrong_parameter_and_an_allocation_that_failed_show_in_the_table() -> None:
    fine = {"wall_s": 1.0, "cpu_s": 1.0, "growth": 2**20, "files": 0, "error": "", "digests": {"a": "1", "b": "2"}}
    raw: dict[str, Any] = {
        "rounds": [{
            "plain": [fine], "zoo-2": [fine, {**fine, "digests": {"a": "1", "b": "3"}}], "zoo-nvme": [fine],
            "plain-cap": [{**fine, "error": "RuntimeError: no memory", "digests": {}}],
        }],
        "failures": {"ds": "ImportError: none"}, "numel": 2**20, "caps": [1, 2],
    }  # fmt: skip
    assert init.verdict(raw, "zoo-nvme") == "all of 2"
    assert init.verdict(raw, "zoo-2") == "1 of 2"
    text = init.report(raw)
    assert "no: RuntimeError: no memory" in text
    assert "failed: ImportError: none" in text
    assert re.search(r"\| 4\.0 +\|", text)


@pytest.mark.slow
def test_one_process_measures_a_construction_under_a_cap(tmp_path: Path) -> None:
    spec = {"section": "init", "contender": "zoo-nvme", "folder": str(tmp_path), "size": "quick"}
    figures = run_ranks(WORKER, spec, 1, 120, init.CONTENDERS["zoo-nvme"].variables)[0]
    assert figures["error"] == ""
    torch.manual_seed(0)
    layers, width, *_ = init.SIZES["quick"]
    assert figures["digests"] == dict(init.digests(GPT(layers, width, init.CONTEXT), "plain"))
    assert figures["files"] >= 4 * sum(p.numel() for p in GPT(layers, width, init.CONTEXT).parameters())


def test_of_a_failure_the_last_line_is_shown() -> None:
    error = ContenderError(
        "spec: [rank0]: Traceback\n[rank0]: ValueError: no | [rank1]: Traceback\n[rank1]: ValueError: no\n"
    )
    assert error.last == "ValueError: no"


@pytest.mark.slow
def test_tables_of_a_comparison_say_what_the_rounds_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 8, "budget": 0, "rounds": 1}
    given = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    given += ["--contenders", "ddp", "zoo1", "--what", "gpt", "host"]
    compare.main([*given, "--raw", str(tmp_path / "raw.json")])
    text = capsys.readouterr().out
    for line in ("| gpt ", "| zoo1", "| host ", "zoo1: CPU at most 1.0 x DDP"):
        assert line in text


def test_ratios_are_taken_within_rounds_and_their_interval_holds_the_median() -> None:
    def figures(cpu_s: float) -> list[dict[str, Any]]:
        return [{"cpu_s": cpu_s, "wall_s": 1.0}]

    rounds = [{"gpt zoo1": figures(2.0 * i), "gpt ddp": figures(1.0 * i)} for i in (1, 5, 9)]
    assert compare.ratios([*rounds, {}], "gpt zoo1", "gpt ddp", "cpu_s") == [2.0, 2.0, 2.0]
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)  # too few for 95 %: all of them
    assert interval([float(i) for i in range(1, 7)]) == (1.0, 6.0)
    assert interval([float(i) for i in range(1, 11)]) == (2.0, 9.0)


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["host", "pipe"])
def test_two_checkouts_are_compared_step_by_step(
    topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(ROOT), "--topics", topic, "--runs", "1", "--rounds", "2", "--raw", str(tmp_path / "raw.json")]
    commits.main(given)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if topic in line or "unit" in line]
    assert rows
    assert all(float(row[2].split()[0]) > 0 and int(row[4]) >= 2 for row in rows)


def test_another_checkout_has_zoo_in_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout"):
        commits.variables(tmp_path)


def test_two_jobs_take_turns_and_the_longer_one_ends_alone(tmp_path: Path) -> None:
    turns.prepare(tmp_path, 1)
    script = f"""
import time
from benchmarks.turns import leave, turn
for number in range(NUMBER):
    with turn():
        with open({str(tmp_path / "log")!r}, "a") as log:
            log.write("NAME")
            log.flush()
            time.sleep(0.01)
            log.write("NAME ")
leave()
"""
    jobs = []
    for job, (name, number) in enumerate((("a", 3), ("b", 5))):
        env = {**os.environ, **turns.variables(tmp_path, job, first=1), "RANK": "0", "PYTHONPATH": str(ROOT)}
        source = script.replace("NAME", name).replace("NUMBER", str(number))
        jobs.append(subprocess.Popen([sys.executable, "-c", source], env=env))
    assert [job.wait(60) for job in jobs] == [0, 0]
    assert (tmp_path / "log").read_text().split() == ["bb", "aa", "bb", "aa", "bb", "aa", "bb", "bb"]


@pytest.mark.slow
def test_memory_of_all_ranks_is_sampled_until_they_end() -> None:
    pytest.importorskip("transformers")
    most, points = memory.run("zoo3", mapped=True, quick=True)
    assert [point["point"] for point in points[0]][-2:] == [f"{name} {memory.STEPS - 1}" for name in ("step", "end")]
    with_files, without = most
    assert with_files > without > 10**8  # torch alone
    for rank in points:
        assert all(point["file"] > 0 and point["shmem"] >= 0 for point in rank)
        assert [point["cpu_s"] for point in rank] == sorted(point["cpu_s"] for point in rank)
        forecasts = {point["forecast"] for point in rank}
        assert len(forecasts) == 1
        # Of a model this small a rank's states are 394 KB, of which a part lay in memory that was there before.
        assert 0 < rank[-1]["anon"] + rank[-1]["shmem"] < 10 * forecasts.pop()
    assert "zoo3" in memory.page("zoo3")
