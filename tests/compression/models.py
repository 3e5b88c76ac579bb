"""A small model, its data, and engines around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from zoo.engine import Engine, initialize

WIDTH, WORDS = 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Words(nn.Module):
    """Predicts a word from the one before; the head is tied to the table."""

    def __init__(self, layers: int = 2, *, recompute: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.layer:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def data(count: int = 32) -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    x = torch.randint(WORDS, (count, 4), generator=dice)
    return TensorDataset(x, (x + 3) % WORDS)


def document(stage: int = 0, *, compression: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8, "seed": 5, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 150},
        **({"compression_training": compression} if compression is not None else {}),
        **more,
    }  # fmt: skip


def weights(
    *modules: str, start: int = 8, target: int = 3, period: int = 2, in_forward: bool = True, **shared: Any
) -> dict[str, Any]:
    """The section weight_quantization with one group."""
    params = {"start_bits": start, "target_bits": target, "quantization_period": period}
    return {
        "shared_parameters": {"enabled": True, "quantize_weight_in_forward": in_forward, **shared},
        "different_groups": {"wq1": {"params": params, "modules": list(modules) or ["*"]}},
    }


def inputs(*modules: str, bits: int = 6, **shared: Any) -> dict[str, Any]:
    """The section activation_quantization with one group."""
    return {
        "shared_parameters": {"enabled": True, **shared},
        "different_groups": {"aq1": {"params": {"bits": bits}, "modules": list(modules) or ["*"]}},
    }


def start(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Engine:
    torch.set_num_threads(1)
    return initialize(config, model or Words(), training_data=data(), **more)[0]


def train(engine: Engine, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def masters(engine: Engine) -> dict[str, Tensor]:
    assert engine.optimizer is not None
    return {name: value.clone() for name, value in engine.optimizer.consolidated_parameters().items()}
