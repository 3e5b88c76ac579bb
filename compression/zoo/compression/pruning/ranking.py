"""The largest of scores that lie in many tensors, perhaps on many ranks: bit for bit what one sorted list says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from zoo.comm import Communicator

_BITS, _DIGIT = 32, 8


def place_in_order(name: str) -> list[tuple[bool, int, str]]:
    """A key that sorts names as they are in a model, numbers by their value: "2.fc" comes before "10.fc"."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"\.", name)]


def largest_of_all(
    scores: Mapping[str, Tensor], num: int, comm: Communicator | None = None, owns: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """The masks, by name, of the ``num`` largest scores of all tensors together. Collective over ``comm``.

    Among equal ones those stay whose name is first (:func:`place_in_order`), within a tensor the first ones. The least
    that stays is found digit by digit, from the highest: four sums of 256 counts over the ranks, whatever there is to
    rank.

    Args:
        scores: fp32, none of them negative or NaN, on this rank; other ranks may have others.
        num: how many stay.
        comm: the ranks; None: this one has all.
        owns: of tensors that several ranks have, whether this rank counts them. Exactly one of the ranks does.
    """
    counted = {name: s for name, s in scores.items() if owns is None or owns(name)}
    bits = {name: s.detach().contiguous().view(torch.int32).reshape(-1) for name, s in scores.items()}
    device = comm.device if comm is not None else torch.device("cpu")
    total = torch.tensor([sum(s.numel() for s in counted.values())], device=device)
    if comm is not None and comm.size > 1:
        comm.all_reduce(total).wait()
    if not 0 < num < int(total):
        return {name: torch.full_like(s, num > 0, dtype=torch.bool) for name, s in scores.items()}
    prefix, left = 0, num
    for shift in range(_BITS - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(1 << _DIGIT, dtype=torch.int64, device=device)
        for name in counted:
            found = bits[name][(bits[name] >> (shift + _DIGIT)) == prefix] if shift + _DIGIT < _BITS else bits[name]
            digits = (found >> shift) & ((1 << _DIGIT) - 1)
            counts += torch.bincount(digits, minlength=1 << _DIGIT).to(device)
        if comm is not None and comm.size > 1:
            comm.all_reduce(counts).wait()
        from_top = counts.flip(0).cumsum(0).flip(0)  # how many have this digit or a larger one
        digit = int((from_top >= left).nonzero().max())
        left -= int(from_top[digit] - counts[digit])
        prefix = prefix << _DIGIT | digit
    least = {name: int((bits[name] == prefix).sum()) for name in counted}
    everywhere = comm.all_gather_object(least) if comm is not None and comm.size > 1 else [least]
    equal = {name: count for there in everywhere for name, count in there.items()}
    room: dict[str, int] = {}
    for name in sorted(equal, key=place_in_order):
        room[name] = min(equal[name], left)
        left -= room[name]
    masks = {}
    for name, flat in bits.items():
        same = flat == prefix
        stays = (flat > prefix) | (same & (same.cumsum(0) <= room[name]))
        masks[name] = stays.reshape(scores[name].shape)
    return masks
