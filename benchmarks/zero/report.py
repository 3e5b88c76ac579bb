"""The tables, on the console and as the page RESULTS.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import remarks, table
from benchmarks.zero.contenders import CONTENDERS
from benchmarks.zero.figures import (
    Raw,
    Target,
    growth,
    host_targets,
    loss_difference,
    max_over_ranks,
    num_rounds,
    ratio,
    rss_targets,
    spread,
    states_targets,
    step_targets,
    whole_sections,
)
from benchmarks.zero.host import HOST_CONTENDERS
from benchmarks.zero.workloads import GPT_BATCH, GPT_CONTEXT, STATES_CONTEXT

PAGE = Path(__file__).with_name("RESULTS.md")
STEP_TITLES = {
    "tiny1": "200 x Linear(64, 64), world 1",
    "tiny2": "200 x Linear(64, 64), world 2",
    "gpt1": f"GPT, 12 layers x 256, batch {GPT_BATCH} x {GPT_CONTEXT} bytes, world 1",
    "gpt2": f"GPT, 12 layers x 256, batch {GPT_BATCH} x {GPT_CONTEXT} bytes a rank, world 2",
}


def verdicts(targets: Sequence[Target]) -> str:
    """Each target and whether it is met."""
    return table(["target", "verdict"], [[t.text, t.verdict] for t in targets])


def host_section(raw: Raw) -> str:
    """Section 1."""
    rows = []
    for name, (label, setting) in HOST_CONTENDERS.items():
        cpu, wall = spread(raw, "host", name, "cpu_s"), spread(raw, "host", name, "wall_s")
        to_zoo, most = ratio(raw, "host", name, "zoo", "cpu_s"), spread(raw, "host", name, "most_whole", max_over_ranks)
        if cpu and wall and most:
            relative = to_zoo.text(1) if to_zoo else ""
            rows.append([label, cpu.text(1, 1e6), wall.text(1, 1e6), relative, f"{most.median:.0f}", setting])
    return table(["contender", "CPU µs a unit", "wall µs a unit", "CPU, x zoo", "whole at once", "setting"], rows)


def step_section(raw: Raw, section: str) -> str:
    """Section 2, one workload and world size."""
    rows = []
    for name, contender in CONTENDERS.items():
        cpu = spread(raw, section, name, "cpu_s")
        if cpu is None:
            continue
        to_plain, wall = ratio(raw, section, name, "plain", "cpu_s"), ratio(raw, section, name, "plain", "wall_s")
        difference = loss_difference(raw, section, name) if name != "plain" else None
        rows.append([
            contender.label, cpu.text(1, 1e3), to_plain.text() if to_plain else "", wall.text() if wall else "",
            f"{difference:.0e}" if difference else ("0" if difference == 0 else ""),
        ])  # fmt: skip
    return table(["contender", "CPU ms a step", "CPU, x unsharded", "wall, x unsharded", "loss against DDP"], rows)


def rss_section(raw: Raw) -> str:
    """Section 3."""
    rows = []
    for name, contender in CONTENDERS.items():
        if found := growth(raw, name):
            rows.append([contender.label, "" if contender.stage is None else str(contender.stage), found.text(1, 1e-6)])
    return table(["contender", "compared at stage", "growth, MB"], rows)


def states_section(raw: Raw) -> str:
    """Section 4."""
    rows = []
    for stage in range(4):
        ranks = next((r["states"][f"zoo{stage}"] for r in raw["rounds"] if f"zoo{stage}" in r.get("states", {})), None)
        if ranks is None:
            continue
        largest = max(ranks, key=lambda r: r["peak"]["total"])
        peak, expected = largest["peak"], largest["formula_bytes"]
        parts = " + ".join(f"{peak[k] / 1e6:.1f}" for k in ("parameters", "gradients", "optimizer"))
        rows.append([str(stage), f"{expected / 1e6:.1f}", f"{peak['total'] / 1e6:.1f} = {parts}",
                     f"{100 * (peak['total'] / expected - 1):+.1f} %",
                     f"{max(r['rss_growth_bytes'] for r in ranks) / 1e6:.1f}"])  # fmt: skip
    header = ["stage", "formula, MB", "peak = parameters + gradients + optimizer, MB", "difference", "RSS growth, MB"]
    return table(header, rows)


def sections(raw: Raw) -> list[tuple[str, str, str, list[Target]]]:
    """(title, explanation, tables, targets) of what was measured."""
    measured = {section for r in raw["rounds"] for section in r}
    found = []
    if "host" in measured:
        text = (
            "World 1, one thread, 200 x Linear(64, 64), every module a unit of its own, one row of input, under "
            "no_grad: CPU time of a forward, less that of the plain model's, divided by 200. Every contender is "
            "checked to have no whole unit before and after a forward, a whole one in every unit's forward, and the "
            "plain model's output, bit for bit."
        )
        found.append(("1. Host time of gather and release", text, host_section(raw), host_targets(raw)))
    steps = [s for s in STEP_TITLES if s in measured]
    if steps:
        text = (
            "Forward, backward, AdamW step and zero_grad; one thread a rank, gloo; CPU time of all threads of a rank, "
            "mean of the ranks. Beside world 2 the unsharded line is two independent processes at once. Every rank "
            "does the work of the unsharded process on data of its own."
        )
        tables = "\n\n".join(f"{STEP_TITLES[s]}:\n\n{step_section(raw, s)}" for s in steps)
        found.append(("2. Step time", text, tables, step_targets(raw)))
    if "gpt2" in measured:
        text = (
            "The GPT at world 2: the peak of the resident set (VmHWM) while building and training, less what it was "
            "just before the model was built, after imports, the process group and a small warm-up; the larger rank."
        )
        found.append(("3. Growth of the resident set", text, rss_section(raw), rss_targets(raw)))
    if "states" in measured:
        text = (
            f"A GPT of 48 layers x 256, bf16, context {STATES_CONTEXT}, 38.0 million parameters Ψ, N = 2, K = 12, "
            'no persistent parameters. The peak over three steps of `optimizer.memory()["total"]`, looked at after '
            "every change of a storage's size, in hooks of every block and in the wrapped optimizer's step. The last "
            "column is measured from outside and holds everything else too: the model before it is split, activations, "
            "temporaries of the step."
        )
        found.append(("4. Model states against the formula", text, states_section(raw), states_targets(raw)))
    return found


def console(raw: Raw) -> str:
    """Everything as text."""
    raw = whole_sections(raw)
    parts = [f"\n{title}\n\n{tables}\n\n{verdicts(targets)}" for title, _, tables, targets in sections(raw)]
    failures = [f"failed: {key}" for key in raw["failures"]]
    return "\n".join([*parts, *failures])


def write_page(raw: Raw) -> Path:
    """Write RESULTS.md anew; what stands under "Remarks" is written by hand and stays."""
    raw = whole_sections(raw)
    m: dict[str, Any] = raw["machine"]
    counts = ", ".join(f"{s} {n}" for s in ("host", *STEP_TITLES, "states") if (n := num_rounds(raw, s)))
    lines = [
        "# zoo.zero beside its peers",
        "",
        f"Measured {m['date']} with `python -m benchmarks.zero --write-results`, in one run; each figure is "
        f"the median over the rounds, with the smallest and the largest. Rounds: {counts}.",
        "",
        f"Machine: {m['cores']} cores of {m['cpu']}; Python {m['python']}, torch {m['torch']}, DeepSpeed "
        f"{m['deepspeed']}. Load average at the start of each round: {', '.join(f'{x:.1f}' for x in raw['load'])}.",
        "",
    ]
    for title, text, tables, targets in sections(raw):
        lines += [f"## {title}", "", text, "", tables, "", verdicts(targets), ""]
    if raw["failures"]:
        lines += ["## Failures", "", *[f"- {key}" for key in raw["failures"]], ""]
    settings = [[c.label, c.setting] for c in CONTENDERS.values()]
    lines += ["## Settings of sections 2 and 3", "", table(["contender", "setting"], settings), ""]
    lines += [
        "All use `torch.optim.AdamW(lr=1e-3)`, flags default, the same initial model and the same batches.",
        "",
    ]
    PAGE.write_text("\n".join(lines) + "\n" + remarks(PAGE))
    return PAGE
