"""Compiled steps at stage 3 of two ranks that are connected by a slow cable: seconds of a step against zoo's uncompiled
ones and against torch's FSDP2, and what it saves to cast parameters before they travel.

::

    python -m benchmarks.compile.cable                    # every contender
    python -m benchmarks.compile.cable --quick            # tiny models: does it run
    python -m benchmarks.compile.cable --write-results    # also write CABLE.md

Two network namespaces with a cable of limited rate between them, a rank of gloo with one thread in each, torch's
AdamW, 2 sequences of 128 a rank. A GPT of 4 blocks of 256 over 4,096 words. zoo: under hooks, uncompiled; zoo_whole:
one graph; zoo_fused: as zoo, and each rank casts its shard of what the model casts before it reads it
(``Precision(gather=use_dtypes(...))``), both under autocast and of 8 tokens a sequence, because not all CPUs have
products in bf16, and these would be all that is measured, and over 256 words, because an embedding's table is read as
it is: so 0.51 of the bytes are gathered; fsdp2_blocks: torch's fully_shard on each block and the
model, each block compiled. Contenders run in turns, in fresh processes. A figure is the median over turns of the median
over steps, and a ratio the median over turns of ratios within a turn, with the least and the largest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import facts, machine, remarks, table
from benchmarks.launch import start
from benchmarks.onebit.link import LinkError, cable

RESULTS = Path(__file__).with_name("CABLE.md")
SIZE = {"width": 256, "blocks": 4, "words": 4096, "length": 128}
TINY = {"width": 16, "blocks": 2, "words": 64, "length": 16}
FUSED = {"length": 8, "words": 256}
FP32, AUTOCAST = "fp32", "autocast to bf16"
JOBS = {
    (500, FP32): ("zoo", "zoo_whole", "fsdp2_blocks"),
    (100, AUTOCAST): ("zoo", "zoo_fused"),
}
"""Who runs, by Mbit/s and dtype."""
WANTED = (
    (500, FP32, "zoo_whole", "zoo", 1.0),
    (500, FP32, "zoo_whole", "fsdp2_blocks", 0.6),
    (100, AUTOCAST, "zoo_fused", "zoo", 0.75),
)
"""Mbit/s, dtype, whose seconds over whose, and what is asked for."""

Found = dict[tuple[int, str, str], list[float]]


def measure(size: dict[str, int], turns: int, steps: int, only: int | None) -> Found:
    """Seconds of a step by rate, dtype and contender, one for each turn."""
    found: Found = {}
    caches = Path(tempfile.mkdtemp())
    try:
        jobs = [(*job, contenders) for job, contenders in JOBS.items() if only in (None, job[0])]
        for turn, (mbit, dtype, contenders) in itertools.product(range(turns), jobs):
            for contender in contenders:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / f"{contender}-{mbit}")
                spec = {
                    **size, "contender": contender, "model": "gpt", "steps": steps, "bf16": False,
                    "autocast": dtype == AUTOCAST, **(FUSED if dtype == AUTOCAST else {}),
                }  # fmt: skip
                with cable(mbit) as prefixes:
                    arguments = ["--rank", json.dumps(spec)]
                    figures = start("benchmarks.compile.cable", arguments, prefixes, "10.77.0.1", "cable")
                found.setdefault((mbit, dtype, contender), []).append(figures["wall_s"])
                print(f"turn {turn}: {mbit} Mbit/s, {dtype}, {contender}: {figures['wall_s']:.3f} s", flush=True)
    finally:
        shutil.rmtree(caches, ignore_errors=True)
    return found


def as_rank(spec: dict[str, Any]) -> None:
    """One rank; the first prints its figures."""
    import torch
    import torch.distributed as dist
    from benchmarks.compile.worker import measure as measured

    # Files that inductor writes have the number of their process, of which each end of the cable has its own.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = measured(spec, dist.get_rank())
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # some libraries hang at exit; nothing is left to do


def tables(found: Found) -> str:
    """Seconds, and the ratios that are asked for."""
    seconds = [
        [f"{mbit} Mbit/s", dtype, contender, f"{statistics.median(values):.3f}"]
        for (mbit, dtype, contender), values in found.items()
    ]
    ratios = []
    for mbit, dtype, one, other, wanted in WANTED:
        if (mbit, dtype, one) not in found:
            continue
        each = sorted(a / b for a, b in zip(found[mbit, dtype, one], found[mbit, dtype, other], strict=True))
        spread = f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"
        ratios.append([f"{mbit} Mbit/s", dtype, f"{one} / {other}", spread, f"≤ {wanted}"])
    return "\n\n".join(
        (
            table(["cable", "computes in", "ratio of seconds", "found", "asked"], ratios),
            table(["cable", "computes in", "contender", "seconds of a step"], seconds),
        )
    )


def main() -> None:
    """See the file's docstring."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile.cable", description=about)
    parser.add_argument("--mbit", type=int, choices=[mbit for mbit, _ in JOBS], help="one of the cables alone")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny models, one turn")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    if args.rank is not None:
        as_rank(args.rank)
    size, turns = (TINY, 1) if args.quick else (SIZE, args.turns)
    try:
        text = tables(measure(size, turns, args.steps, args.mbit))
    except LinkError as error:
        sys.exit(f"no cable: {error}")
    print(text, flush=True)
    if args.write_results:
        told = (__doc__ or "").rpartition("CABLE.md\n")[2].strip()
        RESULTS.write_text(
            f"# Compiled steps over a cable\n\nWritten by `python -m benchmarks.compile.cable`.\n\n"
            f"{facts(machine(('torch',)))}\n\n{told}\n\n{text}\n\n{remarks(RESULTS)}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
