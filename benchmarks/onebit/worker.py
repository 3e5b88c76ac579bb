"""One rank of an all-reduce benchmark: ``python -m benchmarks.onebit.worker``, as run.py starts it; prints JSON.

Contenders average n fp32 numbers that differ from rank to rank and round to round, in turns. What travels is counted
by the interface too: bytes that its counter has more after a round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.onebit import steps

from zoo.comm import Communicator
from zoo.comm.compression import Blockwise, Fp8, OneBit, PowerSGD, RandomK, TopK

Tensor = torch.Tensor
Reduce = Callable[[Tensor], None]
COMPRESSORS: dict[str, Any] = {
    "zoo, 1 bit": OneBit(),
    "zoo, int8": Blockwise(),
    "zoo, int4": Blockwise(Blockwise.Config(bits=4)),
    "zoo, fp8": Fp8(),
    "zoo, top 1/1000": TopK(TopK.Config(ratio=1e-3)),
    "zoo, 1 % by chance": RandomK(RandomK.Config(ratio=0.01)),
    "zoo, PowerSGD of rank 4": PowerSGD(),
}
GLOO = "gloo, fp32"
TORCH = "torch's PowerSGD hook, rank 4"


def gloo(x: Tensor) -> None:
    """torch's all-reduce, in place; the mean is left out, which no other contender can."""
    dist.all_reduce(x)


def compressed(compressor: Any, comm: Communicator, numel: int) -> Reduce:
    """The mean in place and the commit, as a step has both."""
    reducer = compressor.reducer(comm, numel)

    def reduce(x: Tensor) -> None:
        reducer.start(x, x).wait()
        reducer.commit()

    return reduce


def torch_hook(numel: int) -> Reduce:
    """torch's own hook on a bucket of its own, which sees one square matrix."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    side = int(numel**0.5)
    state = power.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1
    )
    model = torch.nn.parallel.DistributedDataParallel(_Bucket(side), bucket_cap_mb=10**6)
    model.register_comm_hook(state, power.powerSGD_hook)

    def reduce(x: Tensor) -> None:
        model.zero_grad()
        model(x[: side * side].view(side, side)).backward()

    return reduce


class _Bucket(torch.nn.Module):
    """Its gradient is what it is given."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(side, side))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def interface_bytes(device: str) -> int:
    """That left by this interface so far."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(args: argparse.Namespace) -> dict[str, Any]:
    comm = Communicator()
    contenders: dict[str, Reduce] = {GLOO: gloo}
    for name, compressor in COMPRESSORS.items():
        contenders[name] = compressed(compressor, comm, args.numel)
    contenders[TORCH] = torch_hook(args.numel)
    if args.only:
        contenders = {name: run for name, run in contenders.items() if name in args.only}
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = torch.randn(args.numel, generator=generator)
    x = torch.empty_like(given)
    runs = {name: partial(run, x) for name, run in contenders.items()}
    found = {
        "contenders": take_turns(runs, args, before=lambda: x.copy_(given)),
        "said": said(contenders, comm, args.numel),
    }
    if not args.only:
        width = min(steps.WIDTH, int((args.numel / steps.LAYERS) ** 0.5))
        found["steps"] = take_turns(steps.contenders(width), args)
    return found


def take_turns(
    runs: dict[str, Callable[[], None]], args: argparse.Namespace, before: Callable[[], object] = lambda: None
) -> dict[str, list[dict[str, float]]]:
    """Of each round and contender the seconds, the CPU time of this rank, and the bytes by the interface."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for turn in range(args.rounds + 3):  # three to warm up: buffers, buckets, the first Q
        for name, run in runs.items():
            before()
            dist.barrier()
            counted, began, cpu = interface_bytes(args.device), time.perf_counter(), cpu_s()
            run()
            seconds, used = time.perf_counter() - began, cpu_s() - cpu
            dist.barrier()
            sent = interface_bytes(args.device) - counted
            if turn >= 3:
                found[name].append({"s": seconds, "cpu_s": used, "bytes": sent})
    return found


def said(contenders: dict[str, Reduce], comm: Communicator, numel: int) -> dict[str, int]:
    """Bytes of one mean that a rank sends, as the reducers count them."""
    found = {GLOO: 2 * 4 * numel * (comm.size - 1) // comm.size}
    found.update({name: c.reducer(comm, numel).sent_bytes() for name, c in COMPRESSORS.items()})
    return {name: found[name] for name in contenders if name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", required=True)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", args.device)
    dist.init_process_group("gloo")
    found = measure(args)
    if dist.get_rank() == 0:
        json.dump(found, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
