"""A byte-level GPT: pre-norm blocks, causal attention, tied head.

Shape suffixes: B batch, T time, C width, H heads, V = 256 byte values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from zoo.config import ComponentChoice
from zoo.registry import DEFAULT

NUM_BYTES = 256


class MlpChoice(ComponentChoice):
    """Which perceptron the blocks have, such as "moe" of zoo-moe, and its options."""

    kind: ClassVar[str] = "mlp"
    runtime: ClassVar[tuple[str, ...]] = ("width", "depth", "generator")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of a :class:`ByteGPT`.

    ``layers`` blocks of width ``width`` with ``heads`` attention heads each; windows of at most ``context`` bytes.
    ``mlp``: a component in the place of the blocks' perceptrons, which gives its output, or that and a loss of its own.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    mlp: MlpChoice | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"the byte model got {name}={getattr(self, name)}; it must be at least 1.")
        if self.width % self.heads:
            raise ValueError(
                f"the byte model got width={self.width} and heads={self.heads}; the width must be a multiple of the "
                f"heads."
            )

    def to_dict(self) -> dict[str, Any]:
        """The same in the words of ``transformers``, whose GPT-2 has these layers unless ``mlp`` is given."""
        return {
            "model_type": "gpt2" if self.mlp is None else f"byte_lm with {self.mlp.type}", "n_embd": self.width,
            "n_head": self.heads, "n_layer": self.layers, "n_positions": self.context, "vocab_size": NUM_BYTES,
            "tie_word_embeddings": True, "resid_pdrop": 0.0,
        }  # fmt: skip


class Block(nn.Module):
    """``x + Attention(LN(x))``, then ``x + MLP(LN(x))`` with ``MLP(h) = W2 GELU(W1 h)``; (B, T, C) to (B, T, C).

    Args:
        mlp: another perceptron.
    """

    def __init__(self, config: ModelConfig, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = mlp
        width = config.width
        self.head_dim = width // config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        if mlp is None:
            self.widen = nn.Linear(width, 4 * width)
            self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One block; with the loss of its perceptron, where that has one."""
        batch, time, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, -1, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, -1))
        if self.mlp is not None:
            found = self.mlp(self.norm_mlp(x))
            return (x + found[0], found[1]) if isinstance(found, tuple) else x + found
        out: torch.Tensor = x + self.narrow(F.gelu(self.widen(self.norm_mlp(x)), approximate="tanh"))
        return out


class ByteGPT(nn.Module):
    """p(next byte | the bytes before it) = softmax(E LN(h)) with h the last block's output, E the token embedding.

    Args:
        config: the size.
        seed: of the initial weights: N(0, 0.02^2), the two projections back into the residual stream
            N(0, 0.02^2 / (2 layers)), biases 0, norms 1.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(NUM_BYTES, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, self._mlp(seed, i)) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTES, bias=False)
        self.head.weight = self.token.weight
        self._initialise(torch.Generator().manual_seed(seed))

    def _mlp(self, seed: int, layer: int) -> nn.Module | None:
        choice, sizes = self.config.mlp, self.config
        if choice is None:
            return None
        generator = torch.Generator().manual_seed(1_000_003 * seed + layer + 1)
        made: nn.Module = DEFAULT.build(
            "mlp", choice.type, choice.params, width=sizes.width, depth=sizes.layers, generator=generator
        )
        return made

    def _initialise(self, generator: torch.Generator) -> None:
        back = 0.02 / math.sqrt(2 * self.config.layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if ".mlp." in name:
                    continue  # it has initialised itself
                if parameter.dim() == 2:
                    into_residual = name.endswith(("project.weight", "narrow.weight"))
                    parameter.normal_(0.0, back if into_residual else 0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, T, V) of the bytes after ``x`` (B, T) int64, or, given them as ``y``, the mean loss in nats.

        In training it has the losses of the perceptrons in it.
        """
        logits, losses = self._logits(x)
        if y is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        return loss + torch.stack(losses).sum() if losses and self.training else loss

    def tensor_plan(self) -> Any:
        """A :class:`zoo.tensor.Plan`: how the model is cut over ranks of the axis "tensor"."""
        from zoo.tensor import Plan, Rule
        from zoo.tensor.families.pieces import perceptron, vocabulary

        config = self.config
        return Plan(
            name="byte_lm",
            sizes=(("head", config.heads), ("vocab", NUM_BYTES)),
            rules=(
                *vocabulary("token", head="head"),
                Rule(module="blocks.*.qkv", rows="part=3 head dim", cut="head"),
                Rule(module="blocks.*.project", columns="head dim", cut="head"),
                *(perceptron("blocks.*.widen", down="blocks.*.narrow") if config.mlp is None else ()),
            ),
            layers="blocks.*",
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) byte values to (B, T, V)."""
        return self._logits(x)[0]

    def _logits(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        time = x.shape[1]
        if time > self.config.context:
            raise ValueError(f"the byte model got windows of {time} bytes; its context is {self.config.context}.")
        h = self.token(x) + self.position(torch.arange(time, device=x.device))
        losses: list[torch.Tensor] = []
        for block in self.blocks:
            h = block(h)
            if isinstance(h, tuple):
                h, loss = h
                losses.append(loss)
        return self.head(self.norm(h)), losses


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, num_bytes: int, *, context: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """``prompt`` continued by ``num_bytes`` bytes drawn from softmax(logits / temperature).

    A collective where the model's parameters are sharded: every rank calls it with the same arguments, and all ranks
    run the same number of forward passes.
    """
    if not prompt:
        raise ValueError("generate got an empty prompt; give at least one byte to continue.")
    if temperature <= 0:
        raise ValueError(f"generate got temperature={temperature}; it must be positive.")
    device = next(iter(model.parameters())).device
    generator = torch.Generator().manual_seed(seed)
    values = list(prompt)
    for _ in range(num_bytes):
        x = torch.tensor([values[-context:]], dtype=torch.int64, device=device)
        odds = torch.softmax(model(x)[0, -1].float().cpu() / temperature, dim=-1)
        values.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(values)
