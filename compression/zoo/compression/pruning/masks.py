"""Which elements, blocks or units stay: functions of scores, without state.

Legend: R rows (outputs), C columns (inputs), U units; a mask is bool, True is what stays. Among equal scores those that
come first stay, so that a mask is a function of the scores' values alone and the same on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def num_kept(ratio: float, num: int) -> int:
    """k = max(1, round(ratio·n)), halves to the even number; 0 where the ratio or n is."""
    return max(1, round(ratio * num)) if ratio > 0 and num else 0


def largest(scores: Tensor, num: int) -> Tensor:
    """The mask of the ``num`` largest scores.

    Args:
        scores: any shape, of floating point, without NaN (one that is NaN does not stay, and others go with it).
        num: how many stay, 0 to all of them.
    """
    flat = scores.detach().reshape(-1)
    if not 0 < num < flat.numel():
        return torch.full_like(scores, num > 0, dtype=torch.bool)
    flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
    least = flat.kthvalue(flat.numel() - num + 1).values
    above, equal = flat > least, flat == least
    return (above | (equal & (equal.cumsum(0) <= num - above.sum()))).reshape(scores.shape)


def as_matrix(weight: Tensor, out_dim: int = 0) -> Tensor:
    """(R, C): outputs by inputs. Of a convolution the inputs are last: (out, in, kh, kw) → (out, kh·kw·in), so that
    neighbours of a row are channels of one place of the kernel."""
    weight = weight.movedim(out_dim, 0)
    return weight.movedim(1, -1).flatten(1)


def from_matrix(matrix: Tensor, shape: torch.Size | tuple[int, ...], out_dim: int = 0) -> Tensor:
    """The inverse of :func:`as_matrix`, for a weight of that shape."""
    rest = [size for dim, size in enumerate(shape) if dim != out_dim]
    return matrix.reshape(shape[out_dim], *rest[1:], rest[0]).movedim(-1, 1).movedim(0, out_dim).contiguous()


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What stays or goes together in a matrix (R, C) of a weight.

    Blocks of ``rows`` x ``columns``, or, with ``zeros`` > 0, of each ``columns`` = M neighbours in a row N = ``zeros``
    go ("2:4", as tensor cores take it).
    """

    rows: int = 1
    columns: int = 1
    zeros: int = 0

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Of "NxM" or "N:M".

        Raises:
            ValueError: it is neither.
        """
        found = re.fullmatch(r"(\d+)(x|:)(\d+)", text)
        if (
            found is None
            or not int(found[1])
            or not int(found[3])
            or (found[2] == ":" and int(found[1]) >= int(found[3]))
        ):
            raise ValueError(
                f"the pattern {text!r}; allowed is NxM (blocks of N outputs and M inputs) or N:M (N of M neighbours "
                "go, N < M), such as '4x1' or '2:4'."
            )
        n, m = int(found[1]), int(found[3])
        return cls(rows=n, columns=m) if found[2] == "x" else cls(columns=m, zeros=n)

    def __str__(self) -> str:
        return f"{self.zeros}:{self.columns}" if self.zeros else f"{self.rows}x{self.columns}"

    def check(self, matrix: tuple[int, int], name: str, where: str) -> None:
        """Raise ValueError unless a matrix of this shape is made of whole blocks."""
        if matrix[0] % self.rows or matrix[1] % self.columns:
            raise ValueError(
                f"{where}: the block_pattern {str(self)!r} does not fit {name}, which has {matrix[0]} outputs and "
                f"{matrix[1]} inputs (of a convolution times its places): these are no multiples of {self.rows} and "
                f"{self.columns}. Give another pattern, or name the module in excluded_modules."
            )

    def scores(self, matrix: Tensor) -> Tensor:
        """One for each that stays or goes together, their sum: (R, C) → (R / rows, C / columns), of N:M (R, C)."""
        if self.zeros:
            return matrix
        rows, columns = matrix.shape
        return matrix.reshape(rows // self.rows, self.rows, columns // self.columns, self.columns).sum((1, 3))

    def spread(self, mask: Tensor) -> Tensor:
        """The mask of elements (R, C) of that of :meth:`scores`."""
        if self.zeros:
            return mask
        return mask.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)

    def keep(self, scores: Tensor, ratio: float) -> Tensor:
        """The mask (as :meth:`scores` are) that leaves the largest: of blocks a share of ``ratio``, of N:M all but N of
        M, whatever the ratio is."""
        return self.all_but(scores, self.zeros) if self.zeros else largest(scores, num_kept(ratio, scores.numel()))

    def all_but(self, scores: Tensor, zeros: int) -> Tensor:
        """Of each M neighbours in a row all but the ``zeros`` smallest; of equal ones the first stay."""
        groups = scores.detach().reshape(scores.shape[0], -1, self.columns)
        order = groups.argsort(dim=-1, descending=True, stable=True)
        stays = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, order[..., self.columns - zeros :], value=False)
        return stays.reshape(scores.shape)

    @property
    def dense_ratio(self) -> float | None:
        """The share that N:M leaves, None of blocks."""
        return 1 - self.zeros / self.columns if self.zeros else None


def unit_norms(weight: Tensor, dim: int, num_units: int) -> Tensor:
    """(U,): the sum of |w| over each unit, fp32. A unit is the same number of neighbours along ``dim``."""
    sizes = weight.detach().float().abs().movedim(dim, 0)
    return sizes.reshape(num_units, sizes.numel() // max(num_units, 1)).sum(1)


def over_units(mask: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """(U,) → a mask that spreads over a tensor of this shape: (1, ..., shape[dim], ..., 1)."""
    wide = mask.repeat_interleave(shape[dim] // mask.numel()) if shape[dim] != mask.numel() else mask
    return wide.reshape([-1 if d == dim else 1 for d in range(len(shape))])


_PLACES = (1, 2, 4, 8, 16, 32, 64, 128)


def pack(mask: Tensor) -> Tensor:
    """A mask as bits, the first in the lowest place: bool of n elements → uint8 of ceil(n / 8), on the CPU."""
    flat = mask.detach().reshape(-1).cpu()
    padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8)
    padded[: flat.numel()] = flat
    return (padded.reshape(-1, 8) * torch.tensor(_PLACES, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack(bits: Tensor, shape: torch.Size | tuple[int, ...], name: str) -> Tensor:
    """The inverse of :func:`pack`.

    Raises:
        ValueError: so many bits are no mask of this shape.
    """
    num = int(torch.Size(shape).numel())
    if bits.dtype != torch.uint8 or bits.numel() != -(-num // 8):
        raise ValueError(
            f"{name}: a mask of the shape {tuple(shape)} has {-(-num // 8)} bytes of uint8, and what was loaded has "
            f"{bits.numel()} of {bits.dtype}. It is of another model."
        )
    places = torch.tensor(_PLACES, dtype=torch.uint8)
    return ((bits.cpu().reshape(-1, 1) & places) != 0).reshape(-1)[:num].reshape(shape)


def has_values(tensor: Tensor) -> bool:
    """Whether there is anything to rank: tensors on "meta" and fake ones have a shape alone."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def check_finite(scores: Tensor, name: str) -> None:
    """Raise ValueError where a mask would be made from inf or NaN."""
    if not bool(torch.isfinite(scores).all()):
        raise ValueError(
            f"{name}: a mask was to be made, and the values have inf or NaN, among which there is no order. Look for "
            "what made them so (a learning rate, fp16 without loss scaling) before pruning."
        )
