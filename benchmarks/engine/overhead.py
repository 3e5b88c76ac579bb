"""What the engine costs on the host: a micro-batch of an empty model, beside the same loop by hand over the ZeRO
optimizer; and what importing it costs beside importing torch. CPU time, interleaved.

    python -m benchmarks.engine.overhead
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from zoo.engine import initialize
from zoo.zero import ZeroOptimizer

ROUNDS, MICRO_BATCHES = 15, 200


class Empty(nn.Module):
    """One parameter, which does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * 0 + x.sum() * 0


def with_engine(accumulation: int) -> Callable[[int], None]:
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine, x = initialize(config, Empty())[0], torch.zeros(1, 2)

    def run(steps: int) -> None:
        for _ in range(steps * accumulation):
            engine.backward(engine(x))
            engine.step()

    return run


def by_hand(accumulation: int) -> Callable[[int], None]:
    model, x = Empty(), torch.zeros(1, 2)
    optimizer = ZeroOptimizer(model, stage=0, lr=0.1, clip_norm=1.0)

    def run(steps: int) -> None:
        for _ in range(steps):
            for i in range(accumulation):
                loss = model(x) / accumulation if accumulation > 1 else model(x)
                if i < accumulation - 1:
                    with optimizer.no_sync():
                        optimizer.backward(loss)
                else:
                    optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return run


def cpu_s(run: Callable[[int], None], steps: int) -> float:
    """CPU seconds of so many steps."""
    began = time.process_time()
    run(steps)
    return time.process_time() - began


def import_s(code: str) -> float:
    """CPU seconds of a fresh interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    torch.set_num_threads(1)
    print("| micro-batches a step | engine, µs | by hand, µs | difference, µs a micro-batch (target: 100) |")
    print("|---|---|---|---|")
    for accumulation in (1, 4):
        runs, steps = (with_engine(accumulation), by_hand(accumulation)), MICRO_BATCHES // accumulation
        pairs = [tuple(cpu_s(run, steps) / MICRO_BATCHES * 1e6 for run in runs) for _ in range(ROUNDS + 1)][1:]
        engine, hand = (statistics.median(column) for column in zip(*pairs, strict=True))
        difference = statistics.median(a - b for a, b in pairs)
        print(f"| {accumulation} | {engine:.0f} | {hand:.0f} | {difference:.0f} |")
    print("\n| import | CPU over that of `import torch` (target: 0.07) |\n|---|---|")
    for code in ("import zoo.engine", "from zoo.engine import initialize"):
        base, ours = zip(
            *[(import_s("import torch"), import_s(f"import torch; {code}")) for _ in range(7)], strict=True
        )
        extra = statistics.median(b - a for a, b in zip(base, ours, strict=True))
        print(f"| `{code}` | {extra / statistics.median(base):.3f} |")


if __name__ == "__main__":
    main()
