"""Groups of elements that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(value: Tensor, num_groups: int, name: str) -> Tensor:
    """(num_groups, n): a view or copy of ``value`` in fp32 (fp64 as it is), row after row.

    Raises:
        ValueError: the groups would not have one size; the sentence names the tensor.
    """
    if num_groups < 1 or value.numel() % num_groups:
        raise ValueError(
            f"{name} has {tuple(value.shape)} = {value.numel()} elements, which cannot be cut into {num_groups} groups "
            "of one size; give quantize_groups that divides their number."
        )
    wide = value if value.dtype is torch.float64 else value.float()
    return wide.reshape(num_groups, -1)


def check_finite(spans: Tensor, name: str) -> None:
    """Raise ValueError where a group has an infinite element or a NaN, which its span shows.

    On the CPU. On other devices the host would have to wait: there such a group comes out as NaN. Tensors without
    values (meta, fake) are not looked at.
    """
    if spans.device.type == "cpu" and type(spans) is Tensor and not bool(torch.isfinite(spans).all()):
        raise ValueError(
            f"{name} has elements that are infinite or NaN and cannot be quantised. Look at the step before: the "
            "learning rate may be too high, or a loss scale may be missing."
        )
