"""The page RESULTS.md from the raw seconds."""

from __future__ import annotations

import datetime
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernels import layers

from zoo.kernels import loading

PAGE = Path(__file__).with_name("RESULTS.md")
LOOP = "C loop"
LAYERS, REMARKS = layers.HEADING, "## Remarks"


def about(yardstick: str) -> dict[str, str]:
    """What the run was made on and with."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = f"{names[0]}, {len(names)} cores" if names else processor
    peers = {"torch": torch.__version__}
    try:
        import deepspeed

        peers["DeepSpeed"] = deepspeed.__version__
    except ImportError:
        pass
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor,
        "instruction set": loading.isas()[-1],
        "versions": ", ".join(f"{k} {v}" for k, v in peers.items()),
        "C loop": yardstick,
    }


def ratios(record: dict[str, Any], name: str) -> list[float]:
    """The C loop's seconds over the contender's, round by round: the fraction of the loop's speed."""
    return [b / s for b, s in zip(record["seconds"][LOOP], record["seconds"][name], strict=True)]


def cell(values: list[float]) -> str:
    """Median and the middle half."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.2f} ({low:.2f}–{high:.2f})"


def onebit_section(found: dict[str, Any]) -> list[str]:
    """1-bit compression: medians."""
    parts = [1e3 * statistics.median(found[name]) for name in ("compress_s", "decompress_s")]
    return [
        "",
        "## 1-bit compression of 25 M fp32 elements, one thread",
        "",
        f"compress {parts[0]:.1f} ms, decompress {parts[1]:.1f} ms, together {sum(parts):.1f} ms (medians); the wire "
        f"carries 1/{found['ratio']:.1f} of fp32, scales included.",
    ]


def write(raw: dict[str, Any]) -> None:
    """Write the page; the layer operations and the remarks stay."""
    names = list(dict.fromkeys(n for r in raw["records"] for n in r["seconds"] if n != LOOP))
    lines = [
        "# AdamW on the CPU, as a fraction of a C loop over the same bytes",
        "",
        "Written by `python -m benchmarks.kernels`. 28 bytes a parameter; contenders take turns within a round. A "
        "ratio is of one round (1 = as fast as the loop); in the table the median of the rounds and the middle half.",
        "",
        *(f"- {key}: {value}" for key, value in raw["about"].items()),
        f"- rounds: {len(raw['records'][0]['seconds'][LOOP])}",
        "",
        "| workload | threads | C loop, GB/s | " + " | ".join(names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for record in raw["records"]:
        rate = 28 * record["elements"] / statistics.median(record["seconds"][LOOP]) / 1e9
        cells = [cell(ratios(record, n)) if n in record["seconds"] else "–" for n in names]
        lines.append(f"| {record['workload']} | {record['threads']} | {rate:.1f} | " + " | ".join(cells) + " |")
    lines += onebit_section(raw["onebit"])
    old = PAGE.read_text() if PAGE.exists() else ""
    sections = [kept(old, heading) for heading in (LAYERS, REMARKS)]
    PAGE.write_text("\n".join(["\n".join(lines) + "\n", *filter(None, sections)]))


def kept(page: str, heading: str) -> str:
    """A section of the page, from its heading to the next one; empty without it."""
    _, found, rest = page.partition(f"{heading}\n")
    return found + rest.partition("\n## ")[0].rstrip("\n") + "\n" if found else ""


def write_layers(section: str) -> None:
    """Put the section of the layer operations in the place of the old one, or before the remarks."""
    page = PAGE.read_text()
    old, remarks = kept(page, LAYERS), kept(page, REMARKS)
    if old:
        PAGE.write_text(page.replace(old, section))
    else:
        PAGE.write_text(page.replace(remarks, f"{section}\n{remarks}") if remarks else f"{page}\n{section}")
