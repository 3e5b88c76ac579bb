"""The page RESULTS.md."""

from __future__ import annotations

import datetime
import platform
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).with_name("RESULTS.md")
REMARKS = "## Remarks"


def about(device: str) -> dict[str, str]:
    """What the run was made on and with; nothing that names the machine."""
    facts = {"date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        facts["GPU"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        )
        facts["driver"] = driver()
    else:
        facts["device"] = f"{device} (a dry run: its figures mean nothing)"
    facts["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return facts


def driver() -> str:
    """The version of the driver, as nvidia-smi has it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown (no nvidia-smi)"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return result.stdout.partition("\n")[0].strip() or "unknown"


def cell(seconds: list[float], num_bytes: int, bandwidth: float) -> str:
    """Median time, and the fraction of the copy bandwidth with the middle half of the rounds."""
    median = statistics.median(seconds)
    fraction = [num_bytes / s / bandwidth for s in seconds]
    text = f"{1e3 * median:.3f} ms, {statistics.median(fraction):.2f}"
    if len(fraction) < 2:
        return text
    low, _, high = statistics.quantiles(fraction, n=4)
    return f"{text} ({low:.2f}–{high:.2f})"


def page(raw: dict[str, Any]) -> str:
    """The page without its remarks."""
    records = raw["records"]
    names = list(dict.fromkeys(name for record in records for name in record["seconds"]))
    lines = [
        "# The operations on a GPU",
        "",
        "Written by `python -m benchmarks.gpu`. A cell has the median time and what the bytes that the operation has "
        "to move, divided by that time, are of the bandwidth of a copy within the device's memory (1 = as fast as the "
        "copy; in brackets the middle half of the rounds). Contenders take turns; times are of CUDA events and include "
        "what the host takes to launch. Peers are measured by the bytes of zoo's operation.",
        "",
        *(f"- {key}: {value}" for key, value in raw["about"].items()),
        f"- copy: {raw['bandwidth'] / 1e9:.0f} GB/s, read and written bytes counted"
        if raw["bandwidth"]
        else "- copy: –",
        "",
        "## Checks",
        "",
        "Against the references on the CPU, bit for bit.",
        "",
        *(f"- {name}: {text}" for name, text in raw["checks"].items()),
        "",
        "## Times",
        "",
        "| workload | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for record in records:
        cells = [
            cell(record["seconds"][n], record["bytes"], raw["bandwidth"]) if n in record["seconds"] else "–"
            for n in names
        ]
        lines.append(f"| {record['name']} | " + " | ".join(cells) + " |")
    notes = [f"- {record['name']}: {record['note']}." for record in records if record["note"]]
    return "\n".join([*lines, *([""] if notes else []), *notes, *(["", *raw["skipped"]] if raw["skipped"] else []), ""])


def write(raw: dict[str, Any], target: Path = PAGE) -> None:
    """Write the page; what follows the heading Remarks stays."""
    old = target.read_text(encoding="utf-8") if target.exists() else ""
    _, heading, remarks = old.partition(REMARKS)
    target.write_text(page(raw) + (f"\n{heading}{remarks}" if heading else ""), encoding="utf-8")
