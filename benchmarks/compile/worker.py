"""One rank of one contender: seconds of the first step and of later ones, losses."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from benchmarks.launch import answer

BATCH = 2


def gpt(spec: dict[str, Any]) -> Any:
    """Blocks with a fused projection, layer norms and GELU."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width = spec["width"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, dim=-1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            made: torch.Tensor = x + self.down(F.gelu(self.up(self.after(x))))
            return made

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(spec["words"], width)
            self.blocks = nn.ModuleList(Block() for _ in range(spec["blocks"]))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, spec["words"], bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    return Model()


def llama(spec: dict[str, Any]) -> Any:
    """That of transformers."""
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    width = spec["width"]
    config = LlamaConfig(
        vocab_size=spec["words"], hidden_size=width, intermediate_size=3 * width, num_hidden_layers=spec["blocks"],
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LlamaForCausalLM(config)

        @property
        def blocks(self) -> Any:
            return self.inner.model.layers

        def forward(self, tokens: Any) -> Any:
            return self.inner(input_ids=tokens, labels=tokens).loss

    return Model()


def tokens_of(spec: dict[str, Any], step: int, rank: int) -> Any:
    """(BATCH, length) of a rank in a step."""
    import torch

    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randint(spec["words"], (BATCH, spec["length"]), generator=generator)


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Median CPU and wall seconds of steps after the first two, the first step, losses."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = {"gpt": gpt, "llama": llama}[spec["model"]](spec)
    model.to(torch.bfloat16 if spec["bf16"] else torch.float32)
    contender = spec["contender"]
    lower = partial(torch.autocast, "cpu", torch.bfloat16, enabled=spec.get("autocast", False))
    adamw: dict[str, Any] = {"lr": 1e-3, "fused": True}
    if contender.startswith("fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        if contender.endswith("blocks"):
            for block in model.blocks:
                block.compile()
    else:
        from zoo.zero import Precision, ZeroOptimizer

        if contender.endswith("_fused"):
            from zoo.compile import use_dtypes

            with lower():
                adamw["precision"] = Precision(gather=use_dtypes(model, tokens_of(spec, 0, rank)))
        optimizer = ZeroOptimizer(model, stage=3, optimizer=torch.optim.AdamW, **adamw)
        if contender == "zoo_blocks":
            optimizer.sharded.runtime.compiled.compile_units()
        if contender.startswith("zoo_whole"):
            from zoo.compile import compile_whole

            whole = compile_whole(optimizer.sharded)
    cpu, wall, losses = [], [], []
    for step in range(spec["steps"] + 2):
        tokens = tokens_of(spec, step, rank)
        begun, at = time.process_time(), time.perf_counter()
        with lower():
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        cpu.append(time.process_time() - begun)
        wall.append(time.perf_counter() - at)
    if contender.startswith("zoo_whole") and whole.reasons:
        raise RuntimeError(f"no whole graph: {whole.reasons}")
    return {
        "cpu_s": statistics.median(cpu[2:]),
        "wall_s": statistics.median(wall[2:]),
        "first_s": wall[0],
        "losses": losses,
    }


if __name__ == "__main__":
    answer(measure)
