"""Whether ranks of the axis ``tensor`` see one batch and draw one sequence of random numbers, in a row of a sum.

In a row of C columns each rank writes bytes of its own in columns of its own, and zeros elsewhere; after the sum over
ranks all of them have everybody's. Every dtype holds a byte exactly. Bytes are of the ids in their order and, where
the model drops something in training, of the generator's state: each rank draws masks outside of blocks for itself.
"""

from __future__ import annotations

import torch

_MOST_BYTES = 8


def bytes_of_each(width: int, size: int) -> int:
    """How many columns of a row each of ``size`` ranks has; 0 where there are too few."""
    return min(width // size, _MOST_BYTES)


def checksums(ids: torch.Tensor, num_bytes: int, *, draws: bool) -> torch.Tensor:
    """(num_bytes,) from 0 to 255: the first half of ids, rounded up, the others of the generator, or 0."""
    places = torch.arange(1, ids.numel() + 1, device=ids.device)
    of_ids = ((ids.flatten() + 1) * places.mul_(40503).remainder_(65521)).sum()
    state = _state_of(ids.device) if draws else 0
    first, more = num_bytes - num_bytes // 2, _bytes(state, num_bytes // 2)
    if ids.device.type == "cpu":  # as for each token: a number of Python costs less than tensors
        return torch.tensor(_bytes(int(of_ids), first) + more)
    shifts = 8 * torch.arange(first, device=ids.device)
    found = of_ids.bitwise_right_shift(shifts).bitwise_and(255)
    return torch.cat([found, torch.tensor(more, dtype=found.dtype, device=found.device)])


def _bytes(number: int, num_bytes: int) -> list[int]:
    return [number >> 8 * at & 255 for at in range(num_bytes)]


def _state_of(device: torch.device) -> int:
    """A checksum of the generator's state; it is known on the host."""
    cuda = device.type == "cuda"
    words = (torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()).view(torch.int32).to(torch.int64)
    return int((words * torch.arange(1, len(words) + 1)).sum()) & (1 << 8 * _MOST_BYTES) - 1


def check_alike(sums: torch.Tensor, rank: int) -> None:
    """Raise ValueError where ranks differ: what follows would be sums of other things, in silence.

    Args:
        sums: (ranks, bytes) of everybody, the same on all ranks; so all of them raise, or none.
    """
    if sums.device.type != "cpu":  # nothing waits for the device
        fine = (sums == sums[0]).all()
        torch._assert_async(fine, "tensor-parallel ranks have other token ids, or draw other random numbers")
        return
    everyone = sums.tolist()
    if all(row == everyone[0] for row in everyone):
        return
    same = sums == sums[0]
    ids = same.shape[1] - same.shape[1] // 2
    others = [number for number, row in enumerate(same[:, :ids].all(dim=1).tolist()) if not row]
    if others:
        raise ValueError(
            f"ranks {', '.join(map(str, others))} of the tensor-parallel axis have got other token ids than rank 0 "
            f"(this is rank {rank}). Along this axis all ranks see the same batch: deal samples to data-parallel ranks "
            "alone, and draw tokens with one seed."
        )
    others = [number for number, row in enumerate(same.all(dim=1).tolist()) if not row]
    raise ValueError(
        f"ranks {', '.join(map(str, others))} of the tensor-parallel axis draw other random numbers than rank 0 (this "
        f"is rank {rank}), and the model drops something: masks would differ. Seed by data-parallel rank alone, and "
        "draw alike on all ranks of this axis."
    )
