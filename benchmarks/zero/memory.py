"""Memory of a model of real size: a Llama of SmolLM2-135M's shape, 2 ranks, under DDP, FSDP2 and zoo.

::

    python -m benchmarks.zero.memory                       # every contender, both ways of counting
    python -m benchmarks.zero.memory --contenders fsdp2 zoo3 --points
    python -m benchmarks.zero.memory --quick               # a tiny model: does it run
    python -m benchmarks.zero.memory --write-results       # also write MEMORY.md

30 layers of 576 (9 heads, 3 of keys and values), a tied head over 49,152 words, fp32, torch's fused AdamW, one sequence
of 128 a rank. The figure is the largest sum of PSS (proportional set size: shared pages count in equal parts) over both
ranks, sampled every 10 ms from construction to the end of the third step: with ``MALLOC_MMAP_THRESHOLD_=65536``, so
that what malloc keeps for itself does not count, and without. Pages of libraries count in equal parts too: nothing else
that has torch loaded may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
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
RESULTS = Path(__file__).with_name("MEMORY.md")


# The rank -------------------------------------------------------------------------------------------------------------


def pss_bytes(pid: int | str = "self") -> int:
    """PSS of a process; 0 once it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ProcessLookupError):
        pass
    return 0


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


def work(contender: str, shape: dict[str, int]) -> None:
    """One rank: prints what there is at each point as a line of JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    begun = time.process_time()

    def point(name: str, optimizer: Any = None) -> None:
        found = {"point": name, "pss": pss_bytes(), "cpu_s": time.process_time() - begun}
        if hasattr(optimizer, "memory"):
            found |= {key: value for key, value in optimizer.memory().items() if value}
        print(json.dumps(found), flush=True)

    model = llama(shape)
    point("model")
    called, optimizer = wrapped(contender, model)
    del model
    point("constructed", optimizer)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(shape["vocab_size"], (1, LENGTH), generator=drawn)
    for step in range(STEPS):
        loss = called(input_ids=tokens, labels=tokens).loss
        point(f"forward {step}", optimizer)
        loss.backward()
        del loss
        point(f"backward {step}", optimizer)
        optimizer.step()
        optimizer.zero_grad()
        point(f"step {step}", optimizer)
    dist.barrier()
    dist.destroy_process_group()


# All ranks ------------------------------------------------------------------------------------------------------------


def run(contender: str, *, mapped: bool, quick: bool) -> tuple[int, list[list[dict[str, Any]]]]:
    """The largest sum of PSS, and the points of each rank."""
    more = {"MALLOC_MMAP_THRESHOLD_": "65536"} if mapped else {}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.zero.memory", "--rank", contender, *["--quick"] * quick],
            cwd=ROOT, text=True, env={**environment(rank, RANKS), **more}, stdout=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    most = 0
    while any(rank.poll() is None for rank in ranks):
        most = max(most, sum(pss_bytes(rank.pid) for rank in ranks))
        time.sleep(0.01)
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{contender}: a rank ended with {[rank.returncode for rank in ranks]}.")
    return most, [[json.loads(line) for line in rank.stdout] for rank in ranks if rank.stdout is not None]


def page(text: str) -> str:
    """MEMORY.md with this table."""
    first, _, rest = (__doc__ or "").partition("::")
    told = rest.rpartition("MEMORY.md\n")[2].strip()
    lines = facts(machine(("torch", "transformers")))
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
        last = mine[f"step {STEPS - 1}"]
        sizes = [mapped, kept, *(mine[name]["pss"] for name in ("constructed", "step 0", "forward 1"))]
        cpu_s = (last["cpu_s"] - mine["step 0"]["cpu_s"]) / (STEPS - 1)
        rows.append([contender, *(f"{size / 1e9:.2f}" for size in sizes), f"{cpu_s:.2f}"])
        if args.points:
            for p in points[0]:
                print(contender, {k: round(v / 1e6, 1) if k not in ("point", "cpu_s") else v for k, v in p.items()})
    text = table(
        ["GB", "peak of both ranks", "with what malloc keeps", "a rank: constructed", "after step 1",
         "before backward 2", "CPU s a step"], rows,
    )  # fmt: skip
    print(text)
    if args.write_results:
        RESULTS.write_text(page(text), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
