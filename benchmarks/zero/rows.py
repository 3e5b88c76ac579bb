"""``python -m benchmarks.zero.rows``: gradients of an embedding as rows and whole, bytes and CPU time of a step.

2 gloo processes train a table and a small layer on it. All contenders live in the same processes and take turns step by
step, so that whatever else the machine does meets them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Spread, facts, machine, table, write_page
from benchmarks.launch import run_ranks
from benchmarks.zero.workloads import WORKER
from torch import nn

NUM_ROWS, WIDTH, NUM_TOKENS = 50_000, 64, 512
STAGES = (0, 1, 2, 3)
# Options of the optimizer, of the layer.
CONTENDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {}),
    "whole, `sparse=True`": ({}, {"sparse": True}),
    "rows": ({"sparse_gradients": True}, {}),
    "rows, `sparse=True`": ({"sparse_gradients": True}, {"sparse": True}),
}
PAGE = Path(__file__).with_name("ROWS.md")


class Words(nn.Module):
    """A table, and a layer that reads it."""

    def __init__(self, num_rows: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(num_rows, WIDTH, **options)
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.words(tokens)))  # type: ignore[no-any-return]


def measure_rows(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """By contender: bytes that this rank sends in a step, CPU seconds of each step, a digest of the parameters."""
    from zoo.optim import AdamW
    from zoo.zero import ZeroOptimizer

    torch.set_num_threads(1)
    made = {}
    for name, (options, layer) in CONTENDERS.items():
        model = Words(spec["num_rows"], **layer)
        made[name] = (
            model,
            ZeroOptimizer(
                model, stage=spec["stage"], optimizer=AdamW, lr=1e-3, param_persistence_threshold=0, **options
            ),
        )
    found: dict[str, Any] = {name: {"cpu_s": []} for name in made}
    for step in range(spec["num_steps"]):
        random = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(spec["num_rows"], (NUM_TOKENS,), generator=random)
        turn = list(made)[step % len(made) :] + list(made)[: step % len(made)]
        for name in turn:
            model, optimizer = made[name]
            optimizer.comm.log.reset()
            began = time.process_time()
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= spec["num_warmup"]:
                found[name]["cpu_s"].append(time.process_time() - began)
            found[name]["bytes"] = optimizer.comm.log.wire_bytes
    for name, (_, optimizer) in made.items():
        values = optimizer.consolidated_parameters()["words.weight"]
        found[name]["digest"] = int(values.view(torch.int32).long().sum())
    return found


def measure(num_rows: int, num_steps: int) -> dict[int, list[dict[str, Any]]]:
    """By stage, the figures of each rank."""
    more = {"num_rows": num_rows, "num_steps": num_steps, "num_warmup": 3}
    return {stage: run_ranks(WORKER, {"section": "rows", "stage": stage, **more}, 2, timeout_s=300) for stage in STAGES}


def figures(raw: dict[int, list[dict[str, Any]]]) -> str:
    """One line a stage and contender; ratios are taken step by step."""
    lines = []
    for stage, ranks in raw.items():
        plain = [statistics.mean(pair) for pair in zip(*(r["whole"]["cpu_s"] for r in ranks), strict=True)]
        for name in CONTENDERS:
            mine = [statistics.mean(pair) for pair in zip(*(r[name]["cpu_s"] for r in ranks), strict=True)]
            ratios = statistics.quantiles([a / b for a, b in zip(mine, plain, strict=True)], n=4)
            sent = max(r[name]["bytes"] for r in ranks)
            if {r[name]["digest"] for r in ranks} != {ranks[0]["whole"]["digest"]}:
                raise RuntimeError(f"stage {stage}: {name} trains to other bits")
            lines.append([
                str(stage), name, f"{sent:,}", f"{sent / ranks[0]['whole']['bytes']:.3f}",
                f"{Spread(tuple(mine)).median * 1e3:.1f}", f"{ratios[1]:.2f} ({ratios[0]:.2f}–{ratios[2]:.2f})",
            ])  # fmt: skip
    header = ["stage", "gradients", "sent by a rank in a step, bytes", "of whole", "CPU, ms a rank", "of whole"]
    return table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero.rows")
    parser.add_argument("--steps", type=int, default=63)
    parser.add_argument("--quick", action="store_true", help="a small table, few steps: does it run")
    parser.add_argument("--write-results", action="store_true", help="write ROWS.md (its remarks are kept)")
    args = parser.parse_args()
    found = figures(measure(2000, 8) if args.quick else measure(NUM_ROWS, args.steps))
    print(found)
    if args.write_results:
        about = facts(machine(["torch"]))
        write_page(
            PAGE,
            "# Gradients of an embedding as rows\n\nWritten by `python -m benchmarks.zero.rows`, medians of "
            f"{args.steps - 3} steps; ratios are taken step by step (median, quartiles).\n\n{about}\n\n2 gloo "
            f"processes of one thread train a table of {NUM_ROWS:,} x {WIDTH} in fp32 and a small layer with "
            f"`zoo.optim.AdamW` on {NUM_TOKENS} drawn tokens each. A step is forward, backward and update. All train "
            "to the same bits, which is checked. At stages 1 and 2 new parameters are gathered whole, at stage 3 all "
            f"parameters are gathered for forward.\n\n{found}",
        )


if __name__ == "__main__":
    main()
