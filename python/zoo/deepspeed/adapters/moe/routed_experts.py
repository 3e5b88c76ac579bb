"""``deepspeed.moe.ep_*``: a router, experts as three tensors, and how weights and tokens get their order.

Legend: T tokens, E experts, k choices of a token, D width, H width between the maps, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.nn import whole

Tensor = torch.Tensor

TOKEN_GROUP_ALIGN_SIZE_M = 8
"""Rows of a group are a multiple of this in DeepSpeed; zoo's kernels need none of it."""

_FORMS: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "swiglu": lambda g, u, alpha, limit: F.silu(g) * u,
    "geglu_tanh": lambda g, u, alpha, limit: F.gelu(g, approximate="tanh") * u,
    "swiglu_clamped": lambda g, u, alpha, limit: F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit),
    "swiglu_oai": lambda g, u, alpha, limit: (
        (u.clamp(-limit, limit) + 1) * g.clamp(max=limit) * torch.sigmoid(alpha * g.clamp(max=limit))
    ),
}


def count_tokens_per_expert(selected_experts_indices: Tensor, num_experts: int) -> Tensor:
    """(E,) int32: how often each expert is among the indices."""
    flat = selected_experts_indices.reshape(-1)
    found = torch.zeros(num_experts, dtype=torch.int32, device=flat.device)
    return found.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


class TokenChoiceTopKRouter(nn.Module):
    """The k experts of greatest score s of each token, s the softmax or sigmoid of a linear map, in fp32.

    Args:
        dim: D.
        num_expert_groups, num_limited_groups: choose among the best groups only; see
            :class:`zoo.moe.GroupLimitedGate`. None: among all experts.
        score_func: "softmax" or "sigmoid".
        route_norm: divide the scores of a token by their sum. route_scale: multiply them.
        gate_bias: the map has a bias.
        group_score_func: a group is worth its "max", or the sum of its two best ("top2_sum").

    Attributes:
        gate: the map. e_score_correction_bias: (E,) or None, added for choosing only.

    Raises:
        ValueError: groups that cannot be, or fewer experts than ``top_k`` in those that a token may use.
        NotImplementedError: a function of another name.
    """

    def __init__(
        self, dim: int, num_experts: int, num_expert_groups: int | None, num_limited_groups: int | None, top_k: int,
        score_func: str, route_norm: bool, route_scale: float, gate_bias: bool, group_score_func: str = "top2_sum",
    ) -> None:  # fmt: skip
        super().__init__()
        if score_func not in ("softmax", "sigmoid") or group_score_func not in ("max", "top2_sum"):
            raise NotImplementedError(
                f"TokenChoiceTopKRouter got score_func={score_func!r}, group_score_func={group_score_func!r}; allowed "
                "are 'softmax' and 'sigmoid', 'max' and 'top2_sum'."
            )
        if num_expert_groups is not None:
            least = 2 if group_score_func == "top2_sum" else 1
            if num_experts % num_expert_groups or num_experts // num_expert_groups < least:
                raise ValueError(
                    f"{num_expert_groups} groups of {num_experts} experts; they are equal, {least} or more."
                )
            if num_limited_groups is None or not 1 <= num_limited_groups <= num_expert_groups:
                raise ValueError(f"num_limited_groups={num_limited_groups}; it is from 1 to {num_expert_groups}.")
        most = num_experts
        if num_expert_groups is not None and num_limited_groups is not None:
            most = num_experts // num_expert_groups * num_limited_groups
        if not 1 <= top_k <= most:
            raise ValueError(
                f"TokenChoiceTopKRouter got top_k={top_k}, where a token may choose among {most} of {num_experts} "
                f"experts; it is from 1 to {most}."
            )
        self.gate = nn.Linear(dim, num_experts, bias=gate_bias)
        self.num_experts, self.top_k, self.score_func = num_experts, top_k, score_func
        self.num_expert_groups, self.num_limited_groups = num_expert_groups, num_limited_groups
        self.route_norm, self.route_scale, self.group_score_func = route_norm, route_scale, group_score_func
        self.e_score_correction_bias: Tensor | None = None

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Route (T, D).

        Args:
            expert_bias: (E,), added to scores for choosing only.

        Returns:
            Scores (T, k) fp32, experts (T, k), tokens of each expert (E,) int32.
        """
        logits = self.gate(x).float()
        scores = torch.softmax(logits, 1) if self.score_func == "softmax" else torch.sigmoid(logits)
        values = scores.detach()
        for bias in (expert_bias, self.e_score_correction_bias):
            values = values if bias is None else values + bias
        experts = self._of_best_groups(values).topk(self.top_k, dim=-1, sorted=False).indices
        found = scores.gather(1, experts)
        if self.route_norm:
            found = found / (found.sum(-1, keepdim=True) + 1e-20)
        return found * self.route_scale, experts, count_tokens_per_expert(experts, self.num_experts)

    def _of_best_groups(self, values: Tensor) -> Tensor:
        if self.num_expert_groups is None or self.num_limited_groups is None:
            return values
        groups = values.view(len(values), self.num_expert_groups, -1)
        worth = groups.amax(-1) if self.group_score_func == "max" else groups.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(self.num_limited_groups, dim=-1, sorted=False).indices
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        return groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).view(values.shape)


class GroupedExperts(nn.Module):
    """y = φ(x w1ᵀ, x w3ᵀ) w2ᵀ for rows that lie expert by expert, by zoo's grouped product.

    Args:
        dim: D. hidden_dim: H.
        use_grouped_mm, disable_triton_grouped_mm, gate_up_impl: make no difference.
        activation: φ(g, u): "swiglu", "geglu_tanh", "swiglu_clamped" or "swiglu_oai".
        activation_alpha, activation_limit: of the last two.

    Attributes:
        w1, w3: (E, H, D). w2: (E, D, H). They are not initialised.

    Raises:
        ValueError: another activation, or ``gate_up_impl``.
    """

    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool = True,
        disable_triton_grouped_mm: bool = False, activation: str = "swiglu", activation_alpha: float = 1.702,
        activation_limit: float = 7.0, gate_up_impl: str = "separate",
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in _FORMS:
            raise ValueError(f"activation={activation!r}; allowed are {', '.join(_FORMS)}.")
        if gate_up_impl not in ("separate", "fused"):
            raise ValueError(f"gate_up_impl={gate_up_impl!r}; allowed are 'separate' and 'fused'.")
        self.num_experts, self.use_grouped_mm, self.gate_up_impl = num_experts, use_grouped_mm, gate_up_impl
        self.activation, self.activation_alpha, self.activation_limit = activation, activation_alpha, activation_limit
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        for weight in (self.w1, self.w2, self.w3):
            weight.is_expert_group = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """(T, D) rows, the first ``num_tokens_per_expert[0]`` of the first expert, and so on; later ones give 0.

        Raises:
            ValueError: not one number for each expert, or, on the CPU, more rows than there are.
        """
        product: Any = import_module("zoo.moe.experts.grouped_linear").grouped_linear
        counts = num_tokens_per_expert.to(torch.int64)
        told = counts.tolist() if counts.is_cpu and not torch.compiler.is_compiling() else []
        if counts.shape != (self.num_experts,) or min(told, default=0) < 0 or sum(told) > len(x):
            raise ValueError(
                f"GroupedExperts got counts {told or tuple(counts.shape)} for {self.num_experts} experts "
                f"and {len(x)} rows; it has one number for each expert, in all at most that of the rows."
            )

        def mapped(rows: Tensor, weight: Tensor) -> Tensor:
            found: Tensor = product(rows, weight.to(rows.dtype).transpose(1, 2), counts)
            return found

        gate, up = mapped(x, self.w1), mapped(x, self.w3)
        return mapped(_FORMS[self.activation](gate, up, self.activation_alpha, self.activation_limit), self.w2)


# -- the order of tokens ----------------------------------------------------------------------------------------------


def generate_permute_indices(
    tokens_per_expert_group: Tensor, experts_per_rank: int, num_ranks: int, max_len: int, alignment: int,
    use_cpu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Where rows that lie rank by rank, and expert by expert in it, are to be read from to lie expert by expert.

    Args:
        tokens_per_expert_group: (N · experts_per_rank,): rows of each rank for each expert.
        max_len: length of the answer.
        alignment: each expert has a multiple of it, and at least it; -1 is read from where there is no row.

    Returns:
        Indices (max_len,) int32, rows of each expert with what fills them up, and where they end, both int32.
    """
    if alignment < 1 or tokens_per_expert_group.numel() != num_ranks * experts_per_rank:
        raise ValueError(
            f"generate_permute_indices got {tokens_per_expert_group.numel()} numbers for {num_ranks} ranks of "
            f"{experts_per_rank} experts and alignment={alignment}; it takes one for each of them, and at least 1."
        )
    counts = tokens_per_expert_group.to(torch.int64)
    starts = counts.cumsum(0) - counts
    per_expert = counts.view(num_ranks, experts_per_rank).sum(0)
    sizes = per_expert.clamp(min=alignment).add(alignment - 1).div(alignment, rounding_mode="floor") * alignment
    ends = sizes.cumsum(0)
    by_expert = counts.view(num_ranks, -1).t().reshape(-1)  # expert by expert, rank by rank in it
    read = starts.view(num_ranks, -1).t().reshape(-1)
    within = (by_expert.view(experts_per_rank, -1).cumsum(1) - by_expert.view(experts_per_rank, -1)).reshape(-1)
    write = (ends - sizes).repeat_interleave(num_ranks) + within
    nth = torch.arange(int(by_expert.sum()), device=counts.device)
    nth = nth - (by_expert.cumsum(0) - by_expert).repeat_interleave(by_expert)
    found = torch.full((max(int(ends[-1]), max_len),), -1, dtype=torch.int32, device=counts.device)
    found[write.repeat_interleave(by_expert) + nth] = (read.repeat_interleave(by_expert) + nth).to(torch.int32)
    return found[:max_len], sizes.to(torch.int32), ends.to(torch.int32)


def permute_rows(rows: Tensor, permuted_indices: Tensor) -> Tensor:
    """``rows[permuted_indices]``, and 0 where there is no such row."""
    index = permuted_indices.to(torch.int64)
    there = (index >= 0) & (index < rows.shape[0])
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[torch.where(there, index, rows.shape[0])]


def unpermute_rows(rows: Tensor, permuted_indices: Tensor, num_rows: int) -> Tensor:
    """The ``num_rows`` rows from which :func:`permute_rows` made these."""
    return rows[inverse_permutation(permuted_indices, num_rows)]


def inverse_permutation(permuted_indices: Tensor, num_rows: int) -> Tensor:
    """(num_rows,) int64: where each row went."""
    index = permuted_indices.to(torch.int64)
    there = ((index >= 0) & (index < num_rows)).nonzero()[:, 0]
    return torch.zeros(num_rows, dtype=torch.int64, device=index.device).scatter_(0, index[there], there)


def permute_rows_supported(rows: Tensor) -> bool:
    """Whether they can be permuted: a matrix."""
    return rows.dim() == 2


# -- the weights of models of transformers ----------------------------------------------------------------------------


def repack_expert_weights(
    experts_source: nn.Module, spec: Any, ep_rank: int, ep_size: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The weights of this rank's experts as :class:`GroupedExperts` has them: copies of w1, w2, w3.

    Collective where ZeRO has split the parameters.

    Args:
        experts_source: a module with tensors of all experts, or a ModuleList of experts.
        spec: with the attributes ``expert_storage`` ("fused_3d" or "module_list"), ``expert_w1_name``,
            ``expert_w2_name``, ``expert_w3_name`` (None: in w1, after the gate) and ``num_experts``.

    Raises:
        ValueError: another storage, numbers that do not divide, or shapes that are of no known order.
    """
    if spec.num_experts % ep_size or not 0 <= ep_rank < ep_size:
        raise ValueError(f"{spec.num_experts} experts on rank {ep_rank} of {ep_size}; each rank has as many.")
    here = spec.num_experts // ep_size
    mine = range(ep_rank * here, (ep_rank + 1) * here)
    names = [name for name in (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name) if name is not None]
    if spec.expert_storage == "fused_3d":
        tensors = [getattr(experts_source, name) for name in names]
        with whole([t for t in tensors if isinstance(t, nn.Parameter)]):
            found = [t.detach()[mine.start : mine.stop].clone() for t in tensors]
    elif spec.expert_storage == "module_list":
        experts: list[Any] = list(experts_source.children())
        weights = [[_weight(expert, name) for expert in experts] for name in names]
        with whole([w for of_name in weights for w in of_name if isinstance(w, nn.Parameter)]):
            found = [torch.stack([of_name[e].detach() for e in mine]) for of_name in weights]
    else:
        raise ValueError(f"expert_storage={spec.expert_storage!r}; allowed are 'fused_3d' and 'module_list'.")
    if len(found) == 3:
        return found[0], found[1], found[2]
    return _unpacked(*found)


def _weight(expert: nn.Module, name: str) -> Tensor:
    there = getattr(expert, name, None)
    if there is None:
        raise ValueError(f"an expert ({type(expert).__name__}) has no {name!r}.")
    found: Any = there.weight if isinstance(there, nn.Module) else there
    return found  # type: ignore[no-any-return]


def _unpacked(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of both maps before the activation in one tensor, the gate first."""
    wide, width = first.shape[1:]
    if second.shape[1:] == (width, wide // 2) and wide % 2 == 0:
        gate, up = first.chunk(2, 1)
    elif second.shape[1:] == (width // 2, wide) and width % 2 == 0:
        gate, up = (part.transpose(1, 2) for part in first.chunk(2, 2))
        second = second.transpose(1, 2)
    else:
        raise ValueError(
            f"weights of experts of the shapes {tuple(first.shape)} and {tuple(second.shape)}; known are (E, 2H, D) "
            "with (E, D, H), and (E, D, 2H) with (E, H, D)."
        )
    return gate.contiguous(), second.contiguous(), up.contiguous()
