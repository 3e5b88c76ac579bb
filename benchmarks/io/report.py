"""The tables, on the console and as the page RESULTS.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import remarks, table
from benchmarks.io.contenders import contenders
from benchmarks.io.figures import (
    Raw,
    Target,
    cached,
    cpu_per_gb,
    gil,
    gil_targets,
    op_targets,
    rate,
    rates,
    to_fio,
)
from benchmarks.io.points import Point

PAGE = Path(__file__).with_name("RESULTS.md")
TITLES = {"write": "Sequential write over an existing file", "read": "Sequential read", "new": "Write of a new file"}
TEXTS = {
    "write": "Every contender overwrites the same file, whose blocks are all allocated and written.",
    "read": "Every contender reads the same file (torch.load one of torch.save's), of which nothing is in the page "
    "cache, and what it read is compared with what was written.",
    "new": "Every contender writes a file that is not there yet, and all fsync it in the timed part: O_DIRECT alone "
    "does not make a new file's size and blocks durable. fio sets the file's length before its clock starts.",
}
CONTROL = "control"


def verdicts(targets: list[Target]) -> str:
    """Each target and whether it is met."""
    return table(["target", "verdict"], [[t.text, t.verdict] for t in targets])


def op_table(raw: Raw, op: str) -> str:
    """Rates, ratios and CPU time of one operation."""
    rounds, rows = raw["rounds"][op], []
    for name, contender in contenders().items():
        found, spent, ratio = rates(rounds, name), cpu_per_gb(rounds, name), to_fio(rounds, name)
        if found is None or spent is None:
            continue
        ordinary = to_fio(rounds, name, huge=False)
        left, point = cached(rounds, name), raw["points"].get(op, {}).get(name)
        rows.append([
            contender.label, found.text(), ratio.text() if ratio else "",
            ordinary.text() if ordinary else "", spent.text(3),
            f"{left.median:.0%}" if left else "", Point(**point).text if point else "",
        ])  # fmt: skip
    header = ["contender", "GB/s", "x fio's best", "x in 4 KiB pages", "CPU s/GB", "in page cache after", "setting"]
    return table(header, rows)


def grid_table(raw: Raw) -> str:
    """What the search saw: how many settings, and the slowest and the fastest pass."""
    rows = []
    for op, by_name in raw["grid"].items():
        for name, contender in contenders().items():
            good = [f for f in by_name.get(name, []) if "error" not in f]
            if not good:
                continue
            seen = sorted(rate(f) / 1e9 for f in good)
            num_points = len({str(f["point"]) for f in good})
            failed = len(by_name[name]) - len(good)
            rows.append([op, contender.label, str(num_points), f"{seen[0]:.2f}–{seen[-1]:.2f}", str(failed),
                         Point(**raw["points"][op][name]).text])  # fmt: skip
    return table(["operation", "contender", "settings", "GB/s, all passes", "failed", "chosen"], rows)


def gil_table(raw: Raw) -> str:
    """The counter's rate beside each contender."""
    rows = []
    for name, contender in [*contenders().items(), (CONTROL, None)]:
        for direction in ("write", "read"):
            key = f"{name} {direction}"
            ratios, running, moved = (gil(raw, key, what) for what in ("ratios", "running", "bytes_per_s"))
            if ratios and running and moved:
                label = contender.label if contender else "control: fio in another process"
                rows.append([label, direction, ratios.text(3), running.text(3), moved.text(2, 1e-9)])
    return table(["contender", "operation", "counter's rate, x idle", "counter's CPU, x idle", "GB/s meanwhile"], rows)


def settings_table(raw: Raw) -> str:
    """What each contender does about memory, the page cache and durability."""
    measured = {name for rounds in raw["rounds"].values() for r in rounds for name in r}
    rows = [[c.label, c.buffer, c.page_cache, c.durable] for name, c in contenders().items() if name in measured]
    return table(["contender", "buffer", "page cache", "durable"], rows)


def sections(raw: Raw) -> list[tuple[str, str, str, list[Target]]]:
    """(title, explanation, tables, targets) of what was measured."""
    found = [
        (TITLES[op], TEXTS[op], op_table(raw, op), op_targets(raw, op))
        for op in TITLES
        if any(raw["rounds"].get(op, []))
    ]
    if any(raw["gil"]):
        text = (
            "One Python thread keeps operations of 64 MiB in flight, "
            f"{raw['settings']['num_bytes'] / (1 << 30):g} GiB of them at any time, while another counts. Windows with "
            f"nothing and with transfers take turns ({raw['settings']['window_s']:g} s each); a ratio is taken within "
            "its pair. The counter's CPU is the share of the time in which it ran: what it loses there, it lost to the "
            "scheduler or the GIL; the rest is lost to caches and memory. The control is fio in another process, "
            "which has no GIL to hold."
        )
        found.append(("The GIL", text, gil_table(raw), gil_targets(raw)))
    if any(by_name for by_name in raw["grid"].values()):
        text = (
            f"Before the rounds, every contender runs every setting {raw['settings']['grid_passes']} times in shuffled "
            f"order with {raw['settings']['grid_bytes'] / (1 << 20):g} MiB; the setting of the highest median rate is "
            "what the rounds run, and nothing else. zoo with checksums runs zoo's setting; a new file is written with "
            "the setting of the overwrite where that was searched. A setting that failed is not chosen."
        )
        found.append(("The search", text, grid_table(raw), []))
    return found


def complaints(raw: Raw) -> list[str]:
    """Contenders that are missing, and measurements that failed."""
    missing = [f"**missing: {name}**: {_line(why)}" for name, why in raw["missing"].items()]
    return [*missing, *(f"**failed: {key}**: {_line(why)}" for key, why in raw["failures"].items())]


def _line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no message"


def console(raw: Raw) -> str:
    """Everything as text."""
    parts = []
    for title, _, tables, targets in sections(raw):
        parts.append(f"\n{title}\n\n{tables}" + (f"\n\n{verdicts(targets)}" if targets else ""))
    return "\n".join([*parts, "", *(text.replace("**", "") for text in complaints(raw))])


def write_page(raw: Raw, page: Path = PAGE) -> Path:
    """Write RESULTS.md anew; what stands under "Remarks" is written by hand and stays."""
    m, s = raw["machine"], raw["settings"]
    loads = "; ".join(f"{op} " + ", ".join(f"{x:.1f}" for x in found) for op, found in raw["load"].items() if found)
    lines = [
        "# zoo.io beside its peers",
        "",
        f"Measured {m['date']} with `{s['command']}`, in one run: {s['num_bytes'] / (1 << 30):g} GiB a transfer, "
        f"{s['rounds']} rounds. Each figure is the median over the rounds, with the smallest and the largest; GB are "
        "10^9 bytes; CPU is user + system of the whole process during the transfer. `x fio's best` is the ratio to the "
        "fastest of fio's jobs of the same round, `x in 4 KiB pages` to the fastest whose memory is in ordinary pages, "
        "as an ordinary tensor's is.",
        "",
        f"Machine: {m['cores']} cores of {m['cpu']}, Linux {m['kernel']}, {m['filesystem']}, transparent "
        f"huge pages: {m['huge_pages']}; {m['fio']}, Python "
        f"{m['python']}, torch {m['torch']}, DeepSpeed {m['deepspeed']}. Load average at the start of each round: "
        f"{loads}.",
        "",
    ]
    if found := complaints(raw):
        lines += [*(f"- {text}" for text in found), ""]
    for number, (title, text, tables, targets) in enumerate(sections(raw), 1):
        lines += [f"## {number}. {title}", "", text, "", tables, ""]
        lines += [verdicts(targets), ""] if targets else []
    lines += ["## What each contender does", "", settings_table(raw), ""]
    page.write_text("\n".join(lines) + "\n" + remarks(page))
    return page
