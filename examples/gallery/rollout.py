"""Answers are drawn from the model in training, and good ones reinforced.

zoo launch --ranks 2 examples/gallery/rollout.py

The reward is the share of the token 7 in an answer. The loss is REINFORCE with the mean reward as its
baseline (Williams 1992).
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from zoo.comm import init_distributed
from zoo.inference import Rollout, Sampling
from zoo.zero import Stage3Optimizer

MODEL = LlamaConfig(
    vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def main() -> None:
    init_distributed()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODEL)
    optimizer = Stage3Optimizer(model, optimizer=torch.optim.AdamW, lr=0.01)
    rollout = Rollout(optimizer)
    rank = torch.distributed.get_rank()
    prompts = [torch.tensor([rank + 1, i]) for i in range(4)]  # each rank has its own
    means = []
    for step in range(6):
        answers = rollout.generate(prompts, max_new_tokens=8, sampling=Sampling(seed=step), end=[])
        tokens = torch.stack([answer[-8:] for answer in answers])
        rewards = (tokens == 7).float().mean(1)
        torch.distributed.all_reduce(mean := rewards.mean())
        means.append(float(mean) / torch.distributed.get_world_size())
        model.train()
        sequences = torch.cat([torch.stack(prompts), tokens], 1)
        logits = model(input_ids=sequences).logits[:, 1:-1]
        likely = torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0].sum(1)
        ((means[-1] - rewards) * likely).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print("share of 7 by step:", " ".join(f"{mean:.2f}" for mean in means))


if __name__ == "__main__":
    main()
