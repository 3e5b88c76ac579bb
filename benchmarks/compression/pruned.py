"""``python -m benchmarks.compression.pruned``: what removing pruned rows, channels and heads saves.

Each model is timed three times over: dense, masked, and cleaned, one after the other within a round; a ratio is of one
round. Time is the CPU time of the process, on one thread.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Spread, machine, table, write_page
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zoo.compression import init_compression, redundancy_clean

PAGE = Path(__file__).with_name("PRUNED.md")
RATIOS = (0.5, 0.25)
INTRODUCTION = """# What is pruned and removed

`python -m benchmarks.compression.pruned`: parameters, FLOPs and CPU time of a forward on one thread after
`redundancy_clean`, of the dense model's (median of rounds, smallest and largest), beside those of the model that is
only masked; the largest difference of their outputs, of the largest output. Weights are not trained: what is removed
does not depend on it.
"""


def group(technique: str, modules: str, related: list[str], ratio: float, **shared: Any) -> dict[str, Any]:
    """One section with one group."""
    params = {"modules": [modules], "related_modules": [related], "params": {"dense_ratio": ratio}}
    return {technique: {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": params}}}


class Residual(nn.Module):
    """Two convolutions and a norm, as in a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2, self.act = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W)"""
        out: Tensor = self.act(x + self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))))
        return out


def mlp() -> tuple[nn.Module, Tensor]:
    """Linear layers."""
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(256, 512)


def network() -> tuple[nn.Module, Tensor]:
    """Convolutions."""
    return nn.Sequential(*[Residual(64) for _ in range(4)]), torch.randn(8, 64, 28, 28)


def encoder() -> tuple[nn.Module, Tensor]:
    """Attention and linear layers."""
    layer = nn.TransformerEncoderLayer(384, 12, 1536, batch_first=True, activation="gelu", dropout=0.0)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 64, 384)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], Callable[[float], dict[str, Any]]]] = {
    "4 x MLP 512-2048-512, rows": (mlp, lambda r: group("row_pruning", r"\.0$", [r"\.2$"], r)),
    "4 residual blocks of 64 channels": (network, lambda r: group("channel_pruning", "conv1", ["conv2", "bn1"], r)),
    "encoder, 4 layers of 384, heads and rows": (
        encoder,
        lambda r: {
            **group("row_pruning", "linear1", ["linear2"], r),
            **group("head_pruning", "self_attn", [], r, num_heads=12, method="l1"),
        },
    ),
}


def seconds(model: nn.Module, x: Tensor) -> float:
    """CPU time of one forward."""
    begin = time.process_time()
    model(x)
    return time.process_time() - begin


def flops(model: nn.Module, x: Tensor) -> int:
    """Of one forward, as torch counts."""
    with FlopCounterMode(display=False) as counter:
        model(x)
    return int(counter.get_total_flops())


def row(name: str, ratio: float, rounds: int) -> list[str]:
    """One line of the page."""
    build, sections = MODELS[name]
    torch.manual_seed(0)
    dense, x = build()
    dense.eval()
    config = {"compression_training": sections(ratio)}
    masked = init_compression(copy.deepcopy(dense), config)
    out = masked(x)
    clean = redundancy_clean(copy.deepcopy(masked), config)
    apart = float((clean(x) - out).abs().max() / out.abs().max())
    sizes = [sum(p.numel() for p in m.parameters()) for m in (dense, clean)]
    times: dict[str, list[float]] = {"masked": [], "clean": []}
    # Without the fused path of encoder layers, which only the dense one has: all three run the same operations.
    torch.backends.mha.set_fastpath_enabled(False)
    for number in range(rounds + 2):
        whole = seconds(dense, x)
        ratios = {"masked": seconds(masked, x) / whole, "clean": seconds(clean, x) / whole}
        for key, value in ratios.items():
            if number >= 2:
                times[key].append(value)
    counted = flops(clean, x) / flops(dense, x)
    return [
        name, f"{ratio:g}", f"{sizes[1] / sizes[0]:.3f}", f"{counted:.3f}", Spread(tuple(times["clean"])).text(),
        Spread(tuple(times["masked"])).text(), f"{apart:.1e}",
    ]  # fmt: skip


def main() -> None:
    """Measure, print, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = ["model", "dense_ratio", "parameters", "FLOPs", "CPU time", "CPU time, masked", "largest difference"]
    with torch.no_grad():
        rows = [row(name, ratio, options.rounds) for name in MODELS for ratio in RATIOS]
    found = table(header, rows)
    print(found)
    facts = ", ".join(f"{key} {value}" for key, value in machine(["torch", "zoo-compression"]).items())
    write_page(PAGE, f"{INTRODUCTION}\n{found}\n\n{facts}")


if __name__ == "__main__":
    main()
