"""The norm of the whole mean gradient, with the same bits at every stage and bucket size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from zoo.comm import Communicator
from zoo.shard.gradients import BucketGradients
from zoo.shard.placement.axes import Axes
from zoo.shard.roles import power_of, sums_of_squares


def global_norm(
    gradients: Sequence[BucketGradients], layers: Communicator | None = None, norm_type: float = 2.0,
    tally: Tally | None = None, *, wide: bool = False, absent: bool = False,
) -> torch.Tensor:  # fmt: skip
    """(Σ |g|^p)^(1/p) or, for p = ``norm_type`` = infinity, max |g|. Collective.

    Powers are added in fp64, family by family, chunk by chunk and bucket by bucket, in an order that no stage changes,
    and the norm is rounded to fp32 once, at the end, so that its bits do not tell how parameters share buckets, which
    instruction set or device added, or how many threads. (Sums that differ by n·2^-53 round to two values where one
    of them is as near to the middle between two fp32 numbers: about n in 10^8 norms.) Of fp64 gradients it is not
    rounded (``wide``, see :func:`are_wide`), and its last bit may depend on ``reduce_bucket_size``.

    Each element counts once: chunks are added over the ranks that split a bucket, and parts along other mesh axes over
    the ranks that have them; ranks that repeat something do not add it. What ``layers``, the ranks with other layers,
    have is added at the end, in their order, so that all of them have the same bits.

    Where gradients are left to the optimizer, so that ranks have different ones, it is ((1/R) Σ_r ‖g_r‖^p)^(1/p).

    A ``tally`` rides in the same collective where the ranks are the same. ``absent``: this rank has no gradients, which
    count as zero; others may have some.

    Returns:
        () fp64, on the device: nothing waits for it.

    Raises:
        ValueError: p is no number > 0.
    """
    number: Any = norm_type
    number = math.inf if number == "inf" else number  # torch takes both
    if not isinstance(number, Real) or not float(number) > 0:
        raise ValueError(f"norm_type={norm_type!r}; a norm over all gradients has a number > 0, or math.inf, for it.")
    p = float(number)
    families = dict.fromkeys(g.bucket.routes.axes for g in sorted(gradients, key=lambda g: g.bucket.spec.axes))
    found = [(_powers(gradients, axes, p, tally, absent), axes.in_norm) for axes in families]
    if tally is not None:
        tally.have_measured(
            [power for (power, _), axes in zip(found, families, strict=True) if _is_alone(axes, gradients)]
        )
    powers = _joined(torch.stack([power if counts else torch.zeros_like(power) for power, counts in found]), p)
    if layers is not None:
        powers = _joined(_of_all(layers, powers.reshape(1)), p)
    norm = powers.sqrt() if p == 2.0 else powers if math.isinf(p) else powers.pow(1.0 / p)
    if wide:
        return norm
    rounded = norm.float().double()
    return torch.where(rounded.isinf(), norm, rounded)  # a finite norm may be larger than any number of fp32


def are_wide(gradients: Sequence[BucketGradients], layers: Communicator | None) -> bool:
    """Whether any gradients are fp64, on this rank or on those with other layers. Collective over ``layers``."""
    here = any(g.bucket.spec.gradient_dtype is torch.float64 for g in gradients)
    return here if layers is None or layers.is_dry else any(layers.all_gather_object(here))


class Tally:
    """Numbers of each rank that a step adds up over all of them, and such as have to be alike.

    Args:
        mine: (k,) of this rank, to add up. alike: (A,) of this rank (:mod:`zoo.zero.update.alike`).
        comm: all ranks that have numbers; layers: those with other layers of the model, None for none.
    """

    def __init__(
        self, mine: torch.Tensor, comm: Communicator, layers: Communicator | None, alike: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        self.comm, self._layers, self._num = comm, layers, mine.numel()
        self.mine = mine.double() if alike is None else torch.cat([mine.double(), alike.to(mine.device)])
        self._sums: torch.Tensor | None = None
        self._everyone: torch.Tensor | None = None

    def ride(self, comm: Communicator, others: torch.Tensor) -> torch.Tensor | None:
        """(N m,) the (m,) ``others`` of every rank, if these go to the same ranks and the tally is not on its way."""
        if self._everyone is not None or tuple(comm.ranks) != tuple(self.comm.ranks):
            return None
        both = _of_all(comm, torch.cat([others, self.mine.to(others.device)])).view(comm.size, -1)
        self._everyone = both[:, others.numel() :]
        return both[:, : others.numel()].reshape(-1)

    def have_measured(self, powers: Sequence[torch.Tensor]) -> None:
        """What each rank has added up by itself over gradients that all of them have whole becomes the last of the
        numbers that have to be alike."""
        if powers and self._everyone is None and self.mine.numel() > self._num:
            mantissa, exponent = torch.frexp(torch.stack(list(powers)).sum().double())
            coarse = torch.ldexp((mantissa * 2.0**16).round(), exponent - 16).sqrt()
            self.mine[-1] = coarse.nan_to_num(nan=-1.0, posinf=-2.0)

    def sums(self) -> torch.Tensor:
        """(k,) fp64 on the device. Collective, unless it was ridden or asked for before."""
        if self._sums is None:
            if self._everyone is None:
                self._everyone = _of_all(self.comm, self.mine).view(self.comm.size, -1)
            sums, rows = self._everyone[:, : self._num].sum(0), self._everyone[:, self._num :]
            if self._layers is not None:
                # Whether any of them finds rows that are not alike goes with their sums.
                found = torch.cat([sums, (rows != rows[:1]).any().double().reshape(1)])
                found = _of_all(self._layers, found).view(self._layers.size, -1).sum(0)
                sums, self._elsewhere = found[:-1], found[-1:]
            self._sums = sums
        return self._sums

    _elsewhere: torch.Tensor | None = None

    def rows(self) -> torch.Tensor | None:
        """(1 + N A,) fp64 on the device: how many groups of ranks have rows that are not alike, where that is known of
        other layers too, else 0; and the rows of all ranks. None where they were not sent. Starts no collective."""
        if self._everyone is None or self._everyone.shape[1] == self._num:
            return None
        rows = self._everyone[:, self._num :].reshape(-1)
        return torch.cat([rows.new_zeros(1) if self._elsewhere is None else self._elsewhere, rows])


def _is_alone(axes: Axes, gradients: Sequence[BucketGradients]) -> bool:
    """Whether every rank has the whole gradients of a family, and measures them by itself."""
    bucket = next(g.bucket for g in gradients if g.bucket.routes.axes is axes)
    whole = len(bucket.updated_chunks) == axes.shard.size
    return whole and axes.parts is None and bucket.routes.apart() is None


def _joined(powers: torch.Tensor, p: float) -> torch.Tensor:
    """Σ over (k,) sums of |g|^p, or the largest of (k,) maxima."""
    return powers.amax() if math.isinf(p) else powers.sum()


def _powers(
    gradients: Sequence[BucketGradients], axes: Axes, p: float, tally: Tally | None, absent: bool
) -> torch.Tensor:
    """Σ |g|^p over the parameters of one family, or max |g|."""
    mine = [g for g in gradients if g.bucket.routes.axes is axes]
    none = torch.zeros(len(mine), dtype=torch.float64, device=mine[0].bucket.device)
    chunks = [none if absent else powers_of(mine, c, p) for c in mine[0].bucket.updated_chunks]
    each = torch.cat(chunks)
    if len(chunks) < axes.shard.size:
        ridden = tally.ride(axes.shard, each) if tally is not None else None
        each = _of_all(axes.shard, each) if ridden is None else ridden
    powers = _joined(each, p)
    apart = mine[0].bucket.routes.apart()
    if apart is not None:  # the root mean square of the ranks' own norms
        everyone = _of_all(apart, powers.reshape(1))
        powers = everyone.amax() if math.isinf(p) else everyone.mean()
    return powers if axes.parts is None else _joined(_of_all(axes.parts, powers.reshape(1)), p)


def _of_all(comm: Communicator, mine: torch.Tensor) -> torch.Tensor:
    """(N k,) this (k,) of every rank."""
    everyone = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(everyone, mine, label="norms of gradients").wait()
    return everyone


def powers_of(gradients: Sequence[BucketGradients], index: int, p: float) -> torch.Tensor:
    """(k,) fp64: Σ |g|^p over chunk ``index`` of each, or the largest |g| for p = infinity."""
    found = [g.squares if p == 2.0 else None for g in gradients]
    together = [i for i, g in enumerate(gradients) if found[i] is None and not g.role.is_away] if p == 2.0 else []
    if len({gradients[i].dtype for i in together}) == 1:  # one call of the kernel
        chunks = [gradients[i].reduced_chunk(index) for i in together]
        for i, squares in zip(together, sums_of_squares(chunks), strict=True):
            found[i] = squares
    each = zip(gradients, found, strict=True)
    return torch.stack([power_of(g.reduced_chunk(index), p) if power is None else power for g, power in each])
