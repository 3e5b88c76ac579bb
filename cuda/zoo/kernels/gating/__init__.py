"""Gating of a mixture of experts: top-k choice, places, permute and unpermute: ``gating.h`` has the maths."""

from zoo.kernels.gating.ops import (
    Gate,
    Positions,
    expert_rows,
    permute,
    positions_in_expert,
    top_k_gate,
    top_k_gate_backward,
    unpermute,
    unpermute_backward,
)

__all__ = [
    "Gate",
    "Positions",
    "expert_rows",
    "permute",
    "positions_in_expert",
    "top_k_gate",
    "top_k_gate_backward",
    "unpermute",
    "unpermute_backward",
]
