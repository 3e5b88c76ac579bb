"""Train a model with a mixture of experts: deepspeed.moe.layer.MoE, half of the experts on each rank.

torchrun --nproc-per-node=2 examples/clients/moe.py --stage 2
"""

from __future__ import annotations

import deepspeed
import torch
from common import ACCUMULATION, LEARNING_RATE, MICRO_BATCH, VOCABULARY, Record, Text, arguments, filled_config
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.nn import functional as F

WIDTH, EXPERTS, RANKS_OF_EXPERTS = 32, 4, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(
            WIDTH,
            expert=nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)),
            num_experts=EXPERTS,
            ep_size=RANKS_OF_EXPERTS,
            k=2,
            capacity_factor=2.0,
            min_capacity=0,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.dense(x))
        y, balance, _ = self.moe(self.norm(x))
        loss = F.cross_entropy(self.head(x + y)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 0.01 * balance


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    group = {"params": list(model.parameters()), "name": "all", "lr": LEARNING_RATE}
    return split_params_into_different_moe_groups_for_optimizer(group)


def main() -> None:
    args = arguments(__doc__)
    deepspeed.init_distributed()
    torch.manual_seed(7)
    model = Model()
    config = filled_config(args)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model), config=config)

    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    batches = Text(args.steps * ACCUMULATION * MICRO_BATCH * ranks).tokens.split(MICRO_BATCH)[rank::ranks]
    record = Record()
    if args.resume:
        engine.load_checkpoint(str(args.folder))
    for batch in batches[engine.global_steps * ACCUMULATION :]:
        loss = engine(batch)
        engine.backward(loss)
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        record.loss(loss)
        if not at_boundary:
            continue
        record.step(engine.get_global_grad_norm())
        if args.save and engine.global_steps % args.save == 0:
            engine.save_checkpoint(str(args.folder))
        if engine.global_steps == args.stop:
            break
    record.write(args.out)
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
