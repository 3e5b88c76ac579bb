"""A training whose layers sleep: under a real clock as one rank of gloo, or as a simulated rank that says how long.

``python -m benchmarks.sim.job SPEC``, started as one rank; rank 0 prints of each step its seconds, and those in which
threads of any rank were ready and had no core.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zoo.engine
from zoo import sim
from zoo.pipe import LayerSpec, PipelineModule
from zoo.sim.world import place
from zoo.zero import ZeroOptimizer


class Sleeping(nn.Module):
    """Linear layers; each forward takes ``seconds``, each backward ``2 * seconds``."""

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Layer(width, seconds) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, width: int, seconds: float, *, diagonal: bool = False) -> None:
        super().__init__()
        shape = (width,) if diagonal else (width, width)
        self.weight = nn.Parameter(torch.randn(*shape) / width)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _takes(self.seconds, "forward")
        scaled = x * self.weight if self.weight.ndim == 1 else x @ self.weight
        out: torch.Tensor = _Slow.apply(scaled, 2 * self.seconds)
        return out


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _takes(ctx.seconds, "backward")
        return gradients[0], None


def _takes(seconds: float, name: str) -> None:
    if place() is not None:  # a simulated rank
        sim.compute(seconds, name)
    else:
        time.sleep(seconds)


def steps(spec: dict[str, Any], rank: int, begin: Any) -> None:
    """Train; ``begin(number)`` is called before each step and after the last. With "micro_batches" the layers are a
    pipeline of two stages."""
    if "micro_batches" in spec:
        _pipeline(spec, begin)
        return
    model = Sleeping(spec["layers"], spec["width"], spec["seconds"])
    optimizer = ZeroOptimizer(
        model, stage=spec["stage"], optimizer=torch.optim.SGD, lr=1e-3, param_persistence_threshold=0,
        reduce_bucket_size=1,
    )  # fmt: skip
    x = torch.randn(2, spec["width"], generator=torch.Generator().manual_seed(rank))
    for step in range(spec["steps"]):
        begin(step)
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    begin(spec["steps"])


def _pipeline(spec: dict[str, Any], begin: Any) -> None:
    torch.manual_seed(0)
    # Diagonal: of many rows, which make the messages, a product takes long beside layers that sleep.
    layers = [LayerSpec(_Layer, spec["width"], spec["seconds"], diagonal=True) for _ in range(spec["layers"])]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, schedule=spec["schedule"])
    config = {
        "train_micro_batch_size_per_gpu": spec["rows"], "gradient_accumulation_steps": spec["micro_batches"],
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 0},
    }  # fmt: skip
    engine = zoo.engine.initialize(config, model)[0]
    batch = [torch.randn(spec["rows"], spec["width"]) for _ in range(2)]
    for step in range(spec["steps"]):
        begin(step)
        engine.train_batch(iter([tuple(batch)] * spec["micro_batches"]))
    begin(spec["steps"])


def _without_a_core_s() -> float:
    """Seconds for which this process's threads that still run were ready and had no core (Linux)."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found += int((task / "schedstat").read_text().split()[1])
    return found / 1e9


def main() -> None:
    """One rank with a real clock."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    marks: list[tuple[float, float]] = []
    steps(spec, dist.get_rank(), lambda step: marks.append((time.perf_counter(), _without_a_core_s())))
    waits = torch.tensor([b[1] - a[1] for a, b in itertools.pairwise(marks)])
    dist.all_reduce(waits)
    if dist.get_rank() == 0:
        spans = [b[0] - a[0] for a, b in itertools.pairwise(marks)]
        print(json.dumps(list(zip(spans, waits.tolist(), strict=True))), flush=True)
    sys.stdout.flush()
    with contextlib.suppress(RuntimeError):  # whoever leaves first closes the connection
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
