"""Random numbers of a key and a position: nothing is stored, and what is computed twice draws the same.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

# The constants of splitmix64 as signed 64-bit integers: torch's int64 wraps as unsigned ones do.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


class Keys:
    """By which key each forward drew, for its recomputation, before which other micro-batches may have had theirs.

    A forward is known by a number of torch's generator, which activation checkpointing puts back. (Where it is told not
    to, recomputation draws by the key of now.)
    """

    MOST = 4096
    """Forwards that are remembered."""

    def __init__(self) -> None:
        self._by_forward: dict[int, int] = {}

    def of_forward(self, now: int) -> int:
        """``now``; in recomputation that of the forward."""
        forward = int(torch.randint(2**62, (), dtype=torch.int64))
        if torch._C._current_graph_task_id() != -1:  # a backward is under way
            return self._by_forward.get(forward, now)
        self._by_forward[forward] = now
        if len(self._by_forward) > self.MOST:
            del self._by_forward[next(iter(self._by_forward))]
        return now


def uniform(key: Tensor, shape: tuple[int, ...], *, salt: int = 0) -> Tensor:
    """Numbers in [0, 1) of ``shape``, float32, each a function of the key, its place and ``salt``.

    splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 14) of a counter.

    Args:
        key: () int64, on the device of the result.
        salt: for several draws of one key.
    """
    count = 1
    for size in shape:
        count *= size
    counter = torch.arange(count, dtype=torch.int64, device=key.device)
    z = _mixed(counter + _mixed(key ^ salt)).view(shape)
    return _shifted(z, 40).to(torch.float32) * 2.0**-24


def gumbel(key: Tensor, shape: tuple[int, ...], *, salt: int = 0) -> Tensor:
    """-log(-log u): added to logits, their argmax is drawn from the softmax (Gumbel 1954; Jang et al. 2017)."""
    tiny = torch.finfo(torch.float32).tiny
    return -torch.log(-torch.log(uniform(key, shape, salt=salt).clamp(min=tiny, max=1 - 2.0**-24)))


def _mixed(z: Tensor) -> Tensor:
    z = z + _STEP
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """As unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
