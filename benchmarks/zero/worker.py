"""One contender in one fresh process (one of a pair at world size 2). Writes its figures as JSON."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.zero.contenders import CONTENDERS
from benchmarks.zero.workloads import Workload, workload_of


def status_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes, e.g. VmRSS or VmHWM."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def reset_peak() -> int:
    """Start a new peak of the resident set; returns its size now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def join(rank: int, size: int, store: str) -> None:
    """One gloo group over a file; the unsharded processes use it for a barrier only."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def warm_up() -> None:
    """Let libraries allocate what they keep: arithmetic, backward, an optimizer step and collectives, all small."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    tensor = torch.ones(4096)
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(torch.empty(4096 * dist.get_world_size()), tensor)
    dist.barrier()


def agree_steps(workload: Workload, step_s: float, budget_s: float) -> int:
    """The same number of timed steps on every rank: fewer where a step is slow, at least four. Also the barrier."""
    wanted = torch.tensor([max(4, min(workload.num_steps, int(budget_s / step_s)))])
    dist.broadcast(wanted, 0)
    dist.barrier()
    return int(wanted)


def measure_step(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """CPU and wall time of a training step, the losses, and the growth of the resident set."""
    workload = workload_of(spec["workload"])
    build = CONTENDERS[spec["contender"]].load()
    warm_up()
    before = reset_peak()
    step = build(workload)
    losses: list[torch.Tensor] = []
    cpu: list[float] = []
    wall: list[float] = []

    def timed_step() -> None:
        batch = workload.batch(rank, len(losses))
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        losses.append(step(batch))
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)

    for _ in range(workload.num_warmup):
        timed_step()
    num_steps = agree_steps(workload, wall[-1], spec["budget_s"])
    cpu.clear()
    wall.clear()
    for _ in range(num_steps):
        timed_step()
    peak = status_bytes("VmHWM")
    return {
        "cpu_s": sum(cpu) / num_steps,
        "wall_s": sum(wall) / num_steps,
        "num_steps": num_steps,
        "rss_growth_bytes": peak - before,
        "losses": [float(loss) for loss in losses],
    }


def measure(spec: dict[str, Any], out: Path, rank: int, size: int) -> None:
    """Figures of what ``spec`` says, with "section", "contender", …, go to OUT/rank<r>.json. Ends the process."""
    join(rank, size, str(out / "store"))
    if spec["section"] == "step":
        figures = measure_step(spec, rank)
    elif spec["section"] == "host":
        from benchmarks.zero.host import measure_host

        figures = measure_host(spec["contender"])
    elif spec["section"] == "unit":
        from benchmarks.zero.host import measure_unit

        figures = measure_unit(spec["stage"])
    elif spec["section"] == "offload":
        from benchmarks.zero.offload import measure_offload

        figures = measure_offload(spec, rank)
    elif spec["section"] == "traffic":
        from benchmarks.zero.traffic import measure_traffic

        figures = measure_traffic(spec, rank)
    elif spec["section"] == "rows":
        from benchmarks.zero.rows import measure_rows

        figures = measure_rows(spec, rank)
    elif spec["section"] == "init":
        from benchmarks.zero.init import measure_init

        figures = measure_init(spec, rank)
    else:
        from benchmarks.zero.states import measure_states

        figures = measure_states(spec["stage"], rank)
    (out / f"rank{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # some libraries hang or complain at exit; nothing is left to do


def serve() -> None:
    """For each line of stdin, a JSON [spec, size, OUT], fork the ranks, and write a line when all of them are over.

    Imports take longer than short measurements, and are made once here. A rank is a process of its own all the same.
    """
    import torch.nn.parallel

    import zoo.zero  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        spec, size, out = json.loads(line)
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                with (Path(out) / f"log{rank}").open("w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
                os.environ["LOCAL_WORLD_SIZE"] = str(size)
                try:
                    measure(spec, Path(out), rank, size)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        print("over", flush=True)


def main() -> None:
    """``worker SPEC OUT`` measures as one rank; ``worker --serve`` see :func:`serve`."""
    if sys.argv[1] == "--serve":
        serve()
        return
    measure(json.loads(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


if __name__ == "__main__":
    main()
