"""Weights rounded one column after the other, each error made good by the columns that are left (GPTQ).

Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo.compression.post_training.grids import Grid, Params, fitted

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """A weight (N, K) in groups of ``group_size`` consecutive elements of a row.

    Attributes:
        codes: (N, K) int16.
        params: (N, K / group_size) fp32 each, as the grid's ``fit`` gives them.
    """

    grid: Grid
    codes: Tensor
    params: Params
    group_size: int

    @property
    def values(self) -> Tensor:
        """(N, K) fp32."""
        groups = self.codes.reshape(-1, self.group_size)
        return self.grid.decode(groups, tuple(p.reshape(-1, 1) for p in self.params)).view(self.codes.shape)

    @property
    def num_bits(self) -> float:
        """Of the codes and of fp32 numbers of groups."""
        return self.codes.numel() * self.grid.bits + 32 * sum(p.numel() for p in self.params)


def check_weight(weight: Tensor, group_size: int, name: str = "the weight") -> None:
    """A weight that can be quantised in such groups.

    Raises:
        ValueError: it cannot.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"{name} has shape {tuple(weight.shape)} and {weight.dtype}; it must be a matrix of floats.")
    if group_size < 1 or weight.shape[1] % group_size:
        raise ValueError(
            f"{name} has rows of {weight.shape[1]}, and group_size={group_size}; a row must be whole groups."
        )
    if weight.is_meta:
        raise ValueError(f'{name} is on "meta" and has no values to round; load it first.')
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name} has elements that are NaN or infinite; there are no codes for them.")


def nearest(
    weight: Tensor, grid: Grid, *, group_size: int, candidates: int = 0, params: Params | None = None
) -> Quantised:  # fmt: skip
    """Each element at the nearest value of its group.

    Args:
        weight: (N, K).
        candidates: ranges that are tried besides the whole one; see :func:`~.grids.fitted`.
        params: of groups, (N, K / group_size) each, as those of another ``Quantised``; None: they are fitted.

    Raises:
        ValueError: no matrix of finite numbers, or groups that do not divide K.
    """
    check_weight(weight, group_size)
    rows = weight.detach().float().reshape(-1, group_size)
    fixed = None if params is None else tuple(p.reshape(-1, 1) for p in params)
    given = fixed or fitted(grid, rows, candidates=candidates)
    groups = (weight.shape[0], weight.shape[1] // group_size)
    return Quantised(
        grid=grid, codes=grid.encode(rows, given).view(weight.shape), params=tuple(p.view(groups) for p in given),
        group_size=group_size,
    )  # fmt: skip


class Inputs:
    """H = 2/n Σ x·xᵀ over the inputs of a linear layer, K × K, fp32: the Hessian of ‖(W - Ŵ)·X‖²."""

    def __init__(self, width: int) -> None:
        self.hessian, self.num_rows = torch.zeros(width, width), 0

    def add(self, x: Tensor) -> None:
        """Some inputs (…, K)."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        total = self.num_rows + len(rows)
        if total:
            self.hessian = self.hessian.to(x.device).mul_(self.num_rows / total).addmm_(rows.T, rows, alpha=2.0 / total)
        self.num_rows = total


def gptq(
    weight: Tensor, hessian: Tensor, grid: Grid, *, group_size: int, damping: float = 0.01, by_size: bool = True,
    candidates: int = 0, block: int = 128, name: str = "the weight",
) -> Quantised:  # fmt: skip
    """Codes that make ‖(W - Ŵ)·X‖² small rather than ‖W - Ŵ‖².

    Legend: H + δI = (UᵀU)⁻¹ with U upper triangular and δ = damping·mean(diag H). For each column j, in order:

        ŵ_j = nearest(w_j),   ε = (w_j - ŵ_j) / U_jj,   w_k ← w_k - ε·U_jk  for k > j

    Args:
        weight: (N, K).
        hessian: of :class:`Inputs`, (K, K).
        group_size: its numbers are those of the weights before anything was moved, if ``by_size``; else of the weights
            as they are when its first column comes.
        by_size: columns in order of diag(H), the largest first.
        candidates: see :func:`nearest`.
        block: columns whose later effects are added at once.

    Returns:
        Codes in the order of the weight. Columns whose inputs were all zero are rounded to nearest.

    Raises:
        ValueError: see :func:`nearest`; or H is not of this weight, or not finite.
    """
    check_weight(weight, group_size, name)
    width = weight.shape[1]
    if hessian.shape != (width, width) or not torch.isfinite(hessian).all():
        raise ValueError(
            f"{name} has rows of {width}, and its inputs gave a matrix of shape {tuple(hessian.shape)}, finite: "
            f"{bool(torch.isfinite(hessian).all())}; it must be {width} x {width} and finite."
        )
    first = nearest(weight, grid, group_size=group_size, candidates=candidates)
    diagonal = hessian.diagonal()
    if not bool((diagonal > 0).any()):
        return first
    order = diagonal.argsort(descending=True, stable=True) if by_size else torch.arange(width, device=weight.device)
    upper = _factor(hessian[order][:, order], damping, name)
    w = weight.detach().float()[:, order].contiguous()
    codes = torch.empty_like(w, dtype=torch.int16)
    params = [p.clone() for p in first.params]
    for begin in range(0, width, block):
        end = min(begin + block, width)
        errors = torch.empty_like(w[:, begin:end])
        for j in range(begin, end):
            group = int(order[j]) // group_size
            if not by_size and j % group_size == 0:
                # Columns after this block have not had its effects yet.
                ahead = w[:, j : j + group_size]
                if j + group_size > end:
                    ahead = ahead.clone()
                    ahead[:, end - j :] -= errors[:, : j - begin] @ upper[begin:j, end : j + group_size]
                for of_all, found in zip(params, fitted(grid, ahead, candidates=candidates), strict=True):
                    of_all[:, group] = found[:, 0]
            of_group = tuple(p[:, group : group + 1] for p in params)
            codes[:, j : j + 1] = grid.encode(w[:, j : j + 1], of_group)
            moved = (w[:, j] - grid.decode(codes[:, j : j + 1], of_group)[:, 0]) / upper[j, j]
            errors[:, j - begin] = moved
            w[:, j + 1 : end].addr_(moved, upper[j, j + 1 : end], alpha=-1.0)
        w[:, end:].addmm_(errors, upper[begin:end, end:], alpha=-1.0)
    back = torch.empty_like(codes)
    back[:, order] = codes
    return Quantised(grid=grid, codes=back, params=tuple(params), group_size=group_size)


def _factor(hessian: Tensor, damping: float, name: str) -> Tensor:
    """U of (H + δI)⁻¹ = UᵀU, fp32; computed in fp64, with ten times the damping where H is too near to singular."""
    h = hessian.double()
    dead = h.diagonal() == 0
    h[dead, dead] = 1.0
    mean = h.diagonal().mean()
    for more in (1.0, 10.0, 100.0):
        damped = h.clone()
        damped.diagonal().add_(damping * more * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
            return upper
    raise ValueError(
        f"the inputs of {name} span too little: damping={damping}, and a hundred times that, leave their matrix "
        "singular. Give more calibration data, or a larger damping."
    )
