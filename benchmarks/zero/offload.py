"""``python -m benchmarks.zero.offload``: a training step with its states on the host and on NVMe, beside DeepSpeed's.

The model is a GPT of 38 M parameters in bf16 with fp32 masters and moments, one process, one thread. Every contender of
every round is a fresh process; the rates of the device are measured in the process that is judged by them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT, Spread, facts, keep, machine, table, write_page
from benchmarks.launch import ContenderError, run_ranks
from benchmarks.zero.workloads import WORKER, WORKLOADS, Workload

LR = 1e-4
AIO = {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True}
PAGE = Path(__file__).with_name("OFFLOAD.md")
RAW = ROOT / "build" / "benchmarks" / "offload.json"

CLIP_NORM = 1.0
# (library, optimizer states, parameters, when the update runs; "clipped": in the step, after clipping by the norm)
CONTENDERS: dict[str, tuple[str, str, str, str]] = {
    "zoo-memory": ("zoo", "none", "none", "step"),
    "zoo-cpu": ("zoo", "cpu", "cpu", "step"),
    "ds-cpu": ("deepspeed", "cpu", "none", "step"),
    "ds-cpu-all": ("deepspeed", "cpu", "cpu", "step"),
    "zoo-nvme": ("zoo", "nvme", "none", "step"),
    "zoo-nvme-early": ("zoo", "nvme", "none", "backward"),
    "ds-nvme": ("deepspeed", "nvme", "none", "step"),
    "zoo-nvme-clip": ("zoo", "nvme", "none", "clipped"),
    "ds-nvme-clip": ("deepspeed", "nvme", "none", "clipped"),
    "zoo-nvme-all": ("zoo", "nvme", "nvme", "step"),
    "zoo-nvme-all-early": ("zoo", "nvme", "nvme", "backward"),
    "ds-nvme-all": ("deepspeed", "nvme", "nvme", "step"),
}
PEERS = {
    "zoo-cpu": "ds-cpu-all", "zoo-nvme": "ds-nvme", "zoo-nvme-early": "ds-nvme", "zoo-nvme-clip": "ds-nvme-clip",
    "zoo-nvme-all": "ds-nvme-all", "zoo-nvme-all-early": "ds-nvme-all",
}  # fmt: skip


def offload_section(device: str, folder: str, **more: Any) -> dict[str, Any]:
    """A section of ``zero_optimization``."""
    return {"device": device, **({"nvme_path": folder} if device == "nvme" else {}), **more}


def build_zoo(
    workload: Workload, states: str, parameters: str, folder: str, when: str
) -> tuple[Callable[[Any], Any], Any, Any]:
    from zoo.optim import AdamW
    from zoo.zero import Stage3Optimizer

    model = workload.model()
    optimizer = Stage3Optimizer(
        model, optimizer=AdamW, lr=LR, offload_optimizer=offload_section(states, folder),
        offload_param=offload_section(parameters, folder, max_in_cpu=0),
        update_in_backward=when == "backward", clip_norm=CLIP_NORM if when == "clipped" else 0.0,
    )  # fmt: skip

    updates: list[dict[str, float]] = []

    def step(batch: Any) -> torch.Tensor:
        loss = workload.loss(model(batch[0]), batch[1])
        loss.backward()
        before, began = optimizer.nvme_traffic(), time.perf_counter()
        optimizer.step()
        seconds, after = time.perf_counter() - began, optimizer.nvme_traffic()
        updates.append({"wall_s": seconds, "read": after[0] - before[0], "written": after[1] - before[1]})
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer, updates


def build_deepspeed(workload: Workload, states: str, parameters: str, folder: str, when: str) -> Callable[[Any], Any]:
    from benchmarks.zero.contenders import engine_step, import_deepspeed

    deepspeed = import_deepspeed()
    largest = 2**21  # more than any parameter of the model
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": 2**22, "stage3_max_live_parameters": 2**22}
    pipelines = {"pipeline_read": True, "pipeline_write": True} if states == "nvme" else {}
    zero["offload_optimizer"] = offload_section(states, folder, buffer_count=16, **pipelines)
    if parameters != "none":
        zero["offload_param"] = offload_section(parameters, folder, buffer_count=100, buffer_size=largest, max_in_cpu=0)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": 10**9,
        "gradient_clipping": CLIP_NORM if when == "clipped" else 0.0, "bf16": {"enabled": True}, "aio": AIO,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    }  # fmt: skip
    model = workload.model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return engine_step(engine, workload)


def rates(folder: str, num_bytes: int = 256 << 20) -> dict[str, float]:
    """Bytes a second of the device for reading, for writing, and for both at once (their sum), from pool memory."""
    from zoo.io import Handle

    found: dict[str, list[float]] = {"read": [], "write": [], "both": []}
    with Handle() as handle, tempfile.TemporaryDirectory(dir=folder) as inside:
        one, two = (handle.empty(num_bytes, dtype=torch.uint8).zero_() for _ in range(2))
        paths = [f"{inside}/{name}" for name in "ab"]
        for path, tensor in zip(paths, (one, two), strict=True):
            handle.write(tensor, path)
        for _ in range(3):
            began = time.perf_counter()
            handle.pread(one, paths[0])
            found["read"].append(num_bytes / (time.perf_counter() - began))
            began = time.perf_counter()
            handle.pwrite(two, paths[1])
            found["write"].append(num_bytes / (time.perf_counter() - began))
            began = time.perf_counter()
            futures = [handle.async_pread(one, paths[0]), handle.async_pwrite(two, paths[1])]
            for future in futures:
                future.wait()
            found["both"].append(2 * num_bytes / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in found.items()}


def measure_offload(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Wall and CPU time of a step, its losses, and of zoo's the traffic and the rates of the device."""
    library, states, parameters, when = CONTENDERS[spec["contender"]]
    workload = WORKLOADS["wide"]
    with tempfile.TemporaryDirectory(dir=spec["folder"]) as folder:
        optimizer, updates = None, []
        if library == "zoo":
            step, optimizer, updates = build_zoo(workload, states, parameters, folder, when)
        else:
            step = build_deepspeed(workload, states, parameters, folder, when)
        losses, wall, cpu = [], [], []
        for number in range(workload.num_warmup + workload.num_steps):
            before = optimizer.nvme_traffic() if optimizer is not None else (0, 0)
            began, cpu_began = time.perf_counter(), time.process_time()
            losses.append(float(step(workload.batch(rank, number))))
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - cpu_began)
        found: dict[str, Any] = {
            "updates": updates[workload.num_warmup :],
            "losses": losses,
            "wall_s": wall[workload.num_warmup :],
            "cpu_s": cpu[workload.num_warmup :],
        }
        if optimizer is not None and states == "nvme":
            after = optimizer.nvme_traffic()
            found["read_bytes"], found["written_bytes"] = (a - b for a, b in zip(after, before, strict=True))
            found["rates"] = rates(folder)
        return found


def measure(rounds: int, folder: str, names: list[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {"machine": machine(["torch", "deepspeed"]), "rounds": [], "failures": {}}
    for number in range(rounds):
        figures: dict[str, Any] = {}
        raw["rounds"].append(figures)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            print(f"\rround {number + 1}/{rounds} {name:<20}", end="", file=sys.stderr, flush=True)
            try:
                spec = {"section": "offload", "contender": name, "folder": folder}
                figures[name] = run_ranks(WORKER, spec, 1, timeout_s=240)[0]
            except ContenderError as error:
                raw["failures"][name] = str(error)
                print(f"\n{name} failed: {error}", file=sys.stderr, flush=True)
            keep(raw, RAW)
    print(file=sys.stderr)
    return raw


def update_s(figures: dict[str, Any]) -> float:
    """Median time of the optimizer's step."""
    return statistics.median(update["wall_s"] for update in figures["updates"])


def device_s(rate: dict[str, float], read: float, written: float) -> float:
    """bytes ÷ bandwidth: reads and writes share the device while both go on."""
    together = min(read, written)
    alone = (read - together) / rate["read"] + (written - together) / rate["write"]
    return 2 * together / rate["both"] + alone


def over_floor(figures: dict[str, Any], memory: dict[str, Any], what: str) -> float:
    """Over max(compute, bytes ÷ bandwidth), where compute is that of the run in memory.

    Args:
        what: "step", "update" (what is inside of ``step()``), or "in order": the step over the backward and, after it,
            the update's limit, which is the limit of a step that has to know the norm of all gradients first.
    """
    step, inside = statistics.median(memory["wall_s"]), update_s(memory)
    if what == "step":
        floor = device_s(figures["rates"], figures["read_bytes"], figures["written_bytes"])
        return statistics.median(figures["wall_s"]) / max(step, floor)
    update = figures["updates"][-1]
    limit = max(inside, device_s(figures["rates"], update["read"], update["written"]))
    if what == "update":
        return update_s(figures) / limit
    return statistics.median(figures["wall_s"]) / (step - inside + limit)


def report(raw: dict[str, Any]) -> str:
    rows = []
    rounds = raw["rounds"]
    for name, (_, states, parameters, when) in CONTENDERS.items():
        have = [r for r in rounds if name in r]
        if not have and name not in raw["failures"]:
            continue
        if not have:
            rows.append([name, states, parameters, when, "failed", "", "", "", "", "", ""])
            continue
        seconds = [statistics.median(r[name]["wall_s"]) for r in have]
        cpu = [statistics.median(r[name]["cpu_s"]) for r in have]
        peer = PEERS.get(name)
        both = [r for r in have if peer in r] if peer else []
        ratio = [statistics.median(r[name]["wall_s"]) / statistics.median(r[peer]["wall_s"]) for r in both]
        judged = [(r[name], r["zoo-memory"]) for r in have if "rates" in r[name] and "zoo-memory" in r]
        step = [over_floor(*pair, "step") for pair in judged]
        update, ordered = (
            [over_floor(*pair, what) for pair in judged if when != "backward"] for what in ("update", "in order")
        )
        moved = [(r[name].get("read_bytes", 0) + r[name].get("written_bytes", 0)) / 1e6 for r in have]
        rows.append([
            name, states, parameters, when, Spread(tuple(seconds)).text(), Spread(tuple(cpu)).text(),
            *(Spread(tuple(values)).text() if values else "" for values in (ratio, step, update, ordered)),
            f"{moved[0]:.0f}" if moved[0] else "",
        ])  # fmt: skip
    header = ["contender", "states", "parameters", "update in", "step, s", "CPU, s", "of DeepSpeed's step",
              "step of max(compute, bytes ÷ rate)", "update of the same",
              "step of backward and the update's limit", "MB moved a step"]  # fmt: skip
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero.offload")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a directory on the device")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--write-results", action="store_true", help="write OFFLOAD.md (its remarks are kept)")
    args = parser.parse_args()
    raw = json.loads(RAW.read_text()) if args.report_only else measure(args.rounds, args.folder, args.only)
    text = report(raw)
    print(text)
    if args.write_results:
        about = facts(raw["machine"])
        write_page(
            PAGE,
            "# Offloading: a step with its states on the host and on NVMe\n\nWritten by `python -m benchmarks.zero."
            f"offload`, {len(raw['rounds'])} rounds; medians (lowest–highest). 38 M parameters in bf16, masters and "
            "two moments in fp32, stage 3, one process of one thread, batch 1 x 128.\n\n"
            f"{about}\n\n{text}",
        )


if __name__ == "__main__":
    main()
