"""Forecasts beside published step times: ``python -m benchmarks.cost [--write-results]``.

Every second row of a table calibrates, the others judge. Beside each mean error stands that of a constant MFU, the
median of the rows that calibrate (of all rows, where none do).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import machine, table
from benchmarks.cost.points import MEGATRON, llm_foundry, megatron_2022, torchtitan, vtrain, vtrain_cluster, zero_3

from zoo.cost import EAGER, LEAN, Calibration, Hardware, Layout, Run, Software, calibrate, memory_of, step_time

RESULTS = Path(__file__).with_name("RESULTS.md")
DEEPSPEED = Software(
    name="Megatron-DeepSpeed, 2021", forward_s=1.1e-3, backward_s=2.1e-3, split_s=1e-4, whole_softmax=4, unfused_s=7e-4,
    head_s=2e-3, gap_s=6e-5, loss_bytes=70, update_bytes=20, message_s=1e-5, step_s=3e-3,
)  # fmt: skip
"""Where calibration begins. The fused softmax of Megatron-LM takes heads times sequences in fours."""
FREE = (
    "forward_s", "backward_s", "split_s", "unfused_s", "head_s", "gap_s", "loss_bytes", "update_bytes", "reduce_part",
    "message_s", "step_s", "fill", "memory_reached",
)  # fmt: skip
FSDP = Software(
    name="FSDP, 2023",
    gap_s=1.5e-5,
    loss_bytes=30,
    contention=0.6,
    link_reached=0.5,
    attention_reached=0.25,
    step_s=1e-2,
)
FREE_OF_FSDP = ("attention_reached", "gap_s", "link_reached", "step_s")
STAGE_3 = Software(name="DeepSpeed's stage 3, 2021", contention=0.6, link_reached=0.8)
"""Chosen by hand with V3 in view: contention as FSDP's, the links' part so that the slowest points come out."""


@dataclass(frozen=True)
class Judged:
    """One row of the table of errors: forecast over measured - 1, of the forecast and of a constant MFU."""

    name: str
    errors: list[float]
    constant: list[float]
    asked: str

    @property
    def mean(self) -> float:
        """Of the absolute errors."""
        return statistics.mean(map(abs, self.errors))

    def row(self) -> list[str]:
        """As the table has it."""
        worst = max(self.errors, key=abs)
        return [
            self.name, str(len(self.errors)), f"{self.mean:.1%}", f"{statistics.mean(self.errors):+.1%}",
            f"{worst:+.1%}", f"{statistics.mean(map(abs, self.constant)):.1%}", self.asked,
        ]  # fmt: skip


def seconds_of(run: Run, software: Software, machine_: Hardware | None = None) -> float:
    """The forecast of a step."""
    return step_time(run.model, run.layout, machine_ or run.hardware, software).step_s


def judge(
    name: str, runs: Sequence[Run], forecast: Callable[[Run], float], asked: str, known: Sequence[Run] = ()
) -> Judged:  # fmt: skip
    """Errors of ``forecast``, and of the median MFU of ``known``."""
    mfu = statistics.median(step_time(r.model, r.layout, r.hardware).flops / r.step_s / _peak(r) for r in known or runs)
    constant = [step_time(r.model, r.layout, r.hardware).flops / mfu / _peak(r) / r.step_s - 1 for r in runs]
    return Judged(name, [forecast(r) / r.step_s - 1 for r in runs], constant, asked)


def _peak(run: Run) -> float:
    return run.layout.ranks * run.hardware.device.peak("bf16")


def of_calibration(found: Calibration) -> Callable[[Run], float]:
    """Forecasts with what was fitted."""
    return lambda run: seconds_of(run, found.software, found.hardware[run.hardware.name])


def choices(runs: Sequence[Run], forecast: Callable[[Run], float]) -> list[float]:
    """Of each group of rows that differ in the layout alone: how much slower the one with the best forecast was."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault((run.layout.ranks, run.layout.global_batch, run.model), []).append(run)
    return [min(g, key=forecast).step_s / min(r.step_s for r in g) - 1 for g in groups.values() if len(g) > 1]


def one_node(known: Sequence[Run]) -> Calibration:
    """Calibrated on rows of ``vtrain_one_node.csv``."""
    return calibrate(known, DEEPSPEED, FREE)


def report() -> str:
    """The page's tables."""
    cluster = vtrain_cluster()
    one = vtrain("vtrain_one_node.csv", "none", cluster)
    many = vtrain("vtrain_many_nodes.csv", "full", cluster)
    found = one_node(one[::2])
    forecast = of_calibration(found)
    judged = [
        judge("one node, rows that calibrate", one[::2], forecast, "", one[::2]),
        judge("one node, the others", one[1::2], forecast, "≤ 6 %", one[::2]),
        judge("many nodes, nothing more fitted", many, forecast, "≤ 7 %", one[::2]),
        judge("Megatron 2022 (V1), not calibrated", [r for _, r in megatron_2022()],
              lambda r: seconds_of(r, LEAN), "≤ 4 %, worst 8 %"),
        judge("ZeRO-3 (V3), two numbers by hand", [r for _, r in zero_3()], lambda r: seconds_of(r, STAGE_3), "≤ 10 %"),
    ]  # fmt: skip
    judged.append(judge("torchtitan (V8), not calibrated", [r for _, r in torchtitan()],
                        lambda r: seconds_of(r, EAGER), ""))  # fmt: skip
    factors = {"vTrain, one node": found}
    fsdp = llm_foundry()
    for name, machines in (("A100", ("a100-40", "a100-80")), ("H100", ("h100-80",))):
        runs = [r for r in fsdp if r.hardware.name in machines]
        fitted = calibrate(runs[::2], FSDP, FREE_OF_FSDP)
        factors[f"llm-foundry, {name}"] = fitted
        judged.append(judge(f"llm-foundry, {name}, the others", runs[1::2], of_calibration(fitted), "≤ 5 %", runs[::2]))
    worse = choices(one, forecast)
    lines = [
        table(["points", "number", "mean error", "bias", "worst", "constant MFU", "asked"], [j.row() for j in judged]),
        f"\nChoosing the layout of each of {len(worse)} groups of rows on one node that differ in nothing else: the "
        f"chosen one was {statistics.mean(worse):.1%} slower than the best on average (asked ≤ 2 %), "
        f"{statistics.quantiles(worse, n=10)[-1]:.1%} at the 90th percentile (asked ≤ 6 %).", "",
        "## Points of papers", "", table(["point", "measured s", "forecast s", "error"], _points()), "",
        "## Memory (V2, V7)", "", table(["model", "published GiB", "counted GiB", "error"], _memory()), "",
        "## What calibration changed", "",
        table(["numbers", "factors"], [[n, ", ".join(f"{k} {v:.3g}" for k, v in c.factors.items())]
                                       for n, c in factors.items()]),
    ]  # fmt: skip
    return "\n".join(lines)


def _points() -> list[list[str]]:
    found = []
    for points, software in ((megatron_2022(), LEAN), (zero_3(), STAGE_3), (torchtitan(), EAGER)):
        for name, run in points:
            time_s = seconds_of(run, software)
            found.append([name, f"{run.step_s:.2f}", f"{time_s:.2f}", f"{time_s / run.step_s - 1:+.1%}"])
    return found


# Korthikanti et al. 2022, figure 1: GiB of model states, and of activations of nothing recomputed and of selective.
_FIGURE_1 = ((45.56, 59.25, 9.56), (45.56, 66.84, 12.35), (31.64, 114.0, 23.08), (32.96, 131.3, 26.56))


def memory_errors() -> list[tuple[str, float, float]]:
    """(what, published GiB, counted GiB) of V2."""
    found = []
    for (name, model, pipeline, chunks, batch, micro), published in zip(MEGATRON, _FIGURE_1, strict=True):
        sizes = {"global_batch": batch, "micro_batch": micro, "tensor": 8, "pipeline": pipeline, "chunks": chunks}
        plain = memory_of(model, Layout(**sizes), gradient_bytes=4)  # type: ignore[arg-type]
        less = memory_of(model, Layout(**sizes, recompute="selective", sequence_parallel=True))  # type: ignore[arg-type]
        counted = plain.model_states, plain.activations, less.activations
        what = "model states", "activations", "activations, selective and sequence-parallel"
        found += [(f"{name}: {w}", p, c / 2**30) for w, p, c in zip(what, published, counted, strict=True)]
    return found


def torchtitan_errors() -> list[tuple[str, float, float]]:
    """(what, published GiB, counted GiB) of V7: Llama 3.1 8B with FSDP, fp32 states, two sequences a rank."""
    model = next(run.model for name, run in torchtitan() if name == "Llama 3 8B")
    found = []
    for ranks, published in ((8, 82.4), (128, 67.0)):
        layout = Layout(global_batch=2 * ranks, micro_batch=2, data=ranks, stage=3, recompute="alternate")
        counted = memory_of(model, layout, parameter_bytes=4, gradient_bytes=4, state_bytes=8, logit_bytes=16).total
        found.append((f"Llama 3.1 8B on {ranks} H100: peak", published, counted / 2**30))
    return found


def _memory() -> list[list[str]]:
    return [[n, f"{p:.2f}", f"{c:.2f}", f"{c / p - 1:+.1%}"] for n, p, c in memory_errors() + torchtitan_errors()]


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-results", action="store_true")
    given = parser.parse_args()
    facts = "\n".join(f"- {key}: {value}" for key, value in machine(()).items() if key in ("python", "date"))
    page = (
        "# Forecasts beside published figures\n\nWritten by `python -m benchmarks.cost`; sources and licences of the "
        "figures are in [published/README.md](published/README.md).\nAn error is forecast / measured - 1; constant MFU "
        "is that of the rows that calibrate, where some do.\n\n" + facts + "\n\n" + report() + "\n"
    )
    if not given.write_results:
        print(page)
        return
    kept = RESULTS.read_text().partition("\n## Remarks")[2] if RESULTS.exists() else ""
    RESULTS.write_text(page + (f"\n## Remarks{kept}" if kept else ""))
