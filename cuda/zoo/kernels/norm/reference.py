"""The norm in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def scale_sum_squares_(tensors: Sequence[torch.Tensor], factor: float) -> torch.Tensor:
    """See :func:`zoo.kernels.norm.scale_sum_squares_`."""
    for t in tensors:
        if factor != 1.0:
            wide = torch.promote_types(t.dtype, torch.float32)
            t.copy_(t.to(wide) * factor)
    return torch.stack([t.double().square().sum() for t in tensors])
