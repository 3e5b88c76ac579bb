"""``python -m benchmarks.inference.rollout``: weights from training shards to parts that generate, and what it buys.

Two gloo processes train a Llama of SmolLM2-135M's shape at ZeRO stage 3. Contenders live in the same processes and take
turns, so that whatever else the machine does meets them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import facts, machine, table, write_page
from benchmarks.launch import answer, run_ranks

PAGE = Path(__file__).with_name("ROLLOUT.md")
WORKER = "benchmarks.inference.rollout"
RANKS, PROMPT, TOKENS = 2, 16, 8
TARGET = 1.2


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of CPU and of the clock by contender and turn, and bytes."""
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from zoo.inference import Rollout
    from zoo.zero import ZeroOptimizer

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=spec["layers"],
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = ZeroOptimizer(model, stage=3, lr=1e-4, param_persistence_threshold=0)
    shared, in_place = (Rollout(optimizer, placement=where) for where in ("tensor", "in_place"))
    moves = [_planned(move, rank) for move in shared._weights._moves]  # type: ignore[union-attr]
    buffers = [(torch.empty(sum(came)), torch.zeros(sum(went))) for came, went in moves]
    comm = optimizer.sharded.comm

    def bare() -> None:
        for (came, went), (out, given) in zip(moves, buffers, strict=True):
            dist.all_to_all_single(out, given, came, went)

    prompt = [torch.arange(3, 3 + PROMPT) + rank]
    contenders: dict[str, Any] = {
        "bare": bare,
        "refresh": shared.refresh,
        "tensor": lambda: shared.generate(prompt, max_new_tokens=TOKENS, end=[]),
        "in_place": lambda: in_place.generate(prompt, max_new_tokens=TOKENS, end=[]),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(spec["turns"] + 1):
        for name, call in contenders.items():
            comm.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            call()
            comm.barrier()
            if turn:  # the first one allocates
                found[name].append((time.perf_counter() - begin, time.process_time() - cpu))
    whole = sum(p.numel() for p in LlamaForCausalLM(config).parameters()) * 4
    return {**found, "sent": shared.sent_bytes, "parts": shared.num_bytes, "whole": whole}


def _planned(move: Any, rank: int) -> tuple[list[int], list[int]]:
    """Elements from each rank and to each, those that stay too."""
    came, went = move.splits()
    came[rank] = went[rank] = sum(view.numel() for _, view in move.kept)
    return came, went


def report(found: list[dict[str, Any]]) -> str:
    """Tables; CPU is the sum over ranks, the clock that of the first one."""
    names = ("bare", "refresh", "tensor", "in_place")
    turns = range(len(found[0]["bare"]))
    clock = {name: [found[0][name][turn][0] for turn in turns] for name in names}
    cpu = {name: [sum(one[name][turn][1] for one in found) for turn in turns] for name in names}

    def ratio(of: dict[str, list[float]], one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(of[one], of[other], strict=True))

    rows = [
        [name, f"{statistics.median(clock[name]) * 1e3:.0f}", f"{statistics.median(cpu[name]) * 1e3:.0f}"]
        for name in names
    ]
    first = found[0]
    wall = ratio(clock, "refresh", "bare")
    verdict = "met" if wall <= TARGET else "missed"
    return "\n\n".join(
        [
            table(["", "ms by the clock", "CPU, ms of both"], rows),
            f"Each rank sends {first['sent'] / 1e6:.1f} MB and then has {first['parts'] / 1e6:.1f} MB of parts; the "
            f"whole model has {first['whole'] / 1e6:.1f} MB.",
            f"refresh over bare: {wall:.2f} by the clock, {ratio(cpu, 'refresh', 'bare'):.2f} of CPU (aim by the clock "
            f"{TARGET}: {verdict}). tensor over in_place: {ratio(clock, 'tensor', 'in_place'):.2f} by the clock, "
            f"{ratio(cpu, 'tensor', 'in_place'):.2f} of CPU.",
        ]
    )


INTRODUCTION = f"""# Roll-outs

Written by `python -m benchmarks.inference.rollout`.

{{facts}}

A Llama of SmolLM2-135M's shape ({{layers}} layers), fp32, ZeRO stage 3 on {RANKS} gloo ranks of one thread. bare:
all-to-alls of the elements that a part is made of, of other ranks and of this one, from buffers that lie ready.
refresh: from the shards, into the parts. tensor, in_place: `zoo.inference.Rollout.generate` of {TOKENS} tokens behind
one prompt of {PROMPT} on each rank, refresh with it. Medians over {{turns}} turns.
"""


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference.rollout", description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    found = run_ranks(WORKER, {"turns": args.turns, "layers": args.layers}, RANKS, timeout_s=1200)
    text = report(found)
    print(text)
    if args.write_results:
        about = facts(machine(["torch", "transformers"]))
        head = INTRODUCTION.format(facts=about, layers=args.layers, turns=args.turns)
        write_page(PAGE, f"{head}\n{text}")


if __name__ == "__main__":
    import sys

    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        answer(measure)
    else:
        main()
