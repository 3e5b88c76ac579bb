"""Python objects between the ranks of one job, pickled: never for what comes from a file."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def pack(value: Any, device: torch.device) -> torch.Tensor:
    """(n,) bytes."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def unpack(data: torch.Tensor) -> Any:
    """The object of (n,) bytes."""
    return pickle.loads(data.cpu().numpy().tobytes())
