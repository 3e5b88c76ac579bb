"""Train a model of plain torch that is built in parts (zero.Init), with an optimizer and a schedule of torch.

torchrun --nproc-per-node=2 examples/clients/own_model.py --stage 3
"""

from __future__ import annotations

import deepspeed
import torch
from common import (
    ACCUMULATION,
    LEARNING_RATE,
    LENGTH,
    MICRO_BATCH,
    VOCABULARY,
    WEIGHT_DECAY,
    Record,
    Text,
    arguments,
    filled_config,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

WIDTH = 32


class Block(nn.Module):
    """Mixes positions with a triangular matrix, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.positions = nn.Linear(LENGTH, LENGTH, bias=False)
        self.channels = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.register_buffer("past", torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(self.norm(x).transpose(1, 2), self.positions.weight * self.past).transpose(1, 2)
        return x + self.channels(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def main() -> None:
    args = arguments(__doc__)
    deepspeed.init_distributed()
    config = filled_config(args)
    del config["optimizer"], config["scheduler"]
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
        model = Model()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            nn.init.zeros_(model.head.bias)
            nn.init.normal_(model.embedding.weight, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)

    ranks, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
    data = Text(args.steps * MICRO_BATCH * ACCUMULATION * ranks)
    loader = DataLoader(data, MICRO_BATCH, sampler=DistributedSampler(data, ranks, rank, shuffle=False))
    record = Record()
    if args.resume:
        engine.load_checkpoint(str(args.folder))
    done = engine.global_steps
    for index, batch in enumerate(loader):
        if index < done * ACCUMULATION:
            continue
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        record.loss(loss)
        if engine.global_steps == done:
            continue
        done = engine.global_steps
        record.step(engine.get_global_grad_norm())
        if args.save and done % args.save == 0:
            engine.save_checkpoint(str(args.folder), tag=f"step{done}")
        if done == args.stop:
            break
    record.write(args.out)
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
