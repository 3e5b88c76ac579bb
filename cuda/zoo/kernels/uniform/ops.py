"""Numbers by place as a function of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels.operators import Operator
from zoo.kernels.uniform import reference

Tensor = torch.Tensor


def uniform(places: Tensor, seed: int, count: int) -> Tensor:
    """u[r][i] = (w + 1/2)/2^32, w word i mod 4 of Philox4x32-10 (Salmon et al. 2011) with the counter (i // 4, place r)
    and the key ``seed``: in (0, 1), the same wherever and whenever it is asked for.

    Args:
        places: (R,) int64, whose bits count. seed: of 64 bits.
        count: N, of each row.

    Returns:
        (R, N) fp64.

    Raises:
        ValueError: a dtype, shape or number that cannot be.
    """
    u: Tensor = _uniform(places, seed, count, check=lambda: _check(places, count))
    return u


def _check(places: Tensor, count: int) -> None:
    if places.dim() != 1:
        raise ValueError(f"places has shape {tuple(places.shape)}; it must have 1 dims.")
    if places.dtype is not torch.int64:
        raise ValueError(f"places has dtype {places.dtype}; it must be torch.int64.")
    if count < 0:
        raise ValueError(f"count is {count}; it must not be negative.")


_uniform = Operator(
    "uniform", reference.uniform,
    fake=lambda places, seed, count: places.new_empty((len(places), count), dtype=torch.float64),
)  # fmt: skip
