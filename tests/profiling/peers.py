"""What DeepSpeed's profiler says of the same models: ``PYTHONPATH=. python -m tests.profiling.peers`` in an environment
that has deepspeed writes peers.json, which quick tests read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FILE = Path(__file__).with_suffix(".json")
Case = tuple[nn.Module, dict[str, Any]]
"""A model, and args and kwargs of its call."""


class Attends(nn.Module):
    """Scaled dot-product attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Eager(nn.Module):
    """The same, written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(-1, -2) / 8**0.5).softmax(-1) @ x


class LeNet(nn.Sequential):
    """LeCun et al. 1998."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
        )  # fmt: skip


def _transformer(name: str, attention: str = "eager", **sizes: Any) -> Case:
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=61, attn_implementation=attention, **sizes)
    kind = {"GPT2": "GPT2LMHeadModel", "Bert": "BertModel"}.get(name, f"{name}ForCausalLM")
    kwargs = {"input_ids": torch.zeros(3, 10, dtype=torch.int64)}
    return getattr(transformers, kind)(config), {"kwargs": kwargs if name == "Bert" else kwargs | {"use_cache": False}}


_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
_BERT = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}

MODELS: dict[str, Callable[[], Case]] = {
    "perceptron": lambda: (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), {"args": [torch.ones(5, 8)]},
    ),
    "LeNet": lambda: (LeNet(), {"args": [torch.ones(8, 1, 32, 32)]}),
    "transposed convolution": lambda: (
        nn.ConvTranspose2d(4, 8, 3, stride=2, groups=2), {"args": [torch.ones(2, 4, 8, 8)]},
    ),
    "LSTM": lambda: (nn.LSTM(6, 7, 2), {"args": [torch.ones(3, 2, 6)]}),
    "GRU": lambda: (nn.GRU(6, 7), {"args": [torch.ones(3, 2, 6)]}),
    "attention, fused": lambda: (Attends(), {"args": [torch.ones(2, 4, 16, 8)]}),
    "attention, written out": lambda: (Eager(), {"args": [torch.ones(2, 4, 16, 8)]}),
    "GPT-2, eager": lambda: _transformer("GPT2", **_GPT2),
    "GPT-2, sdpa": lambda: _transformer("GPT2", "sdpa", **_GPT2),
    "Llama, eager": lambda: _transformer("Llama", **_LLAMA),
    "Llama, sdpa": lambda: _transformer("Llama", "sdpa", **_LLAMA),
    "BERT, eager": lambda: _transformer("Bert", **_BERT),
}  # fmt: skip


def dump(profile: Callable[..., Any]) -> dict[str, dict[str, int]]:
    """Of each model FLOPs, multiply-accumulates and parameters."""
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, call = make()
        numbers = profile(model.eval(), **call, print_profile=False, as_string=False)
        found[name] = dict(zip(("flops", "macs", "params"), map(int, numbers), strict=True))
    return found


if __name__ == "__main__":
    import deepspeed
    from deepspeed.profiling.flops_profiler import get_model_profile

    FILE.write_text(json.dumps({"version": deepspeed.__version__, "models": dump(get_model_profile)}, indent=1) + "\n")
