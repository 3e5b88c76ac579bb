"""The model, data and training that the golden checkpoints of DeepSpeed come from. Needs torch alone."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

RANKS, BEFORE, AFTER, ROWS, LR, DECAY = 2, 3, 5, 4, 0.02, 0.1


def environment(rank: int, port: str) -> dict[str, str]:
    """Of one rank, on this machine's processors."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip


class Net(nn.Module):
    """Two parameters that are tied, a frozen one, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.middle.weight
        self.mixed = nn.Linear(7, 3)
        self.mixed.requires_grad_(False)
        self.last = nn.Linear(3, 1)
        self.register_buffer("shift", torch.arange(5) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x + self.shift.to(x.dtype)))
        x = torch.tanh(self.again(torch.tanh(self.middle(x))))
        out: torch.Tensor = self.last(torch.tanh(self.mixed(x)))
        return out


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups: weights decay, biases do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    """All in one group: stage 3 of DeepSpeed 0.19 loads universal checkpoints of no others rightly."""
    return [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": DECAY}]


def batches(rank: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a rank sees, one for each step before and after the checkpoint."""
    dice = torch.Generator().manual_seed(100 + rank)
    x = [torch.randn(ROWS, 5, generator=dice) for _ in range(BEFORE + AFTER)]
    return [(part.to(dtype), part.sum(1, keepdim=True).sin().to(dtype)) for part in x]


def loss_of(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error, in fp32."""
    out: torch.Tensor = (model(batch[0]).float() - batch[1].float()).square().mean()
    return out


class Experts(nn.Module):
    """A mixture of four experts between two linear layers, as DeepSpeed's own layer has it."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.moe = moe(
            hidden_size=6, expert=nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)), num_experts=4, ep_size=2,
            k=1, capacity_factor=4.0, use_rts=False,
        )  # fmt: skip
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.moe(torch.tanh(self.first(x)))[0])
        return out


PARTS = {
    "autotp_size": RANKS,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*qkv\.weight$"], "shape": [[6, 3, 3], -1], "partition_dim": 0},
            {"patterns": [r".*out\.weight$", r".*down\.weight$"], "partition_type": "row"},
            {"patterns": [r".*up\.weight$"], "partition_type": "column"},
            {"patterns": [r"head\.weight$"], "partition_type": "column", "gather_output": True},
        ],
    },
}
"""How :class:`Cut` is dealt: sizes that the ranks do not divide."""


class Cut(nn.Module):
    """Matrices that AutoTP deals along either dim, and in blocks; a frozen layer and a buffer that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(5), nn.Linear(5, 12), nn.Linear(6, 5)
        self.up, self.down, self.head = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3, bias=False)
        self.free = nn.Linear(5, 5).requires_grad_(False)
        self.register_buffer("shift", torch.arange(5) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.qkv(self.norm(x) + self.shift)[..., : self.out.weight.shape[1]]
        x = x + self.out(torch.tanh(queries))
        x = self.free(x + self.down(torch.tanh(self.up(x))))
        found: torch.Tensor = self.head(x).sum(-1, keepdim=True)
        return found


def shared_ends(pipe: Any, loss_fn: Any) -> Any:
    """A pipeline of two stages whose first and last layer have one weight, of ``deepspeed.pipe``."""
    torch.manual_seed(0)
    layers = [
        pipe.TiedLayerSpec("ends", nn.Linear, 5, 5, bias=False), torch.tanh,
        pipe.LayerSpec(nn.Linear, 5, 5), torch.tanh,
        pipe.TiedLayerSpec("ends", nn.Linear, 5, 5, bias=False, forward_fn=_backwards),
        pipe.LayerSpec(nn.Linear, 5, 1),
    ]  # fmt: skip
    return pipe.PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform", base_seed=7)


def _backwards(module: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ module.weight)
