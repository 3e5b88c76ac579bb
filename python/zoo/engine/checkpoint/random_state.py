"""The random number generators of a rank."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch


def random_state() -> dict[str, torch.Tensor]:
    """The states of this rank's random number generators: torch's, Python's and numpy's."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "rng_cpu": torch.get_rng_state(),
        "rng_python": torch.tensor([version, *numbers], dtype=torch.int64),
        "rng_python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if name == "MT19937":  # numpy knows no other one here; somebody may have put one in its place
        state["rng_numpy"] = torch.tensor([*np.asarray(keys).tolist(), position, has_gauss], dtype=torch.int64)
        state["rng_numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    if torch.cuda.is_available():
        state["rng_cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """The reverse of :func:`random_state`; a generator that has no state there stays as it is."""
    if "rng_cpu" in state:
        torch.set_rng_state(state["rng_cpu"])
    if "rng_python" in state:
        version, *numbers = state["rng_python"].tolist()
        gauss = state["rng_python_gauss"].tolist()
        random.setstate((version, tuple(numbers), gauss[0] if gauss else None))
    if "rng_numpy" in state:
        *keys, position, has_gauss = state["rng_numpy"].tolist()
        cached = float(state["rng_numpy_gauss"])
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "rng_cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["rng_cuda"])
