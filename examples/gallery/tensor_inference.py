"""A Llama whose matrices are cut over two ranks generates tokens.

zoo launch --ranks 2 examples/gallery/tensor_inference.py
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from zoo.comm import init_distributed
from zoo.inference import Sampling, generate
from zoo.tensor import plan_of, split

MODEL = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def main() -> None:
    init_distributed()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODEL).eval()
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    whole = generate(model, prompts, max_new_tokens=8, sampling=Sampling(seed=1), end=[])
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tensor",))
    split(model, plan_of(model), mesh)
    parts = generate(model, prompts, max_new_tokens=8, sampling=Sampling(seed=1), end=[])
    if torch.distributed.get_rank() == 0:
        print(parts[0].tolist(), "as on one rank:", all(map(torch.equal, whole, parts)))


if __name__ == "__main__":
    main()
