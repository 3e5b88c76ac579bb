"""What moving rows between tokens and experts takes of a layer's time: ``python -m benchmarks.moe.rows``, a minute.

What a permutation inside the experts' products could save at most is the operation ``permute``; its gradient adds rows
up and ``unpermute`` weighs them, which a product of matrices does not.
"""

from __future__ import annotations

import argparse

import torch
from benchmarks.common import table
from torch.profiler import ProfilerActivity, profile

from zoo.moe import GroupedExperts, MixtureOfExperts, TopKGate

SHAPES = [(512, 1024, 8, 2), (512, 1024, 64, 4), (1024, 256, 64, 6)]
"""Width, hidden size, experts, choices of a token; the last is the finest that published models have."""
COLUMNS = {
    "permute": ("zoo::permute", "GeneratedBackwardFor_zoo_permute_default"),
    "unpermute": (
        "zoo::unpermute", "GeneratedBackwardFor_zoo_unpermute_default",
        "GeneratedBackwardFor_zoo_permute_defaultBackward",  # which is one without weights
    ),
    "gradient of unpermute": ("zoo::unpermute_backward", "GeneratedBackwardFor_zoo_unpermute_defaultBackward"),
    "matrix products": ("aten::mm",),
}  # fmt: skip
"""By the names that the profiler gives to operations and to the functions that autograd makes of them."""


def shares(width: int, hidden: int, experts: int, k: int, dtype: torch.dtype, tokens: int) -> dict[str, float]:
    """Of the CPU time of forward and backward, on one thread, for each name in COLUMNS."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(
        TopKGate(width, experts, k=k), GroupedExperts(experts, width, hidden, activation="silu", gated=True)
    ).to(dtype)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)

    def step() -> None:
        layer(x).output.float().square().mean().backward()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(3):
            step()
    times = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    return {name: sum(times.get(key, 0.0) for key in keys) / sum(times.values()) for name, keys in COLUMNS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            found = shares(*shape, dtype, tokens)
            rows.append([str(dtype).removeprefix("torch."), *map(str, shape), *(f"{v:.1%}" for v in found.values())])
    print(table(["dtype", "D", "H", "E", "k", *COLUMNS], rows))


if __name__ == "__main__":
    main()
