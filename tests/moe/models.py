"""Models with experts: small ones of transformers, and one with its contract that needs no import of it."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")

WIDTH, HIDDEN, VOCABULARY = 6, 4, 11


class Router(nn.Module):
    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.weight, self.k = nn.Parameter(torch.empty(experts, WIDTH)), k
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        scores = logits.sigmoid()
        index = (scores + self.e_score_correction_bias).topk(self.k, -1).indices
        weights = scores.gather(1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index


class OneByOne(nn.Module):
    """One expert after the other, by definition."""

    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            weight = (top_k_weights * (top_k_index == e)).sum(-1, keepdim=True)
            out = out + weight * self.expert(hidden_states, e)
        return out

    def expert(self, x: Tensor, e: int) -> Tensor:
        raise NotImplementedError


class DeepseekV3Experts(OneByOne):
    """Known by its name."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * HIDDEN, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(experts, WIDTH, HIDDEN))
        self.act_fn = nn.SiLU()

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate, up = (x @ self.gate_up_proj[e].t()).chunk(2, -1)
        return self.act_fn(gate) * up @ self.down_proj[e].t()


class SelfSaying(OneByOne):
    """Says of itself how it is laid out: transposed, with biases, gate and first map interleaved."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, WIDTH, 2 * HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(experts, HIDDEN, WIDTH))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * HIDDEN))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, WIDTH))
        self.has_gate, self.has_bias, self.is_transposed = True, True, True

    def _apply_gate(self, h: Tensor) -> Tensor:
        return torch.sigmoid(h[..., ::2]) * h[..., 1::2]

    def expert(self, x: Tensor, e: int) -> Tensor:
        h = self._apply_gate(x @ self.gate_up_proj[e] + self.gate_up_proj_bias[e])
        return h @ self.down_proj[e] + self.down_proj_bias[e]


class Plain(OneByOne):
    """Known only by a description."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.w_in = nn.Parameter(torch.empty(experts, HIDDEN, WIDTH))
        self.w_out = nn.Parameter(torch.empty(experts, WIDTH, HIDDEN))
        self.phi = torch.tanh

    def expert(self, x: Tensor, e: int) -> Tensor:
        return self.phi(x @ self.w_in[e].t()) @ self.w_out[e].t()


class Block(nn.Module):
    def __init__(self, kind: Callable[[int], OneByOne], experts: int, k: int) -> None:
        super().__init__()
        self.gate, self.experts = Router(experts, k), kind(experts)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        _, weights, index = self.gate(flat)
        return self.experts(flat, index, weights).view(x.shape) + self.shared(x)


class Small(nn.Module):
    """(tokens,) ids → a sum over tokens, so that a rank without tokens has a loss too."""

    def __init__(
        self, kind: Callable[[int], OneByOne] = DeepseekV3Experts, experts: int = 4, k: int = 2, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(kind, experts, k) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()
        fill(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), ids, reduction="sum")


def fill(model: nn.Module, seed: int = 0, std: float = 0.4) -> None:
    """The same values whatever the dtype and the order in which others drew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)


def of_transformers(family: str) -> Any:
    """A small model of a family, in float64, one expert after the other."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    deepseek: dict[str, Any] = {
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_group": 2, "topk_group": 1, "n_routed_experts": 8,
    }  # fmt: skip
    few: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    makers: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
        "gemma": ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 8}),
        "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"hidden_dropout": 0.0}),
        "phi": ("PhiForCausalLM", "PhiConfig", {}),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_inner": 24, "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "qwen2_moe": (
            "Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**few, "num_experts": 4, "shared_expert_intermediate_size": 8}
        ),
        "qwen3_moe": (
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**few, "num_experts": 4, "head_dim": 8, "norm_topk_prob": True}
        ),
        "deepseek_v2": (
            "DeepseekV2ForCausalLM", "DeepseekV2Config", {**deepseek, "topk_method": "group_limited_greedy"}
        ),
        "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", deepseek),
        "gpt_oss": (
            "GptOssForCausalLM", "GptOssConfig",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rope_parameters": rope},
        ),
    }  # fmt: skip
    cls, config, own = makers[family]
    model = getattr(hf, cls)(getattr(hf, config)(**common, **own))
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the others take no float64 on a CPU
    model.double().train()
    fill(model, std=0.3)
    return model


class Gated(nn.Module):
    """As in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Conv1D(nn.Module):
    """A linear map whose weight is (in, out)."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(into, out)), nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class AsInGPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(HIDDEN, WIDTH), Conv1D(WIDTH, HIDDEN)
        self.act, self.dropout = nn.GELU(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return out


class Own(nn.Module):
    """Known only by a description; one of its maps has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.phi = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.phi(self.a(x)))
        return out


class Odd(nn.Module):
    """Nothing that grouped experts could do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.norm(self.a(x)).tanh())
        return out


class Dense(nn.Module):
    """(tokens,) ids → a sum over tokens."""

    def __init__(self, kind: Callable[[], nn.Module] = Gated, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": kind()}) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.config = types.SimpleNamespace(hidden_size=WIDTH)
        self.recomputes = False
        self.double()
        fill(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            mlp = layer["mlp"]
            x = x + (checkpoint(mlp, x, use_reentrant=False) if self.recomputes else mlp(x))
        return F.cross_entropy(self.head(x), ids, reduction="sum")


class AsTransformers(nn.Module):
    """Called as models of transformers are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(loss=self.model(input_ids))
