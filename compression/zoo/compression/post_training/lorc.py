"""Low-rank compensation: what rounding left out, as far as two thin matrices hold it."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def low_rank(weight: Tensor, rounded: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U and V with U·V the best approximation of that rank of E = W - Ŵ in the Frobenius norm.

    E = A·Σ·Bᵀ;  U = A_r·√Σ_r,  V = √Σ_r·B_rᵀ.

    Yao et al. 2023, "ZeroQuant-V2: Exploring Post-training Quantization in LLMs from Comprehensive Study to Low Rank
    Compensation", section 5.

    Args:
        weight, rounded: (N, K).
        rank: 1 to min(N, K).

    Returns:
        (N, rank) and (rank, K) fp32.

    Raises:
        ValueError: a rank that there cannot be.
    """
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(
            f"rank={rank} for a weight of shape {tuple(weight.shape)}; it must be 1 to {min(weight.shape)}."
        )
    error = weight.detach().float() - rounded.float()
    left, values, right = torch.linalg.svd(error, full_matrices=False)
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).contiguous(), (root[:, None] * right[:rank]).contiguous()
