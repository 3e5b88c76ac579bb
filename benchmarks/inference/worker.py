"""One contender: CPU seconds of a token and of a prompt, and what scoring and generating differ by."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.launch import answer

PROMPT, TOKENS, LONG = 16, 32, 512


def built(spec: dict[str, Any]) -> Any:
    """The model of a contender."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**spec["shape"], tie_word_embeddings=True, max_position_embeddings=2048)
    model: Any = LlamaForCausalLM(config)
    model.eval()
    if spec["weights"]:
        from zoo.examples.smollm2 import SmolLM2Task

        task = SmolLM2Task(SmolLM2Task.Config(num_validation_windows=4), seed=0)
        model.load_state_dict(dict(task.model().named_parameters()), strict=False)
    model.to(getattr(torch, spec["dtype"]))
    if spec["contender"] in ("zoo", "invariant"):
        from zoo.inject import inject

        inject(model, invariant=spec["contender"] == "invariant")
    return model


def measure(spec: dict[str, Any], rank: int) -> dict[str, float]:
    """CPU seconds of a token and of a prompt; what scoring and generating differ by."""
    import torch

    model = built(spec)
    ids = torch.randint(spec["shape"]["vocab_size"], (1, LONG), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {
        "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    options |= {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    if spec["contender"] == "compiled":
        options["cache_implementation"] = "static"
        model.forward = torch.compile(model.forward, dynamic=False)
    model.generate(ids[:, :PROMPT], **options)
    begun = time.process_time()
    out = model.generate(ids[:, :PROMPT], **options)
    token = (time.process_time() - begun) / TOKENS
    with torch.no_grad():
        model(ids, use_cache=False)
        begun = time.process_time()
        model(ids, use_cache=False)
        prompt = time.process_time() - begun
        scored = model(out.sequences, use_cache=False).logits[0, PROMPT - 1 : -1]
    words = out.sequences[0, PROMPT:, None]
    made, right = (torch.log_softmax(logits.float(), -1).gather(1, words) for logits in (torch.cat(out.logits), scored))
    memory = torch.ones(1 << (20 if spec["quick"] else 27))
    memory.sum()
    begun = time.process_time()
    memory.sum()
    speed = memory.nbytes / (time.process_time() - begun)
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    return {
        "token_s": token, "prompt_s": prompt, "gap": float((made - right).abs().mean()), "read": speed,
        "share": weights / token / speed,
    }  # fmt: skip


if __name__ == "__main__":
    answer(measure)
