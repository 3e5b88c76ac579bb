"""``docs/reference/benchmarks.md``: every page of results with its date and its machine, from the pages themselves."""

from __future__ import annotations

import re
from pathlib import Path

HEAD = """# Benchmark results

Each page has the commands, the spreads and what was missed. Dates and machines are those that the pages name first.
Made by `make pages`.

| results | date | machine |
|---|---|---|
"""
GPU = """
What was run on a GPU, and what was not, is [on its page](../../benchmarks/gpu/RESULTS.md). The table of errors of the
forecasts is [here](../../benchmarks/cost/RESULTS.md).
"""
_MACHINES = r"AMD EPYC|Intel\(R\) Xeon\(R\) Processor"


def page(root: Path) -> str:
    """The page as Markdown."""
    rows = []
    for path in sorted((root / "benchmarks").rglob("*.md")):
        if path.name == "README.md":
            continue
        text = path.read_text(encoding="utf-8")
        title = text.splitlines()[0].lstrip("# ")
        date = re.search(r"20\d\d-\d\d-\d\d", text)
        rows.append(f"| [{title}](../../{path.relative_to(root)}) | {date[0] if date else ''} | {machine(text)} |")
    return HEAD + "\n".join(rows) + "\n" + GPU


def machine(text: str) -> str:
    """Cores and processor, where a page names them."""
    head = text[:6000]
    processor = re.search(_MACHINES, head)
    cores = re.search(r"cores: (\d+)|(\d+) cores|cores (\d+)", head)
    number = next((found for found in cores.groups() if found), "") if cores else ""
    name = processor[0].replace("(R)", "") if processor else ""
    return ", ".join(part for part in (f"{number} cores" if number else "", name) if part)
