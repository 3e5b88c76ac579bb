"""A Llama of a GGUF file in miniature: two layers of width 32, random weights, a byte-level tokenizer with merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

from zoo.examples.smollm2 import Llama, LlamaConfig
from zoo.examples.smollm2.weights import gguf_name

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]

SIZE = LlamaConfig(
    vocabulary=len(TOKENS), width=32, layers=2, heads=4, key_value_heads=2, head_dim=8, mlp_width=64, context=64,
    rope_theta=500.0, norm_eps=1e-5, tied=True,
)  # fmt: skip


def llama(seed: int = 0, **changes: Any) -> Llama:
    """A model with random weights, norms included."""
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(**{**vars(SIZE), **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def pairs_from_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows i and i + D/2 of each head next to each other, as llama.cpp's converter leaves queries and keys."""
    rows = []
    for head in weight.split(head_dim):
        for i in range(head_dim // 2):
            rows += [head[i], head[i + head_dim // 2]]
    return torch.stack(rows)


def stored(model: Llama) -> dict[str, torch.Tensor]:
    """The tensors of a file, under its names."""
    tensors = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if ".q_proj." in name or ".k_proj." in name:
            value = pairs_from_halves(value, model.config.head_dim)
        tensors[gguf_name(name)] = value
    return tensors


def write(
    path: Path, model: Llama, *, format: str = "F32", tensors: dict[str, torch.Tensor] | None = None, **metadata: Any
) -> Path:
    """A file of the model; matrices in ``format``; ``metadata`` instead of what the model says, None for none."""
    size, kind = model.config, gguf.GGMLQuantizationType[format]
    says: dict[str, Any] = {
        "llama.vocab_size": size.vocabulary, "llama.embedding_length": size.width, "llama.block_count": size.layers,
        "llama.attention.head_count": size.heads, "llama.attention.head_count_kv": size.key_value_heads,
        "llama.feed_forward_length": size.mlp_width, "llama.context_length": size.context,
        "llama.rope.freq_base": size.rope_theta, "llama.attention.layer_norm_rms_epsilon": size.norm_eps,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(MARKS) + [1] * (len(TOKENS) - len(MARKS)),
        "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, says.pop("general.architecture", "llama"))
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in says.items():
        if value is not None:
            kinds.get(type(value), writer.add_array)(key, value)
    for name, tensor in (stored(model) if tensors is None else tensors).items():
        values = tensor.numpy().astype(np.float32)
        if values.ndim == 1 or format == "F32":
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
