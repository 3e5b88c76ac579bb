"""A Llama: RMSNorm before each half of a block, rotary positions, grouped-query attention, SwiGLU.

Modules have the names of Hugging Face's Llama, so that a ``state_dict()`` is already what others load.

Shape suffixes: B batch, T time, C width, D head dimension, V vocabulary.

Touvron et al. 2023, "LLaMA", section 2.2; Su et al. 2021, "RoFormer", section 3.4 (rotary positions); Ainslie et al.
2023, "GQA", section 2; Shazeer 2020, "GLU variants improve Transformer" (SwiGLU); Zhang and Sennrich 2019 (RMSNorm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Size of a :class:`Llama`.

    ``layers`` blocks of width ``width``; ``heads`` query heads of ``head_dim`` each, which share ``key_value_heads``
    keys and values; an MLP of ``mlp_width``; ``vocabulary`` tokens; trained on windows of ``context`` tokens. ``tied``:
    the head is the embedding.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    mlp_width: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "key_value_heads", "head_dim", "mlp_width", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"a Llama got {name}={getattr(self, name)}; it must be at least 1.")
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"a Llama got heads={self.heads} and key_value_heads={self.key_value_heads}; the heads must be a "
                f"multiple of the key/value heads, which they share."
            )
        if self.head_dim % 2 or self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError(
                f"a Llama got head_dim={self.head_dim}, rope_theta={self.rope_theta} and norm_eps={self.norm_eps}; the "
                f"head dimension must be even, because positions rotate pairs, and the others positive."
            )

    def to_dict(self) -> dict[str, Any]:
        """The same in the words of ``transformers``."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.tied,
        }


class Linear(nn.Linear):
    """x Wᵀ. Where it has no values, no random ones are drawn: on "meta" that imports torch's compiler (seconds)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """torch's random weights."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Embedding(nn.Embedding):
    """A row of the table a token; as :class:`Linear` on "meta"."""

    def reset_parameters(self) -> None:
        """torch's random weights."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Attention(nn.Module):
    """softmax(Q Kᵀ / √D + causal mask) V over rotated Q and K; (B, T, C) to (B, T, C)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_dim, config.key_value_heads * config.head_dim
        self.q_proj = Linear(config.width, queries)
        self.k_proj = Linear(config.width, keys)
        self.v_proj = Linear(config.width, keys)
        self.o_proj = Linear(queries, config.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attention with the rotation of :func:`rotation`."""
        batch, time, _ = x.shape
        q, k, v = (
            p(x).view(batch, time, -1, self.config.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        shared = q.shape[1] // k.shape[1]
        # Repeated by hand: torch's kernels for processors do not group queries themselves.
        k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))
        return out


class MLP(nn.Module):
    """SwiGLU: W_down (SiLU(W_gate x) ⊙ W_up x); (B, T, C) to (B, T, C)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.mlp_width)
        self.up_proj = Linear(config.width, config.mlp_width)
        self.down_proj = Linear(config.mlp_width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP of one block."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """``x + Attention(RMSNorm(x))``, then ``x + MLP(RMSNorm(x))``; (B, T, C) to (B, T, C)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """One block."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the last norm; (B, T) int64 to (B, T, C).

    Args:
        checkpoint_activations: keep of each layer its input alone and compute the rest again in backward (Chen et al.
            2016, "Training deep nets with sublinear memory cost").
    """

    def __init__(self, config: LlamaConfig, checkpoint_activations: bool) -> None:
        super().__init__()
        self.config, self.checkpoint_activations = config, checkpoint_activations
        self.embed_tokens = Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The state after the last norm."""
        h = self.embed_tokens(tokens)
        cos, sin = rotation(tokens.shape[1], self.config, h)
        for layer in self.layers:
            if self.checkpoint_activations and torch.is_grad_enabled():
                h = checkpoint(layer, h, cos, sin, use_reentrant=False)
            else:
                h = layer(h, cos, sin)
        out: torch.Tensor = self.norm(h)
        return out


class Llama(nn.Module):
    """p(next token | the tokens before it) = softmax(W h), h the decoder's state, W the embedding where ``tied``.

    The weights are torch's random ones; :func:`zoo.examples.smollm2.pretrained` gives a model with those of a file.
    """

    def __init__(self, config: LlamaConfig, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, checkpoint_activations)
        self.lm_head = Linear(config.width, config.vocabulary)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def tensor_plan(self) -> Any:
        """A :class:`zoo.tensor.Plan`: how the model is cut over ranks of the axis "tensor"."""
        from zoo.tensor import Plan
        from zoo.tensor.families.pieces import attention, perceptron, vocabulary

        config, layer = self.config, "model.layers.*"
        return Plan(
            name="smollm2",
            sizes=(("head", config.heads), ("kv", config.key_value_heads), ("vocab", config.vocabulary)),
            rules=(
                *vocabulary("model.embed_tokens"),
                *attention(f"{layer}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
                *perceptron(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj", down=f"{layer}.mlp.down_proj"),
            ),
            layers=layer,
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, T, V) of what follows ``tokens`` (B, T) int64, or, given it as ``targets``, the mean loss in nats.

        Raises:
            ValueError: more tokens than the model was trained on at a time.
        """
        if tokens.shape[1] > self.config.context:
            raise ValueError(
                f"the model got windows of {tokens.shape[1]} tokens; its context is {self.config.context}."
            )
        logits: torch.Tensor = self.lm_head(self.model(tokens))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotation(time: int, config: LlamaConfig, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the angle t · theta^(-2 i / D) at row t and columns i and i + D/2; (T, D) each.

    The angles are computed in fp32 whatever the dtype of the model: positions past 256 are not whole numbers in bf16.
    """
    half = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float32) / config.head_dim
    angle = torch.outer(torch.arange(time, device=like.device, dtype=torch.float32), config.rope_theta**-half)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The pair (x_i, x_{i+D/2}) of each head turned by its angle; (B, heads, T, D) to the same."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    num_tokens: int,
    *,
    context: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """``prompt`` and up to ``num_tokens`` more: the likeliest each, or drawn from softmax(logits / temperature).

    Nothing is cached: each token costs a forward over the last ``context`` ones. A collective where the model's
    parameters are sharded: every rank calls it with the same arguments and runs the same number of forward passes.

    Args:
        temperature: 0 for the likeliest token.
        seed: of the draws.
        stop: end after this token.
    """
    if not prompt:
        raise ValueError("generate got an empty prompt; give at least one token to continue.")
    if temperature < 0:
        raise ValueError(f"generate got temperature={temperature}; it must be 0 (the likeliest token) or positive.")
    device = next(iter(model.parameters())).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens[-context:]], device=device))[0, -1].float().cpu()
        if temperature:
            tokens.append(int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)))
        else:
            tokens.append(int(logits.argmax()))
        if tokens[-1] == stop:
            break
    return tokens
