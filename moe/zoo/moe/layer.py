"""The documented layer, with its arguments, defaults and semantics."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn

from zoo.moe.dispatch import place_of_rank
from zoo.moe.experts.modules import ModuleExperts
from zoo.moe.gates.base import Gate, NoisePolicy, check_whole
from zoo.moe.gates.top1 import Top1Gate
from zoo.moe.gates.top2 import Top2Gate
from zoo.moe.gates.topk import TopKGate
from zoo.moe.mixture import Capacity, MixtureOfExperts

Tensor = torch.Tensor
_log = logging.getLogger("zoo.moe")


class MoE(MixtureOfExperts):
    """A mixture of experts as DeepSpeed's layer has it; returns ``(output, l_aux, exp_counts)``.

    Semantics by k, all local to a rank's micro-batch of T tokens: k = 1 is :class:`~zoo.moe.Top1Gate` (weights are
    the raw probabilities), 2 :class:`~zoo.moe.Top2Gate`, more :class:`~zoo.moe.TopKGate`; each expert takes
    max(⌈T/E · k · capacity_factor⌉, min_capacity) tokens. ``l_aux`` is the gate's balance loss, which the model adds to
    its own with a factor; ``exp_counts`` (E,) the tokens of each expert before drops.

    Args:
        hidden_size: D, of input and output.
        expert: (tokens, D) → (tokens, D); copied for each expert.
        num_experts: E, on all ranks.
        ep_size: ranks that share them; consecutive ones.
        k: experts of a token.
        capacity_factor, eval_capacity_factor, min_capacity: see :class:`~zoo.moe.Capacity`.
        use_residual: ``expert`` itself sees every token as well, and two coefficients weigh the two outputs.
        noisy_gate_policy: "Jitter", "RSample", None or "None".
        drop_tokens: False: experts take all.
        use_rts: k = 1: a full expert keeps tokens that are drawn.
        use_tutel: accepted, and makes no difference: the layer has kernels of its own for what Tutel speeds up
            (placing, permuting and weighing of tokens), and no dependency on it.
        enable_expert_tensor_parallelism: experts are tensor-parallel modules, which see all tokens on all
            tensor-parallel ranks; otherwise these have the same whole experts, and each sends its share of tokens.
        top2_2nd_expert_sampling: k = 2: draw the second expert, in training.

    Raises:
        ValueError: arguments that cannot be, such as more ranks than experts.
    """

    def __init__(
        self, hidden_size: int, expert: nn.Module, num_experts: int = 1, ep_size: int = 1, k: int = 1,
        capacity_factor: float = 1.0, eval_capacity_factor: float = 1.0, min_capacity: int = 4,
        use_residual: bool = False, noisy_gate_policy: str | None = None, drop_tokens: bool = True,
        use_rts: bool = True, use_tutel: bool = False, enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:  # fmt: skip
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(
                f"noisy_gate_policy={noisy_gate_policy!r}; allowed are 'Jitter', 'RSample', 'None' and None."
            )
        if use_tutel:
            _log.info("use_tutel=True makes no difference: zoo's kernels do what Tutel's do")
        if not isinstance(expert, nn.Module):
            what = expert.__name__ if isinstance(expert, type) else f"a {type(expert).__name__}"
            raise ValueError(f"MoE got {what} as its expert; give one module, which it copies for each.")
        check_whole("MoE", hidden_size=hidden_size, num_experts=num_experts, ep_size=ep_size, k=k)
        noise: Any = None if noisy_gate_policy == "None" else noisy_gate_policy
        if num_experts < 1 or num_experts % max(ep_size, 1) or ep_size < 1:
            raise ValueError(
                f"num_experts={num_experts} with ep_size={ep_size}; ep_size divides the number of experts."
            )
        here = num_experts // ep_size
        super().__init__(
            _gate(hidden_size, num_experts, k, noise, use_rts=use_rts, samples=top2_2nd_expert_sampling),
            ModuleExperts(
                [copy.deepcopy(expert) for _ in range(here)], num_experts, ep_size=ep_size,
                ep_rank=place_of_rank(ep_size), copies=True,
            ),
            capacity=Capacity(factor=capacity_factor, eval_factor=eval_capacity_factor, minimum=min_capacity)
            if drop_tokens else None,
            shared=expert if use_residual else None, residual=use_residual,
            repeated=not enable_expert_tensor_parallelism,
        )  # fmt: skip

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mix (…, D).

        Args:
            used_token: (…) or (tokens,), 0 for tokens that go to no expert and count in no loss, such as padding.

        Returns:
            output (…, D), l_aux (), exp_counts (E,) int64.
        """
        found = super().forward(hidden_states, used_token)
        return found.output, found.balance, found.demand


def _gate(
    hidden_size: int, num_experts: int, k: int, noise: NoisePolicy | None, *, use_rts: bool, samples: bool
) -> Gate:  # fmt: skip
    if k == 1:
        return Top1Gate(hidden_size, num_experts, noise=noise, random_tokens=use_rts)
    if k == 2 and num_experts > 1:
        return Top2Gate(hidden_size, num_experts, noise=noise, sample_second=samples)
    return TopKGate(hidden_size, num_experts, k=k, noise=noise)
