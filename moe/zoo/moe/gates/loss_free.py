"""Balance without a loss: a bias that chooses, and does not weigh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.moe.gates.base import Gate, NoisePolicy
from zoo.moe.gates.chosen import best, routed
from zoo.moe.losses import load_of
from zoo.moe.routing import Routing

Tensor = torch.Tensor


class LossFreeGate(Gate):
    """The k experts of greatest s_te + b_e, s = σ(v); weights are s_te without the bias, divided by their sum.

    After a step b_e ← b_e + u sign(c̄ − c_e), c_e the tokens that expert e was chosen by in the whole step: over all
    micro-batches and data ranks, dropped ones too (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts", algorithm 1; DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
    :meth:`commit` does it; the engine calls it with each update, a loop of its own calls
    :func:`zoo.moe.commit_balance`.

    Args:
        speed: u.
        renormalise: divide weights by their sum, over what was not dropped.
        scale: what they are multiplied by then.
        score: "sigmoid" or "softmax".

    Attributes:
        bias: (E,) float32, a buffer.
        counted: (E,) int64: tokens of the step so far, on this rank.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, *, k: int = 2, noise: NoisePolicy | None = None,
        speed: float = 1e-3, renormalise: bool = True, scale: float = 1.0, score: str = "sigmoid",
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, num_experts, k=k, noise=noise)
        if score not in ("sigmoid", "softmax"):
            raise ValueError(f"{type(self).__name__} got score={score!r}; allowed are 'sigmoid' and 'softmax'.")
        if noise == "RSample":
            raise ValueError(f"{type(self).__name__} got noise='RSample'; it chooses by scores, not by a softmax.")
        self.speed, self.renormalise, self.scale, self.score = speed, renormalise, scale, score
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))  # whatever the default dtype is

    def reset_parameters(self) -> None:
        """The bias begins at 0."""
        super().reset_parameters()
        bias = self._buffers.get("bias")
        if bias is not None:
            bias.zero_()

    def route(self, logits: Tensor, used: Tensor | None, key: Tensor | None) -> Routing:
        """See :class:`Gate`."""
        scores = torch.sigmoid(logits) if self.score == "sigmoid" else torch.softmax(logits, -1)
        experts = self.choose(scores.detach() + self.bias.to(scores.dtype))
        shares = scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)  # all may be 0
        return routed(
            experts, scores.gather(1, experts), logits, used, load_of(shares, experts, used, choices=self.k),
            renormalise=self.renormalise, scale=self.scale,
        )  # fmt: skip

    def choose(self, values: Tensor) -> Tensor:
        """(T, k): experts by (T, E) scores with the bias."""
        return best(values, self.k)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> LossFreeGate:
        """In 16 bits small steps of the bias would be lost: a model's dtype is not its own."""
        kept = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias.is_floating_point() and self.bias.itemsize < 4:
            self.bias = kept.to(self.bias.device)
        return self

    @torch.no_grad()
    def commit(self, counts: Tensor) -> None:
        """Move the bias by the (E,) counts of a whole step."""
        wide = counts.to(torch.float64)
        if self.bias.itemsize < 4:  # load_state_dict(assign=True) of a state in 16 bits
            self.bias = self.bias.float()
        self.bias.add_(torch.sign(wide.mean() - wide).to(self.bias), alpha=self.speed)
