"""``python -m benchmarks.zero.traffic``: what ZeRO++ and MiCS send in a step, and what sending less costs.

Bytes are counted on simulated ranks, 2 nodes of 4, where the model really trains; they do not depend on the machine.
Seconds are those of 2 gloo processes that are declared two nodes, each contender in fresh processes in every round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT, Spread, facts, keep, machine, table
from benchmarks.common import write_page as write
from benchmarks.launch import ContenderError, run_ranks
from benchmarks.zero.contenders import Step, engine_step, import_deepspeed, train_step
from benchmarks.zero.workloads import GPT, WORKER, WORKLOADS, Workload, byte_batch, cross_entropy

NODES, LOCAL = 2, 4
CONTEXT = 16  # tokens change no byte of what is sent
LR = 1e-4
PAGE = Path(__file__).with_name("TRAFFIC.md")
RAW = ROOT / "build" / "benchmarks" / "traffic.json"

PLAIN = {"max_live_parameters": 0, "param_persistence_threshold": 0}
QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
PLUS = {"stage": 3, "zero_hpz_partition_size": LOCAL, **QUANTISED}
TWO_STAGES = {"mics_hierarchical_params_gather": True}

# Bytes of int8 and of int4 with an fp32 scale for 256 elements, over those of bf16.
BYTE, NIBBLE = (1 + 4 / 256) / 2, (1 / 2 + 4 / 256) / 2
N, L = NODES * LOCAL, LOCAL
FAR, NEAR, SHARD = (N - L) / N, (L - 1) / N, (NODES - 1) / NODES / L
# Options, and what a rank sends over M: (to other nodes, within its own), from the papers' sections.
PLACEMENTS: dict[str, tuple[dict[str, Any], tuple[float, float] | None]] = {
    "stage 0": ({"stage": 0, **PLAIN}, (2 * FAR, 2 * NEAR)),
    "stage 0, `hierarchical_all_reduce`": (
        {"stage": 0, "hierarchical_all_reduce": True, **PLAIN}, (2 * SHARD, 2 * (L - 1) / L),
    ),
    "stage 3": ({"stage": 3, **PLAIN}, (3 * FAR, 3 * NEAR)),
    "stage 3, hpZ": ({"stage": 3, "zero_hpz_partition_size": L, **PLAIN}, (2 * FAR, 2 * NEAR + (L - 1) / L)),
    "stage 3, qwZ": (
        {"stage": 3, "zero_quantized_weights": True, **PLAIN}, ((2 * BYTE + 1) * FAR, (2 * BYTE + 1) * NEAR),
    ),
    "stage 3, qgZ": (
        {"stage": 3, "zero_quantized_gradients": True, **PLAIN},
        (2 * FAR + NIBBLE * SHARD, 2 * NEAR + NIBBLE * (L - 1) / L),
    ),
    "stage 3, hpZ, qwZ and qgZ": (
        {**PLUS, **PLAIN}, (BYTE * FAR + NIBBLE * SHARD, BYTE * NEAR + (1 + NIBBLE) * (L - 1) / L),
    ),
    "the same, `mics_hierarchical_params_gather`": (
        {**PLUS, **TWO_STAGES, **PLAIN}, ((BYTE + NIBBLE) * SHARD, (BYTE + 1 + NIBBLE) * (L - 1) / L),
    ),
    "stage 3, MiCS 4": ({"stage": 3, "mics_shard_size": L, **PLAIN}, (2 * SHARD, 3 * (L - 1) / L)),
    "stage 3, `mics_hierarchical_params_gather`": (
        {"stage": 3, **TWO_STAGES, **PLAIN}, (2 * SHARD + FAR, 2 * (L - 1) / L + NEAR),
    ),
    "stage 3, defaults of the rest": ({"stage": 3}, None),
    "hpZ, qwZ and qgZ, defaults of the rest": (PLUS, None),
}  # fmt: skip

# Library, and options beside stage 3.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 3": ("zoo", {}),
    "qwZ": ("zoo", {"zero_quantized_weights": True}),
    "qgZ int4": ("zoo", {"zero_quantized_gradients": True}),
    "qwZ and qgZ int4": ("zoo", QUANTISED),
    "DeepSpeed stage 3": ("deepspeed", {}),
    "DeepSpeed qwZ": ("deepspeed", {"zero_quantized_weights": True}),
    "DeepSpeed qgZ": ("deepspeed", {"zero_quantized_gradients": True}),
}


def count(options: dict[str, Any], num_layers: int, width: int) -> dict[str, float]:
    """Bytes that a rank sends in the second step of a GPT in bf16, the same on every rank, and what was forecast."""
    from zoo import sim
    from zoo.zero import ZeroOptimizer

    def fn(rank: int) -> dict[str, float]:
        torch.manual_seed(0)
        model = GPT(num_layers, width, CONTEXT).bfloat16()
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        optimizer = ZeroOptimizer(model, optimizer=torch.optim.SGD, lr=LR, ranks_per_node=LOCAL, **options)
        for step in range(2):
            optimizer.comm.log.reset()
            x, y = byte_batch(rank, step, 1, CONTEXT)
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        rows, forecast = optimizer.comm.log.ops.values(), optimizer.forecast()
        return {
            "M": size,
            "all": sum(r.wire_bytes for r in rows), "intra": sum(r.intra_bytes for r in rows),
            "inter": sum(r.inter_bytes for r in rows), "forecast": sum(forecast.wire_bytes.values()),
            "forecast_inter": sum(forecast.inter_bytes.values()),
        }  # fmt: skip

    first, *others = sim.run(NODES * LOCAL, fn)
    if any(other != first for other in others):
        raise RuntimeError(f"the ranks send different numbers of bytes: {[first, *others]}")
    return first


def build_zoo(workload: Workload, options: dict[str, Any]) -> tuple[Step, Any]:
    from zoo.optim import AdamW
    from zoo.zero import ZeroOptimizer

    model = workload.model()
    optimizer = ZeroOptimizer(model, stage=3, optimizer=AdamW, lr=LR, ranks_per_node=1, **PLAIN, **options)
    return train_step(model, optimizer, workload), optimizer.comm.log


def build_deepspeed(workload: Workload, options: dict[str, Any]) -> tuple[Step, Any]:
    deepspeed = import_deepspeed()
    zero = {"stage": 3, "stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0, **options}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero,
        "steps_per_print": 10**9, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    model = workload.model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return engine_step(engine, workload), None


def measure_traffic(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Median wall and CPU time of a step on this rank, its losses, and of zoo's the bytes that it sends."""
    library, options = CONTENDERS[spec["contender"]]
    workload = WORKLOADS[spec["workload"]]
    step, log = (build_zoo if library == "zoo" else build_deepspeed)(workload, options)
    wall, cpu, losses = [], [], []
    for number in range(spec["num_warmup"] + spec["num_steps"]):
        if log is not None:
            log.reset()
        began, cpu_began = time.perf_counter(), time.process_time()
        losses.append(float(step(workload.batch(rank, number))))
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    first = spec["num_warmup"]
    return {
        "wall_s": statistics.median(wall[first:]), "cpu_s": statistics.median(cpu[first:]), "losses": losses,
        "inter_bytes": log.inter_bytes if log is not None else None,
    }  # fmt: skip


def measure(rounds: int, quick: bool) -> dict[str, Any]:
    """Everything: the bytes once, the seconds in interleaved rounds."""
    layers, width = (2, 64) if quick else (12, 256)
    raw: dict[str, Any] = {"machine": machine(["torch", "deepspeed"]), "rounds": [], "failures": {}, "bytes": {}}
    for name, (options, _) in PLACEMENTS.items():
        print(f"\rbytes: {name:<50}", end="", file=sys.stderr, flush=True)
        raw["bytes"][name] = count(options, layers, width)
    names = [name for name, (library, _) in CONTENDERS.items() if library == "zoo" or not quick]
    more = {"workload": "tiny" if quick else "wide", "num_warmup": 1 if quick else 2, "num_steps": 2 if quick else 7}
    for number in range(rounds):
        figures: dict[str, Any] = {}
        raw["rounds"].append(figures)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in raw["failures"]:
                continue
            print(f"\rround {number + 1}/{rounds} {name:<50}", end="", file=sys.stderr, flush=True)
            try:
                figures[name] = run_ranks(WORKER, {"section": "traffic", "contender": name, **more}, 2, timeout_s=240)
            except ContenderError as error:
                raw["failures"][name] = error.last
                print(f"\n{name} failed: {error}", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return raw


def bytes_table(raw: dict[str, Any]) -> str:
    """Bytes of a step by placement, measured, predicted and forecast."""
    rows = []
    far = raw["bytes"]["stage 3"]["inter"]
    for name, (_, predicted) in PLACEMENTS.items():
        got = raw["bytes"][name]
        size = got["M"]
        equal = (got["forecast"], got["forecast_inter"]) == (got["all"], got["inter"])
        rows.append([
            name, *(f"{got[key]:,}" for key in ("all", "intra", "inter")),
            *(f"{got[key] / size:.4f}" for key in ("all", "intra", "inter")),
            f"{sum(predicted):.4f}, {predicted[0]:.4f}" if predicted else "",
            "equal" if equal else f"{got['forecast']:,}, {got['forecast_inter']:,}", f"{got['inter'] / far:.3f}",
        ])  # fmt: skip
    header = ["", "all, bytes", "within the node", "to other nodes", "all/M", "within/M", "to others/M",
              "papers: all/M, to others/M", "`forecast()`", "to others, of stage 3's"]  # fmt: skip
    return table(header, rows)


def pays_below(plain: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Bytes/s of a rank's link below which ``other`` is faster; negative if it costs no time at all.

    A step takes its CPU seconds, in which loopback's copying is included, and its bytes ÷ bandwidth, one after the
    other: t' + b'/B < t + b/B. CPU time, because that of one thread a rank is on the step's path and does not change
    with who else uses the machine.
    """
    seconds = statistics.mean(f["cpu_s"] for f in other) - statistics.mean(f["cpu_s"] for f in plain)
    return (plain[0]["inter_bytes"] - other[0]["inter_bytes"]) / seconds


def seconds_table(raw: dict[str, Any]) -> str:
    """Seconds of a step; the slower rank's wall time, the mean of the ranks' CPU time."""
    rows = []
    for name, (library, _) in CONTENDERS.items():
        have = [r for r in raw["rounds"] if name in r and "stage 3" in r]
        if not have:
            rows.append([name, f"failed: {raw['failures'].get(name, 'not run')}", "", "", "", "", ""])
            continue
        wall = [max(f["wall_s"] for f in r[name]) for r in have]
        cpu = [statistics.mean(f["cpu_s"] for f in r[name]) for r in have]
        ratio = [c / statistics.mean(f["cpu_s"] for f in r["stage 3"]) for c, r in zip(cpu, have, strict=True)]
        below, sent = "", ""
        if library == "zoo":
            sent = f"{have[0][name][0]['inter_bytes'] / 1e6:.1f}"
        if library == "zoo" and name != "stage 3":
            limits = [pays_below(r["stage 3"], r[name]) for r in have]
            low = [limit * 8e-9 for limit in limits]
            below = Spread(tuple(low)).text(1) if min(low) > 0 else "at any: no dearer in some round"
        rows.append([
            name, Spread(tuple(wall)).text(3), Spread(tuple(cpu)).text(3), Spread(tuple(ratio)).text(), sent, below,
            f"{statistics.mean(f['losses'][-1] for f in have[0][name]):.4f}",
        ])  # fmt: skip
    header = ["", "step, s", "CPU, s a rank", "CPU of stage 3's", "MB sent by a rank", "pays below, Gbit/s a rank",
              "loss of the last step"]  # fmt: skip
    return table(header, rows)


def write_page(raw: dict[str, Any], page: Path) -> None:
    """The page; what stands under "Remarks" stays."""
    about = facts(raw["machine"])
    size = raw["bytes"]["stage 3"]["M"]
    write(
        page,
        "# ZeRO++ and MiCS: what a step sends, and what sending less costs\n\nWritten by `python -m benchmarks.zero."
        f"traffic`, {len(raw['rounds'])} rounds; medians (lowest–highest).\n\n{about}\n\n"
        f"## Bytes\n\n{NODES} nodes of {LOCAL} simulated ranks train a GPT of {size // 2:,} parameters in bf16 (M = "
        f"{size:,} bytes); bytes that each rank sends in its second step, by `optimizer.comm.log`. Nothing is kept "
        "gathered between forward and backward (`max_live_parameters=0`) and no parameter is resident "
        "(`param_persistence_threshold=0`), except in the last two lines. A message counts as going straight to its "
        f"receiver.\n\n{bytes_table(raw)}\n\n## Seconds\n\n2 gloo processes of one thread, each declared a node "
        "(`ranks_per_node=1`), over loopback; 38 M parameters in bf16, batch 1 x 128 a rank, the same two options. "
        f"hpZ has no meaning here: a node of one rank has nobody to gather from.\n\n{seconds_table(raw)}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero.traffic")
    parser.add_argument("--rounds", type=int, default=3, help="0: bytes alone")
    parser.add_argument("--quick", action="store_true", help="small models, few steps: does it run")
    parser.add_argument("--report-only", action="store_true", help="the tables from the last raw figures")
    parser.add_argument("--write-results", action="store_true", help="write TRAFFIC.md (its remarks are kept)")
    args = parser.parse_args()
    raw = json.loads(RAW.read_text()) if args.report_only else measure(args.rounds, args.quick)
    if not args.report_only and not args.quick:
        keep(raw, RAW)
    print(bytes_table(raw), seconds_table(raw), sep="\n\n")
    if args.write_results:
        write_page(raw, PAGE)


if __name__ == "__main__":
    main()
