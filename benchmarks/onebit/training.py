"""One rank of training steps of a model of 25 million parameters with each optimizer: ``python -m
benchmarks.onebit.training``; rank 0 prints JSON.

Contenders make a step each in turns. A step is counted by what it sends (:func:`~benchmarks.onebit.contenders.
kind_of`): bytes by ``comm.log`` and by the interface's counter, seconds, and CPU seconds of the rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.onebit.contenders import CLASSES, LAMB, ZERO_ONE, Schedule, build, kind_of
from benchmarks.onebit.worker import cpu_s, interface_bytes

from zoo.examples.byte_lm.model import ByteGPT, ModelConfig

SIZES = {"full": ModelConfig(layers=8, width=512, heads=8, context=64),
         "small": ModelConfig(layers=2, width=64, heads=2, context=16)}  # fmt: skip
ROWS = 1
SKIPPED = 6
"""Steps that are not counted: warm-ups of four, and two that make buffers and errors."""
# In 18 steps after these 0/1 Adam has four variances (7, 9, 11, 13), momenta, and from step 18 every other step local.
SCHEDULE = Schedule(
    freeze_step=4, local_step_scaler=2, local_step_clipper=2, var_update_scaler=4, sync_every=3, coeff_beta=0.5
)
ZERO_ONE_SCHEDULE = dataclasses.replace(SCHEDULE, freeze_step=15)
NAMES = tuple(name for name in CLASSES if name != LAMB)


def contender(name: str, size: ModelConfig) -> tuple[Any, Any]:
    """A model of its own and its optimizer."""
    model = ByteGPT(size)
    return model, build(name, model, ZERO_ONE_SCHEDULE if name == ZERO_ONE else SCHEDULE, lr=1e-4)


def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Forward, backward and update."""
    optimizer.backward(model(x, y))
    optimizer.step()
    optimizer.zero_grad()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Of each contender and counted step what it sent and took."""
    size = SIZES[args.size]
    made = {name: contender(name, size) for name in args.only}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in made}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for turn in range(args.rounds + SKIPPED):
        data = torch.randint(256, (ROWS, size.context + 1), generator=generator)
        for name, (model, optimizer) in made.items():
            kind = kind_of(optimizer)
            optimizer.comm.log.reset()
            dist.barrier()
            counted, began, cpu = interface_bytes(args.device), time.perf_counter(), cpu_s()
            step(model, optimizer, data[:, :-1], data[:, 1:])
            seconds, used = time.perf_counter() - began, cpu_s() - cpu
            dist.barrier()
            sent = interface_bytes(args.device) - counted
            row = {"turn": turn, "kind": kind, "s": seconds, "cpu_s": used, "bytes": sent}
            if turn >= SKIPPED:
                found[name].append({**row, "counted": optimizer.comm.log.wire_bytes})
    return {"numel": sum(p.numel() for p in ByteGPT(size).parameters()), "steps": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", required=True)
    parser.add_argument("--only", nargs="*", default=list(NAMES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    found = measure(args)
    if dist.get_rank() == 0:
        json.dump(found, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
