"""One contender in one fresh process (one of a pair at world size 2). Writes its figures as JSON."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.launch import answer
from benchmarks.process import reset_peak, status_bytes, warm_up
from benchmarks.turns import turn
from benchmarks.zero.contenders import CONTENDERS
from benchmarks.zero.workloads import Workload, workload_of


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
        with turn():
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
        "by_step": {"cpu": cpu, "wall": wall},
        "num_steps": num_steps,
        "rss_growth_bytes": peak - before,
        "losses": [float(loss) for loss in losses],
    }


def measure(spec: dict[str, Any], rank: int) -> Any:
    """Figures of what ``spec`` says, with "section", "contender", …"""
    section = spec["section"]
    if section == "step":
        return measure_step(spec, rank)
    if section == "host":
        from benchmarks.zero.host import measure_host

        return measure_host(spec["contender"])
    if section == "unit":
        from benchmarks.zero.host import measure_unit

        return measure_unit(spec["stage"])
    if section == "offload":
        from benchmarks.zero.offload import measure_offload

        return measure_offload(spec, rank)
    if section == "traffic":
        from benchmarks.zero.traffic import measure_traffic

        return measure_traffic(spec, rank)
    if section == "rows":
        from benchmarks.zero.rows import measure_rows

        return measure_rows(spec, rank)
    if section == "init":
        from benchmarks.zero.init import measure_init

        return measure_init(spec, rank)
    from benchmarks.zero.states import measure_states

    return measure_states(spec["stage"], rank)


if __name__ == "__main__":
    answer(measure)
