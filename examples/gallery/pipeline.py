"""A Llama in two stages, each under ZeRO on two ranks: zoo launch --ranks 4 examples/gallery/pipeline.py"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from zoo.comm import init_distributed
from zoo.engine import initialize
from zoo.pipe import split

MODEL = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
)  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 1},
}


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def main() -> None:
    init_distributed()
    torch.manual_seed(0)
    tokens = torch.arange(16).repeat(2, 1)
    model = AutoModelForCausalLM.from_config(MODEL)
    stages = split(model, num_stages=2, example={"input_ids": tokens, "use_cache": False}, loss_fn=loss_of)
    engine, *_ = initialize(CONFIG, stages)
    losses = []
    for _ in range(5):
        batch = ({"input_ids": tokens, "use_cache": False}, tokens)
        losses.append(float(engine.train_batch(iter([batch] * 4))))
    print(f"rank {torch.distributed.get_rank()}: {len(list(stages.parameters()))} parameters, loss {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
