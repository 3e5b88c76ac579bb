"""Train a language model in two pipeline stages: PipelineModule, LayerSpec, TiedLayerSpec and train_batch.

torchrun --nproc-per-node=2 examples/clients/pipeline.py --stage 1
"""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
import torch
from common import ACCUMULATION, LENGTH, MICRO_BATCH, VOCABULARY, Record, Text, arguments, filled_config
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn import functional as F

WIDTH, STAGES = 32, 2


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)  # each rank makes its own layers only, and the tied ones on both
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


def logits(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    """The embedding's weight again, as the output layer."""
    return F.linear(x, embedding.weight)


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = x + self.attention(y, y, y, attn_mask=future, need_weights=False)[0]
        return x + self.mlp(x)


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batches(steps: int, replica: int, replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one replica of the model."""
    tokens = Text(steps * ACCUMULATION * MICRO_BATCH * replicas).tokens.split(MICRO_BATCH)
    return iter([(batch, batch) for batch in tokens[replica::replicas]])


def main() -> None:
    args = arguments(__doc__)
    deepspeed.init_distributed()
    layers = [
        TiedLayerSpec("embedding", Embedding),
        *[LayerSpec(Block, seed) for seed in range(8, 12)],
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", Embedding, forward_fn=logits),
    ]
    model = PipelineModule(layers, num_stages=STAGES, loss_fn=loss)
    config = filled_config(args)
    replicas = deepspeed.comm.get_world_size() // STAGES
    config["train_batch_size"] = MICRO_BATCH * ACCUMULATION * replicas
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    replica = engine.grid.get_data_parallel_rank()
    data = batches(args.steps, replica, replicas)
    record = Record()
    if args.resume:
        engine.load_checkpoint(str(args.folder))
        for _ in range(engine.global_steps * ACCUMULATION):
            next(data)
    while engine.global_steps < (args.stop or args.steps):
        record.loss(engine.train_batch(data_iter=data))
        record.step(engine.get_global_grad_norm())
        if args.save and engine.global_steps % args.save == 0:
            engine.save_checkpoint(str(args.folder))
    record.write(args.out)
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
