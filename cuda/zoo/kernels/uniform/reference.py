"""Numbers by place in plain torch."""

from __future__ import annotations

import torch

from zoo.kernels.philox import words


def uniform(places: torch.Tensor, seed: int, count: int) -> torch.Tensor:
    """See :func:`zoo.kernels.uniform.uniform`."""
    rows = [words(seed, place, count, places.device) for place in places.tolist()]
    found = torch.stack(rows) if rows else torch.empty(0, count, device=places.device)
    return (found.double() + 0.5) / 2**32
