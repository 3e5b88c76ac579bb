"""A compiled step at ZeRO stage 3 on two ranks: CPU time, the first step, and what is lost to compiling.

::

    python -m benchmarks.compile                    # every contender
    python -m benchmarks.compile --quick            # tiny models: does it run
    python -m benchmarks.compile --write-results    # also write RESULTS.md

Two ranks over gloo on one machine, one thread each, fp32, torch's AdamW, 2 sequences of 128 a rank. A GPT of 6 blocks
of 384 over 8,192 words, and a Llama of transformers of the same size. zoo: under hooks, uncompiled; zoo_blocks: its
units compiled; zoo_whole: one graph; fsdp2 and fsdp2_blocks: torch's fully_shard on each block and the model, without
and with each block compiled. Contenders run in turns, in fresh processes, with an empty cache of compiled code at the
first turn of each (*first step*) and a full one later (*second start*). A figure is the median over turns of the median
over steps, and a ratio the median over turns of ratios within a turn. *loss*: the largest difference from zoo's
uncompiled losses within the steps, over the loss.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import facts, machine, remarks, table
from benchmarks.launch import ContenderError, run_ranks

CONTENDERS = ("zoo", "zoo_blocks", "zoo_whole", "fsdp2", "fsdp2_blocks")
SIZE = {"width": 384, "blocks": 6, "words": 8192, "length": 128}
TINY = {"width": 16, "blocks": 2, "words": 64, "length": 16}
WORKER, RESULTS = "benchmarks.compile.worker", Path(__file__).with_name("RESULTS.md")


def turn(model: str, size: dict[str, int], bf16: bool, steps: int, caches: Path) -> dict[str, Any]:
    """Of each contender the figures, or why it has none."""
    found: dict[str, Any] = {}
    for contender in CONTENDERS:
        spec = {**size, "contender": contender, "model": model, "steps": steps, "bf16": bf16}
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / contender / model)
        try:
            ranks = run_ranks(WORKER, spec, 2, timeout_s=900)
        except ContenderError as error:
            found[contender] = error.last[:120]
            continue
        found[contender] = {key: max(rank[key] for rank in ranks) for key in ("cpu_s", "wall_s", "first_s")}
        found[contender]["losses"] = ranks[0]["losses"]
    return found


def rows_of(turns: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each contender."""
    rows = []
    for contender in CONTENDERS:
        mine = [(t[contender], t["zoo"]) for t in turns if isinstance(t[contender], dict)]
        if not mine:
            rows.append([contender, str(turns[0][contender]), *[""] * 5])
            continue
        cpu = statistics.median(found["cpu_s"] for found, _ in mine)
        ratios = [statistics.median(found[key] / base[key] for found, base in mine) for key in ("cpu_s", "wall_s")]
        firsts = [found["first_s"] for found, _ in mine]
        later = f"{statistics.median(firsts[1:]):.1f}" if len(firsts) > 1 else ""
        differs = max(
            abs(a - b) / abs(b) for found, base in mine for a, b in zip(found["losses"], base["losses"], strict=True)
        )
        rows.append(
            [contender, f"{cpu * 1e3:.0f}", *(f"{r:.2f}" for r in ratios), f"{firsts[0]:.1f}", later, f"{differs:.1e}"]
        )
    return rows


def main() -> None:
    """See the file's docstring."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=about)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="tiny models, one turn")
    parser.add_argument("--models", nargs="+", default=["gpt", "llama"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    parts, caches = [], Path(tempfile.mkdtemp())
    try:
        for model in args.models:
            size, number = (TINY, 1) if args.quick else (SIZE, args.turns)
            turns = [turn(model, size, args.bf16, args.steps, caches) for _ in range(number)]
            header = [model, "CPU ms a rank", "CPU / zoo", "wall / zoo", "first step s", "second start s", "loss"]
            parts.append(f"## {model}{', bf16' if args.bf16 else ''}\n\n{table(header, rows_of(turns))}")
            print(parts[-1], flush=True)
    finally:
        shutil.rmtree(caches, ignore_errors=True)
    if args.write_results:
        first, _, rest = (__doc__ or "").partition("::")
        told = rest.rpartition("RESULTS.md\n")[2].strip()
        text = "\n\n".join(parts)
        RESULTS.write_text(
            f"# Compiled steps at stage 3\n\nWritten by `python -m benchmarks.compile`. {first.strip()}\n\n"
            f"{facts(machine(('torch', 'transformers')))}\n\n{told}\n\n{text}\n\n{remarks(RESULTS)}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
