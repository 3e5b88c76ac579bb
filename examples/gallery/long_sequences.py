"""Two ranks share each sequence, 1,024 tokens each: zoo launch --ranks 2 examples/gallery/long_sequences.py"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo.comm import init_distributed
from zoo.nn import SequenceParallelAttention
from zoo.zero import Stage3Optimizer

TOKENS, HEADS, SIZE = 2048, 4, 8


class Block(nn.Module):
    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention = SequenceParallelAttention(group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).unbind(2)  # (B, S/P, heads, size)
        return x + self.out(self.attention(q, k, v).flatten(2))


def main() -> None:
    init_distributed()
    torch.manual_seed(0)
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "sequence"))
    model = nn.Sequential(*(Block(mesh["sequence"].get_group()) for _ in range(2)))
    optimizer = Stage3Optimizer(model, optimizer=torch.optim.AdamW, lr=0.01)  # parameters are split over all ranks
    whole = torch.randn(1, TOKENS, HEADS * SIZE)
    x = whole.chunk(ranks, 1)[rank]  # this rank's part of the sequence
    for step in range(5):
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f} over {x.shape[1]:,} of {TOKENS:,} tokens")


if __name__ == "__main__":
    main()
