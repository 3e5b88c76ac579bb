"""One rank of a measurement, in a fresh process of one gloo group. Writes its figures as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.pipe import step, timeline
from benchmarks.pipe.model import Shape


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """What ``spec`` asks for."""
    if spec["section"] == "sleeps":
        return timeline.measure_sleeps(spec["schedule"], spec["micro_batches"], spec["rounds"])
    shape = Shape(**spec["shape"])
    if spec["section"] == "timeline":
        return timeline.measure(shape, spec["schedule"], spec["rounds"])
    if spec["section"] == "memory":
        return step.measure_memory(shape, spec["name"])
    return step.measure(shape, spec["rounds"], spec["names"], rank)


def main() -> None:
    """``worker SPEC OUT``: figures go to OUT/rank<r>.json."""
    rank, size, out = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=size)
    figures = measure(json.loads(sys.argv[1]), rank)
    (out / f"rank{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # some libraries hang or complain at exit; nothing is left to do


if __name__ == "__main__":
    main()
