"""A small language model, its data, and an engine around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from zoo.engine import Engine, initialize

WIDTH, WORDS = 8, 16
BASE: dict[str, Any] = {
    "train_batch_size": 4,
    "seed": 5,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
}


def stage(number: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1}}


class Block(nn.Module):
    """Causal attention of one head and a nonlinearity, with a residual; tells what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append(tuple(x.shape))
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: torch.Tensor = x + torch.tanh(self.out(mixed.squeeze(1)))
        return out


class Tiny(nn.Module):
    def __init__(self, layers: int = 4, *, masked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)
        self.masked = masked
        self.lengths: list[int] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.lengths.append(x.shape[1])
        h = self.token(x)
        time = x.shape[1]
        mask = torch.ones(time, time, dtype=torch.bool).tril().expand(x.shape[0], 1, time, time)
        for block in self.blocks:
            h = block(h, mask) if self.masked else block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    def seen(self) -> list[list[tuple[int, ...]]]:
        return [block.seen for block in self.blocks]  # type: ignore[union-attr,misc]


def data(count: int = 32, length: int = 8) -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    x = torch.randint(WORDS, (count, length), generator=dice)
    return TensorDataset(x, (x + 3) % WORDS)


def start(changes: dict[str, Any], *, layers: int = 4, **more: Any) -> Engine:
    torch.set_num_threads(1)
    model = more.pop("model", None) or Tiny(layers)
    return initialize({**BASE, **changes}, model, training_data=more.pop("training_data", data()), **more)[0]


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    optimizer = engine.optimizer
    assert optimizer is not None
    return {name: tensor.clone() for name, tensor in engine.sharded.whole_parameters()}
