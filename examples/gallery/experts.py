"""A Mixtral whose experts are shared out over the ranks: zoo launch --ranks 2 examples/gallery/experts.py"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from zoo.comm import init_distributed
from zoo.engine import initialize

MODEL = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
)  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
    "moe": {"enabled": True, "ep_size": 2},
}


def main() -> None:
    init_distributed()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODEL)
    whole = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = initialize(CONFIG, model)
    mine = sum(parameter.numel() for parameter in engine.module.parameters())
    tokens = (torch.arange(16) + torch.distributed.get_rank()).repeat(2, 1) % 64
    losses = []
    for _ in range(8):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(engine.record.loss)
    if torch.distributed.get_rank() == 0:
        print(f"{mine:,} of {whole:,} parameters here; loss {losses[0]:.2f} to {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
