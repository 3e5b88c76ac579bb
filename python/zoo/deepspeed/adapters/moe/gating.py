"""``deepspeed.moe.sharded_moe``: gates as functions of logits, whose answer is dense: who goes to which place.

Legend: T tokens of this rank, E experts, k choices of a token, C places of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zoo.kernels.gating import positions_in_expert

Tensor = torch.Tensor

TUTEL_INSTALLED = False
"""zoo's layers have kernels of their own for what Tutel does."""


def top1gating(
    logits: Tensor, capacity_factor: float, min_capacity: int, used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None, drop_tokens: bool = True, use_rts: bool = True, ep_group: Any = None,
    sparse_routes: bool = False, use_tutel: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The most probable expert of each token, weighed by its probability.

    Args:
        logits: (T, E).
        capacity_factor, min_capacity: an expert has C = max(⌈T/E · factor⌉, min_capacity) places.
        used_token: (T,), 0 for tokens that go nowhere.
        noisy_gate_policy: "RSample" draws the expert from the probabilities.
        drop_tokens: False: C is as large as the fullest expert of ``ep_group``'s ranks needs.
        use_rts: a full expert keeps tokens that are drawn, not the first ones.
        sparse_routes: the answer is (l_aux, C, E, experts, places, weights, counts), of which experts (-1 for what is
            dropped) and places are (k, T) int32, weights (k, T).
        use_tutel: makes no difference.

    Returns:
        l_aux () and weights (T, E, C), in float32 for logits of 16 bits; which of the weights are not 0; and the tokens
        of each expert before drops (E,).
    """
    _check("top1gating", logits, 1, capacity_factor, min_capacity, used_token)
    gates = F.softmax(logits, dim=1)
    noisy = logits + _gumbel(logits) if noisy_gate_policy == "RSample" else gates
    experts = noisy.argmax(1, keepdim=True)
    used = torch.ones(len(logits), 1, dtype=torch.bool, device=logits.device)
    if used_token is not None:
        used = used_token.reshape(-1, 1) != 0
    counts = _counts(experts, used, logits.shape[1])
    places = (
        _capacity(logits, capacity_factor, min_capacity) if drop_tokens else _fullest(counts, len(logits), ep_group)
    )
    lots = torch.rand(len(logits), 1, device=logits.device) if use_rts else None
    kept, at = _placed(experts, used, logits.shape[1], places, "choice" if lots is None else lots)
    l_aux = _balance(gates, experts, used)
    return _answer(gates, experts, kept, at, places, l_aux, counts, sparse_routes, renormalise=False)


def top2gating(
    logits: Tensor, capacity_factor: float, min_capacity: int, drop_tokens: bool = True, ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True, sparse_routes: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The most probable expert and a second one, weighed by their probabilities over the sum of what was not dropped.

    An expert serves first choices before second ones. The second one is drawn from the others' probabilities if
    ``top2_2nd_expert_sampling``. C counts twice as many tokens. For the rest see :func:`top1gating`.
    """
    _check("top2gating", logits, 1, capacity_factor, min_capacity)
    gates = F.softmax(logits, dim=1)
    first = gates.argmax(1, keepdim=True)
    others = logits + _gumbel(logits) if top2_2nd_expert_sampling else logits
    second = others.scatter(1, first, -torch.inf).argmax(1, keepdim=True)
    experts = torch.cat([first, second], 1)
    counts = _counts(experts, torch.ones_like(experts, dtype=torch.bool), logits.shape[1])
    places = _capacity(logits, 2 * capacity_factor, min_capacity) if drop_tokens else _fullest(counts, None, ep_group)
    kept, at = _placed(experts, None, logits.shape[1], places, "choice")
    l_aux = _balance(gates, first, torch.ones_like(first, dtype=torch.bool))
    return _answer(gates, experts, kept, at, places, l_aux, counts, sparse_routes, renormalise=True)


def topkgating(
    logits: Tensor, k: int, capacity_factor: float, min_capacity: int, drop_tokens: bool = True, ep_group: Any = None,
    drop_policy: str = "probs", sparse_routes: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The k most probable experts, weighed as in :func:`top2gating`.

    Args:
        drop_policy: a full expert keeps its most probable tokens ("probs"), or the first ones ("position").

    Raises:
        ValueError: another ``drop_policy``, where tokens are dropped.
    """
    if drop_tokens and drop_policy not in ("probs", "position"):
        raise ValueError(f"Invalid drop_policy: {drop_policy!r}; allowed are 'probs' and 'position'.")
    _check("topkgating", logits, k, capacity_factor, min_capacity)
    gates = F.softmax(logits, dim=1)
    weights, experts = gates.topk(k, dim=1)
    everyone = torch.ones_like(experts, dtype=torch.bool)
    counts = _counts(experts, everyone, logits.shape[1])
    places = _capacity(logits, k * capacity_factor, min_capacity) if drop_tokens else _fullest(counts, None, ep_group)
    by = weights.detach().contiguous() if drop_tokens and drop_policy == "probs" else "token"
    kept, at = _placed(experts, None, logits.shape[1], places, by)
    l_aux = _balance(gates, experts, everyone)
    return _answer(gates, experts, kept, at, places, l_aux, counts, sparse_routes, renormalise=True)


def gumbel_rsample(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """-log(-log u): added to logits, their argmax is drawn from the softmax."""
    return _gumbel(torch.empty(shape, device=device))


def multiplicative_jitter(x: Tensor, device: torch.device, epsilon: float = 1e-2) -> Tensor:
    """``x`` times numbers from [1 - ε, 1 + ε]; ``x`` itself if ε is 0."""
    return x if epsilon == 0 else x * torch.empty_like(x, device=device).uniform_(1 - epsilon, 1 + epsilon)


class TopKGate(nn.Module):
    """A linear map to logits in fp32, and one of the three functions, by k.

    Args:
        model_dim: of tokens. The others: as of the functions.

    Attributes:
        wg: the map.
    """

    def __init__(
        self, model_dim: int, num_experts: int, k: int = 1, capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0, min_capacity: int = 8, noisy_gate_policy: str | None = None,
        drop_tokens: bool = True, use_rts: bool = True, ep_group: Any = None, top2_2nd_expert_sampling: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.ep_group = k, ep_group
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts, self.top2_2nd_expert_sampling = drop_tokens, use_rts, top2_2nd_expert_sampling

    def forward(
        self, input: Tensor, used_token: Tensor | None = None, sparse_routes: bool = False, use_tutel: bool = False
    ) -> tuple[Any, ...]:
        """Of (T, model_dim); see the function."""
        x = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = multiplicative_jitter(x, x.device)
        logits = F.linear(x, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        if self.k == 1:
            noise = self.noisy_gate_policy if self.training else None
            return top1gating(
                logits, factor, self.min_capacity, used_token, noise, self.drop_tokens, self.use_rts, self.ep_group,
                sparse_routes, use_tutel,
            )  # fmt: skip
        if self.k == 2:
            return top2gating(
                logits, factor, self.min_capacity, self.drop_tokens, self.ep_group, self.top2_2nd_expert_sampling,
                sparse_routes,
            )  # fmt: skip
        return topkgating(
            logits, self.k, factor, self.min_capacity, self.drop_tokens, self.ep_group, sparse_routes=sparse_routes
        )


# -- steps ------------------------------------------------------------------------------------------------------------


def _check(
    who: str, logits: Tensor, k: int, factor: object, minimum: object, used: Tensor | None = None
) -> None:  # fmt: skip
    """Raise ValueError for what cannot be routed."""
    if logits.dim() != 2 or not logits.is_floating_point():
        dtype = str(logits.dtype).removeprefix("torch.")
        raise ValueError(f"{who} got logits {dtype} {tuple(logits.shape)}; they are floating point numbers (T, E).")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"{who} got k={k} of {logits.shape[1]} experts; k is from 1 to that number.")
    if used is not None and used.numel() != len(logits):
        raise ValueError(
            f"{who} got used_token {tuple(used.shape)} for {len(logits)} tokens; it has one number for each of them."
        )
    if factor is None or minimum is None:
        raise ValueError(
            f"{who} got capacity_factor={factor} and min_capacity={minimum}; they are numbers. drop_tokens=False drops "
            "nothing."
        )


def _gumbel(like: Tensor) -> Tensor:
    return -torch.empty_like(like, requires_grad=False).exponential_().log()


def _counts(experts: Tensor, used: Tensor, num_experts: int) -> Tensor:
    """(E,) int64: assignments of tokens that count."""
    found = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return found.scatter_add_(0, experts.reshape(-1), used.expand_as(experts).reshape(-1).to(torch.int64))


def _capacity(logits: Tensor, factor: float, minimum: int) -> int:
    """In float32, as DeepSpeed computes it."""
    tokens, experts = logits.shape
    return max(int(torch.ceil(tokens / experts * torch.tensor(factor, dtype=torch.float32))), int(minimum))


def _fullest(counts: Tensor, most: int | None, group: Any) -> int:
    """The tokens of the fullest expert of all ranks of a group. Collective, if there is one."""
    found = counts.max() if counts.numel() else counts.new_zeros(())
    if group is not None and dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found) if most is None else min(int(found), most)


def _placed(
    experts: Tensor, used: Tensor | None, num_experts: int, places: int, priority: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(T, k): whether an assignment has a place, and which."""
    wanted = experts if used is None else torch.where(used, experts, num_experts)  # E: those of no expert
    at = positions_in_expert(
        wanted.contiguous(), num_experts + 1, capacity=min(places, wanted.numel()), priority=priority
    ).positions
    kept = (at >= 0) & (wanted < num_experts)
    return kept, torch.where(kept, at, 0)


def _balance(gates: Tensor, experts: Tensor, used: Tensor) -> Tensor:
    """E/c Σ_e mean_t p_te · mean_t [e is among the c chosen of t]; Lepikhin et al. 2021 (GShard), algorithm 1."""
    hits = torch.zeros_like(gates, dtype=torch.float32).scatter_add_(1, experts, used.expand_as(experts).float())
    return (gates.mean(0) * hits.mean(0)).sum() * (gates.shape[1] / experts.shape[1])


def _answer(
    gates: Tensor, experts: Tensor, kept: Tensor, at: Tensor, places: int, l_aux: Tensor, counts: Tensor,
    sparse: bool, *, renormalise: bool,
) -> tuple[Any, ...]:  # fmt: skip
    weights = gates.gather(1, experts) * kept
    if renormalise:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    tokens, num_experts = gates.shape
    if sparse:
        routes = torch.where(kept, experts, -1).t().contiguous().to(torch.int32)
        slots = at.t().contiguous().to(torch.int32)
        return l_aux, torch.tensor(places), num_experts, routes, slots, weights.t().contiguous(), counts
    # What is dropped adds its weight 0 to a place.
    flat = (experts * places + at) if places else experts.new_zeros(experts.shape)
    dtype = torch.promote_types(gates.dtype, torch.float32)
    combine = torch.zeros(tokens, num_experts * places, dtype=dtype, device=gates.device)
    if places:
        combine = combine.scatter_add(1, flat, weights.to(dtype))
    combine = combine.view(tokens, num_experts, places)
    return l_aux, combine, combine.bool(), counts
