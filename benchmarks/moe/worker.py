"""One rank of a measurement, in a fresh process of one gloo group. Writes its figures as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.moe import memory, parallel, speed
from benchmarks.moe.shapes import Shape


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """What ``spec`` asks for."""
    shape = Shape(**spec["shape"])
    if spec["section"] == "speed":
        return speed.measure(shape, spec["routings"], spec["rounds"], spec["threads"], spec["names"])
    if spec["section"] == "memory":
        return memory.measure(shape, spec["routing"], spec["name"])
    return parallel.measure(shape, spec["routing"], spec["rounds"], spec["names"], rank)


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
