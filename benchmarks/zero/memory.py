"""Memory of a model of real size: a Llama of SmolLM2-135M's shape, 2 ranks, under DDP, FSDP2 and zoo.

::

    python -m benchmarks.zero.memory                       # every contender, both ways of counting
    python -m benchmarks.zero.memory --contenders fsdp2 zoo3 --points
    python -m benchmarks.zero.memory --quick               # a tiny model: does it run
    python -m benchmarks.zero.memory --write-results       # also write MEMORY.md

30 layers of 576 (9 heads, 3 of keys and values), a tied head over 49,152 words, fp32, torch's fused AdamW, one sequence
of 128 a rank.

*peak*: the largest sum of PSS (proportional set size: shared pages count in equal parts) over both ranks, sampled every
10 ms from their start to the end of the third step, with ``MALLOC_MMAP_THRESHOLD_=65536``, so that what malloc keeps
for itself does not count; and *malloc's too* without. *no files*: the same without pages of files, of which there are
fewer where something else that has torch loaded runs meanwhile. What follows is of one rank, and counts from what the
process has when it has trained a tiny model. *its states*: anonymous memory after the third ``step()``, where gradients
still are; *forecast*: ``optimizer.forecast().total_bytes``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, facts, machine, remarks, table
from benchmarks.launch import environment

CONTENDERS = ("ddp", "fsdp2", "zoo1", "zoo2", "zoo3", "zoo3_layer")
RANKS, STEPS, LENGTH = 2, 3, 128
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
TINY = {**SMOLLM2, "vocab_size": 512, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2}
KINDS = "Pss_File:", "Pss_Anon:", "Pss_Shmem:"
RESULTS = Path(__file__).with_name("MEMORY.md")


# The rank -------------------------------------------------------------------------------------------------------------


def memory_of(pid: int | str = "self") -> Counter[str]:
    """Bytes of a process by kind of PSS: "file", "anon", and "shmem", which ranks share; none once it is gone."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    except (OSError, ProcessLookupError):
        return Counter()
    return Counter({line[0][4:-1].lower(): int(line[1]) * 1024 for line in lines if line[0] in KINDS})


def llama(shape: dict[str, int]) -> Any:
    """The model, with random values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, use_cache=False))


def wrapped(contender: str, model: Any) -> tuple[Any, Any]:
    """(what is called, the optimizer)."""
    import torch

    adamw: dict[str, Any] = {"lr": 1e-4, "fused": True}
    if contender == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), **adamw)
    if contender == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters(), **adamw)
    from zoo.zero import ZeroOptimizer

    options: dict[str, Any] = {}
    if contender.endswith("_layer"):
        options = {"reduce_bucket_size": 0, "max_live_parameters": 0}
    return model, ZeroOptimizer(model, stage=int(contender[3]), optimizer=torch.optim.AdamW, **adamw, **options)


def train(called: Any, optimizer: Any, tokens: Any, point: Callable[[str], None]) -> None:
    """One step."""
    loss = called(input_ids=tokens, labels=tokens).loss
    point("forward")
    loss.backward()
    del loss
    point("backward")
    optimizer.step()
    point("step")
    optimizer.zero_grad()
    point("end")


def work(contender: str, shape: dict[str, int]) -> None:
    """One rank: prints what there is at each point as a line of JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    drawn = torch.Generator().manual_seed(dist.get_rank())
    # Whatever is imported and kept once is there before the model.
    called, optimizer = wrapped(contender, llama(TINY))
    train(called, optimizer, torch.randint(TINY["vocab_size"], (1, LENGTH), generator=drawn), lambda name: None)
    if hasattr(optimizer, "close"):
        optimizer.close()
    del called, optimizer
    gc.collect()
    begun, before = time.process_time(), memory_of()

    def point(name: str, step: int = 0) -> None:
        found: dict[str, Any] = {"point": f"{name} {step}", "cpu_s": time.process_time() - begun}
        found |= {kind: size - before[kind] * (kind == "anon") for kind, size in memory_of().items()}
        if hasattr(optimizer, "forecast"):
            found["forecast"] = optimizer.forecast().total_bytes
        print(json.dumps(found), flush=True)

    called, optimizer = wrapped(contender, llama(shape))
    point("constructed")
    tokens = torch.randint(shape["vocab_size"], (1, LENGTH), generator=drawn)
    for step in range(STEPS):
        train(called, optimizer, tokens, partial(point, step=step))
    dist.barrier()
    dist.destroy_process_group()


# All ranks ------------------------------------------------------------------------------------------------------------


def run(contender: str, *, mapped: bool, quick: bool) -> tuple[list[int], list[list[dict[str, Any]]]]:
    """The largest sums of PSS, and of what of it is no page of a file, over the ranks; the points of each."""
    more = {"MALLOC_MMAP_THRESHOLD_": "65536"} if mapped else {}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.zero.memory", "--rank", contender, *["--quick"] * quick],
            cwd=ROOT, text=True, env={**environment(rank, RANKS), **more}, stdout=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    most = [0, 0]
    while any(rank.poll() is None for rank in ranks):
        now = sum((memory_of(rank.pid) for rank in ranks), Counter[str]())
        most = [max(most[0], now.total()), max(most[1], now.total() - now["file"])]
        time.sleep(0.01)
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{contender}: a rank ended with {[rank.returncode for rank in ranks]}.")
    return most, [[json.loads(line) for line in rank.stdout] for rank in ranks if rank.stdout is not None]


def page(text: str) -> str:
    """MEMORY.md with this table."""
    first, _, rest = (__doc__ or "").partition("::")
    told = rest.rpartition("MEMORY.md\n")[2].strip()
    import torch  # not before: each process that has it makes the others' share of its pages smaller

    isa = torch.backends.cpu.get_cpu_capability()
    lines = facts({**machine(("torch", "transformers")), "instruction set": isa})
    return (
        f"# Memory of a model of real size\n\nWritten by `python -m benchmarks.zero.memory`. {first.strip()}\n\n"
        f"{lines}\n\n{told}\n\n{text}\n\n{remarks(RESULTS)}"
    )


def main() -> None:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zero.memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--points", action="store_true", help="what rank 0 has at each point")
    parser.add_argument("--quick", action="store_true", help="of a tiny model")
    parser.add_argument("--write-results", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        work(args.rank, TINY if args.quick else SMOLLM2)
        return
    rows = []
    for contender in args.contenders:
        mapped, points = run(contender, mapped=True, quick=args.quick)
        kept, _ = run(contender, mapped=False, quick=args.quick)
        mine = {p["point"]: p for p in points[0]}
        sizes = [
            *mapped,
            *kept,
            *(mine[at]["anon"] + mine[at]["shmem"] for at in ("constructed 0", "end 0", "forward 1")),
        ]
        last = mine[f"step {STEPS - 1}"]
        cpu_s = (mine[f"end {STEPS - 1}"]["cpu_s"] - mine["end 0"]["cpu_s"]) / (STEPS - 1)
        states = [last["anon"], last["forecast"]] if "forecast" in last else [last["anon"]]
        told = [f"{size / 1e9:.3f}" for size in states] + ["-"] * (2 - len(states))
        rows.append([contender, *(f"{size / 1e9:.2f}" for size in sizes), *told, f"{cpu_s:.2f}"])
        if args.points:
            for p in points[0]:
                print(contender, {k: round(v / 1e6, 1) if k not in ("point", "cpu_s") else v for k, v in p.items()})
    text = table(
        ["GB", "peak", "no files", "malloc's too", "no files", "a rank: constructed", "after step 1",
         "before backward 2", "its states", "forecast", "CPU s a step"], rows,
    )  # fmt: skip
    print(text)
    if args.write_results:
        RESULTS.write_text(page(text), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
