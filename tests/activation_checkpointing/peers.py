"""DeepSpeed's activation checkpointing: its signatures, and what it computes on a CPU with tensor rank 1 of 2.

``DS_ACCELERATOR=cpu python tests/activation_checkpointing/peers.py`` in an environment that has deepspeed, with ninja
on the PATH, writes peers.json, which quick tests read.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = Path(__file__).with_suffix(".json")
FUNCTIONS = (
    "configure", "is_configured", "checkpoint", "non_reentrant_checkpoint", "reset", "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
)  # fmt: skip
METHODS = ("get_states", "set_states", "add", "fork", "reset")
SEED = 1234


class Mpu:
    """Tensor rank 1 of 2, in a job of one process."""

    def get_model_parallel_rank(self) -> int:
        return 1

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return 0


def signatures(module: Any) -> dict[str, Any]:
    """Name → [name, kind, default] of each argument."""
    members = {name: getattr(module, name) for name in FUNCTIONS}
    members |= {f"CudaRNGStatesTracker.{name}": getattr(module.CudaRNGStatesTracker, name) for name in METHODS}
    return {
        name: [
            [p.name, int(p.kind), None if p.default in (None, p.empty) else p.default]
            for p in inspect.signature(member).parameters.values()
        ]
        for name, member in members.items()
    }


def numbers(module: Any) -> list[list[float]]:
    """Gradients of layers that drop by both states, and what is drawn afterwards; the module is configured.

    In fp64: 1 - tanh(y)^2 near 1 makes the last bit of an fp32 product, another one on each kind of CPU, large.
    """
    dice = torch.Generator().manual_seed(3)
    x = torch.randn(4, 6, generator=dice, dtype=torch.float64).requires_grad_()
    layers = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(2)]
    for layer in layers:
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=dice, dtype=p.dtype))
    module.model_parallel_cuda_manual_seed(SEED)
    y: Any = x
    for layer in layers:

        def run(y: Any, layer: Any = layer) -> Any:
            with module.get_cuda_rng_tracker().fork():
                y = nn.functional.dropout(layer(y), 0.5)
            return nn.functional.dropout(torch.tanh(y), 0.3)

        y = module.checkpoint(run, y)
    y.square().sum().backward()
    with module.get_cuda_rng_tracker().fork():
        drawn = [torch.rand(4)]
    drawn.append(torch.rand(4))
    found = [x.grad, *(p.grad for layer in layers for p in layer.parameters()), *drawn]
    return [value.flatten().tolist() for value in found]


def main() -> None:
    logging.disable(logging.CRITICAL)
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing

    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, rank=0, world_size=1, init_method="tcp://127.0.0.1:29719"
    )
    checkpointing.configure(Mpu())
    found = {
        "deepspeed": deepspeed.__version__, "signatures": signatures(checkpointing), "numbers": numbers(checkpointing),
    }  # fmt: skip
    text = json.dumps(found)
    for before in (' "signatures"', ' "numbers"'):
        text = text.replace(before, "\n" + before.strip())
    FILE.write_text(text.replace("]], ", "]],\n") + "\n", encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")


if __name__ == "__main__":
    main()
