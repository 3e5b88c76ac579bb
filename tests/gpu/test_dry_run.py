"""``python -m benchmarks.gpu`` as far as it runs without a GPU: the same checks and timers on small CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import cases, checks, report, run, stages

from zoo.kernels import loading

ROOT = Path(__file__).resolve().parents[2]
native = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
# What the script must not need, and the option of the script after it.
SCRIPT = """
import runpy, sys
for name in ("pydantic", "hypothesis", "pytest", "zoo.registry"): sys.modules[name] = None
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@native
def test_the_dry_run_checks_and_times_everything_with_torch_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("old\n\n## Remarks\n\nby hand\n")
    options = ["--device", "cpu", "--rounds", "1", "--params", "20000", "--page", str(page)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", SCRIPT, str(ROOT), *options]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == run.OK, result.stdout + result.stderr
    text = page.read_text()
    for check in checks.CHECKS:
        assert f"- {check.name}: " in text
    assert text.count("comparisons, equal") == len(checks.CHECKS)
    for stage in stages.STAGES:
        assert f"| {stage.name} | " in text
    assert "a dry run: its figures mean nothing" in text
    assert text.endswith("## Remarks\n\nby hand\n")


@native
def test_every_operation_has_a_check() -> None:
    assert sorted({name for check in checks.CHECKS for name in check.operators}) == loading.operations()


@native
def test_a_wrong_bit_is_found() -> None:
    def cases_of(large: bool) -> checks.Iterator[checks.Case]:
        x = cases.values(300, 0)
        yield checks.Case(
            what="next number", args=(x,), operation=lambda x: x,
            reference=lambda x: torch.where(torch.arange(300) == 299, x.nextafter(torch.tensor(9.0)), x),
        )  # fmt: skip

    check = checks.Check(name="identity", operators=("sum_squares",), cases=cases_of)
    with pytest.raises(checks.Mismatch, match="identity, next number, offset 0: 1 of 300 elements of result 0 differ"):
        checks.run(check, "cpu")


@native
def test_an_operation_that_runs_in_the_reference_is_found() -> None:
    match = "zoo::update_ does not run natively on cpu"
    with loading.use_mode("reference"), pytest.raises(checks.Mismatch, match=match):
        checks.run(checks.CHECKS[0], "cpu")


def test_the_oracle_of_sums_adds_in_the_order_of_the_header() -> None:
    x = cases.values(70_001, 1)
    parts = []
    for part in x.split(65536):
        lanes = [0.0] * 16
        for i, value in enumerate(part.tolist()):
            lanes[i % 16] += value * value
        total = 0.0
        for lane in lanes:
            total += lane
        parts.append(total)
    assert float(cases.ordered_sum_squares(x)) == parts[0] + parts[1]


@native
def test_without_time_everything_is_skipped_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    arguments = ["--device", "cpu", "--minutes", "0", "--page", str(page)]
    assert run.main(arguments) == run.SKIPPED
    out = capsys.readouterr().out
    assert out.count("skipped, the time was used up") == len(checks.CHECKS) + len(stages.STAGES)
    assert page.read_text().count("skipped, the time was used up") == len(checks.CHECKS) + len(stages.STAGES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = report.PAGE.read_text()
    assert run.main([]) == run.NO_GPU
    assert "torch sees no GPU here, so nothing was checked or timed" in capsys.readouterr().out
    assert report.PAGE.read_text() == before
