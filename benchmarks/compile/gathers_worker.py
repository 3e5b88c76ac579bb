"""One rank: CPU time of gathers inside of a compiled graph, by zoo's runtime and as functional collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.launch import answer

UNITS, WIDTH = 20, 64


def measure(spec: dict[str, Any], rank: int) -> dict[str, float]:
    """Microseconds of CPU a unit, beyond the same graph of whole parameters."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from zoo.compile import compile_whole
    from zoo.zero import ZeroOptimizer

    size = dist.get_world_size()

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))

    plain, mine = model(), model()
    # Each layer a unit, of which one is gathered ahead, and none is kept for later.
    optimizer = ZeroOptimizer(
        mine, stage=3, lr=0.1, units=[nn.Linear], param_persistence_threshold=0,
        reduce_bucket_size=1, max_live_parameters=1,
        prefetch_bucket_size=2 * WIDTH * (WIDTH + 1),
    )  # fmt: skip
    whole = compile_whole(optimizer.sharded, "aot_eager")
    flat = [torch.cat([p.detach().flatten() for p in layer.parameters()]) for layer in plain]
    shards = [one.chunk(size)[rank].clone() for one in flat]
    group = dist.group.WORLD.group_name

    def functional(x: Any) -> Any:
        ops = torch.ops._c10d_functional
        coming = ops.all_gather_into_tensor(shards[0], size, group)
        for number in range(UNITS):  # one ahead, as a compiler would place them
            values = ops.wait_tensor(coming)
            if number + 1 < UNITS:
                coming = ops.all_gather_into_tensor(shards[number + 1], size, group)
            weight, bias = values.split([WIDTH * WIDTH, WIDTH])
            x = nn.functional.linear(x, weight.view(WIDTH, WIDTH), bias)
        return x

    contenders: dict[str, Callable[[Any], Any]] = {
        "whole": torch.compile(plain, backend="aot_eager"), "zoo": mine,
        "functional": torch.compile(functional, backend="aot_eager"),
    }  # fmt: skip
    x = torch.randn(2, WIDTH)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        outputs = [contender(x) for contender in contenders.values()]
        if not all(torch.equal(outputs[0], one) for one in outputs[1:]):
            raise RuntimeError("the contenders do not compute the same bits")
        with optimizer.sharded.record() as actions:
            mine(x)
        if whole.reasons or len(list(actions.starts())) < UNITS:
            raise RuntimeError(f"not {UNITS} gathers in one graph: {whole.reasons} {actions.starts()}")
        for _ in range(spec["turns"]):
            for name, contender in contenders.items():
                dist.barrier()
                begun = time.process_time()
                for _ in range(spec["steps"]):
                    contender(x)
                found[name].append((time.process_time() - begun) / spec["steps"] * 1e6)
    base = found.pop("whole")
    return {
        name: statistics.median(a - b for a, b in zip(values, base, strict=True)) / UNITS
        for name, values in found.items()
    }


if __name__ == "__main__":
    answer(measure)
