"""One rank of one contender: CPU seconds of a training step, or of a token."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.launch import answer

LENGTH, BATCH, PROMPT = 128, 2, 16


def config_of(spec: dict[str, Any]) -> Any:
    """Of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(**spec["shape"], tie_word_embeddings=spec["tied"], attn_implementation="sdpa")


def built(spec: dict[str, Any]) -> tuple[Any, Any]:
    """(model, optimizer; None for tokens)."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaForCausalLM

    contender, trains = spec["contender"], spec["what"] == "train"
    adamw: dict[str, Any] = {"lr": 1e-4, "fused": True}
    torch.manual_seed(0)
    if contender == "transformers":
        from transformers.distributed import DistributedConfig

        model = LlamaForCausalLM.from_pretrained(
            spec["folder"], dtype=torch.float32, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False) if trains else None
    model = LlamaForCausalLM(config_of(spec))
    if contender == "whole_injected":
        from zoo.inject import inject

        inject(model.eval())
    if contender.startswith("whole"):
        return model, torch.optim.AdamW(model.parameters(), **adamw) if trains else None
    if contender.startswith("zoo"):
        from zoo.tensor import in_parts, plan_of, split, sum_gradients

        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        split(model, plan_of(model), mesh, training=trains, sequence=contender == "zoo_sequence")
        if contender == "zoo_injected":
            from zoo.inject import inject

            inject(model.eval())
        if not trains:
            return model, None
        in_parts(model)
        if "stage" not in contender:
            optimizer = torch.optim.AdamW(model.parameters(), **adamw)
            optimizer.register_step_pre_hook(lambda *_: sum_gradients(model))
            return model, optimizer
        from zoo.zero import ZeroOptimizer

        return model, ZeroOptimizer(
            model, stage=int(contender[-1]), optimizer=torch.optim.AdamW, mesh=mesh, data_axes=["data"], **adamw
        )
    if contender == "deepspeed":
        from benchmarks.zero.contenders import import_deepspeed

        deepspeed = import_deepspeed()
        config = {
            "train_micro_batch_size_per_gpu": BATCH, "tensor_parallel": {"autotp_size": 2}, "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 0},
        }  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), **adamw) if trains else None
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        return engine, engine if trains else None
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    for layer in model.model.layers:
        at = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        mlp = {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        out = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, {**at, **mlp, **out})
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends if not spec["tied"] else {})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False) if trains else None


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Median CPU and wall seconds, and what came out."""
    import torch

    model, optimizer = built(spec)
    ids = torch.randint(spec["shape"]["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    if optimizer is not None:

        def once() -> float:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if model is optimizer:  # DeepSpeed's engine
                model.backward(loss)
                model.step()
                return float(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        times, values = _timed(once, spec["steps"])
        return {**times, "value": values[0]}
    model.eval()
    with torch.no_grad():
        cache = model(ids[:1, :PROMPT], use_cache=True).cache
        token = ids[:1, PROMPT : PROMPT + 1]
        drawn: list[int] = []

        def next_token() -> float:
            nonlocal token
            token = model(token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
            drawn.append(int(token))
            return float(drawn[-1])

        times, _ = _timed(next_token, spec["steps"])
    return {**times, "value": drawn[:4]}


def _timed(once: Any, number: int) -> tuple[dict[str, float], list[float]]:
    cpu, wall, values = [], [], []
    for step in range(number + 2):
        begun, at = time.process_time(), time.perf_counter()
        values.append(once())
        if step >= 2:
            cpu.append(time.process_time() - begun)
            wall.append(time.perf_counter() - at)
    return {"cpu_s": statistics.median(cpu), "wall_s": statistics.median(wall)}, values


if __name__ == "__main__":
    answer(measure)
