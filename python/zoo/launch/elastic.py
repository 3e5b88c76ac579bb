"""Batch sizes that fit many numbers of ranks: DeepSpeed's documented tables, v0.1 and v0.2, and uneven shares.

A job whose number of ranks may change wants one global batch B, whatever the number W of ranks is. The tables choose B
so that many W divide it evenly: B = W · m · G, with m one of the given micro-batches and G whole. :func:`shares` needs
no table: it gives any W its parts of any B.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


class ElasticityError(ValueError):
    """Of a job whose number of ranks may change."""


class ElasticityConfigError(ElasticityError):
    """Its section says something that cannot be."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """A number of ranks that no batch size fits."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a job allows.

    Raises:
        ElasticityConfigError: numbers that cannot be.
    """

    micro_batches: Sequence[int]
    """Samples that a rank may take at a time."""
    max_batch: int
    """The largest global batch B."""
    min_ranks: int = 1
    max_ranks: int | None = None
    """None: as many as the smallest micro-batch allows."""
    prefers_larger: bool = True
    """Of two batches that as many numbers of ranks fit the larger; and the larger micro-batch."""

    def __post_init__(self) -> None:
        if not self.micro_batches:
            raise ElasticityConfigError("the list of micro-batches is empty; give at least one, as [2, 4, 6].")
        wrong = [one for one in self.micro_batches if type(one) is not int or one < 1]
        if wrong:
            raise ElasticityConfigError(f"micro-batches {list(self.micro_batches)} have {wrong[0]!r}; give whole "
                                        "numbers from 1 on.")  # fmt: skip
        if max(self.micro_batches) > self.max_batch:
            raise ElasticityConfigError(
                f"micro-batch {max(self.micro_batches)} is larger than the largest batch, {self.max_batch}; "
                "every micro-batch has to fit."
            )
        if self.min_ranks < 1 or self.most_ranks < self.min_ranks:
            raise ElasticityConfigError(
                f"from {self.min_ranks} to {self.most_ranks} ranks is no range; give 1 <= min <= max."
            )

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks."""
        return self.max_batch // min(self.micro_batches) if self.max_ranks is None else self.max_ranks


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """A batch, and what fits it."""

    batch: int
    """B, samples of a step over all ranks."""
    world_sizes: Sequence[int]
    """Numbers of data-parallel ranks that fit, rising."""
    micro_batch: int | None = None
    """m, for the number of ranks that was asked about; None where none was."""


def table(policy: Policy, ranks: int | None = None) -> Elastic:
    """The v0.1 table: the batch that the most numbers of ranks fit.

    Candidates are, for each micro-batch and for their least common multiple as u ≤ max_batch: the largest
    u · h ≤ max_batch with h highly composite. W fits B if W · m divides B for a micro-batch m. Of candidates that as
    many W fit the larger one is taken, or the smaller one.

    Args:
        ranks: W; its micro-batch is the largest m such that W · m divides B.

    Raises:
        ElasticityConfigError: no number of ranks within the bounds fits any candidate.
        ElasticityIncompatibleWorldSize: ``ranks`` does not fit.
    """
    units = [*policy.micro_batches, math.lcm(*policy.micro_batches)]
    best, fitting = 0, list[int]()
    candidates = {_largest(unit, policy.max_batch) for unit in units if unit <= policy.max_batch}
    for batch in sorted(candidates, reverse=policy.prefers_larger):
        found = world_sizes(batch, policy)
        if len(found) > len(fitting):
            best, fitting = batch, found
    if not fitting:
        raise ElasticityConfigError(
            f"no number of ranks from {policy.min_ranks} to {policy.most_ranks} fits a batch of at most "
            f"{policy.max_batch} in micro-batches of {list(policy.micro_batches)}; widen the range, or raise the batch."
        )
    if ranks is None:
        return Elastic(batch=best, world_sizes=fitting)
    if ranks not in fitting:
        raise _does_not_fit(ranks, best, fitting)
    return Elastic(batch=best, world_sizes=fitting, micro_batch=max(_micro(policy, best, ranks)))


def table_of_nodes(policy: Policy, ranks: int, ranks_per_node: int, model_parallel: int = 1) -> Elastic:
    """The v0.2 table: the same over whole nodes, of which each has ``ranks_per_node / model_parallel`` data-parallel
    ranks. World sizes are numbers of data-parallel ranks. Where the nodes that are there are not in the table, the
    largest (or smallest) multiple of a micro-batch over them that is allowed is taken, for them alone.

    Args:
        ranks: all that are there, those of model parallelism included.

    Raises:
        ElasticityConfigError: a node's ranks do not come out even, or nothing fits.
        ElasticityIncompatibleWorldSize: nothing fits these ranks.
    """
    if model_parallel < 1 or ranks_per_node < 1 or ranks_per_node % model_parallel:
        raise ElasticityConfigError(
            f"a node of {ranks_per_node} ranks does not hold whole groups of {model_parallel} model-parallel ranks."
        )
    if ranks < 1 or ranks % model_parallel:
        raise ElasticityIncompatibleWorldSize(f"{ranks} ranks are no whole groups of {model_parallel}.")
    each = ranks_per_node // model_parallel
    nodes = Policy(
        micro_batches=policy.micro_batches, max_batch=policy.max_batch // each,
        min_ranks=max(1, policy.min_ranks // ranks_per_node), max_ranks=policy.most_ranks // ranks_per_node,
        prefers_larger=policy.prefers_larger,
    )  # fmt: skip
    found = table(nodes)
    batch, fitting = found.batch * each, [size * each for size in found.world_sizes]
    data_parallel = ranks // model_parallel
    if data_parallel not in fitting:
        within = [micro * data_parallel for micro in policy.micro_batches if micro * data_parallel <= policy.max_batch]
        if not within:
            raise ElasticityIncompatibleWorldSize(
                f"{data_parallel} data-parallel ranks of at least {min(policy.micro_batches)} samples make more than "
                f"the largest batch, {policy.max_batch}; take fewer ranks, or one of {_some(fitting)}."
            )
        batches = [policy.max_batch // one * one for one in within]
        batch, fitting = max(batches) if policy.prefers_larger else min(batches), [data_parallel]
    micros = _micro(policy, batch, data_parallel)
    if not micros:
        raise _does_not_fit(data_parallel, batch, fitting)
    # The first that is given, where smaller batches are preferred: what the documented table does.
    micro = max(micros) if policy.prefers_larger else micros[0]
    return Elastic(batch=batch, world_sizes=fitting, micro_batch=micro)


def world_sizes(batch: int, policy: Policy) -> list[int]:
    """All W within the policy's bounds such that W · m divides ``batch`` for a micro-batch m, rising."""
    counts = [batch // micro for micro in policy.micro_batches if batch % micro == 0]
    top = min(policy.most_ranks, max(counts, default=0))
    return [ranks for ranks in range(policy.min_ranks, top + 1) if any(count % ranks == 0 for count in counts)]


def _micro(policy: Policy, batch: int, ranks: int) -> list[int]:
    return [micro for micro in policy.micro_batches if batch % (ranks * micro) == 0]


def _does_not_fit(ranks: int, batch: int, fitting: Sequence[int]) -> ElasticityIncompatibleWorldSize:
    return ElasticityIncompatibleWorldSize(
        f"{ranks} data-parallel ranks do not divide a batch of {batch} into whole micro-batches; {_some(fitting)} do."
    )


def _some(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:24])) + (", …" if len(sizes) > 24 else "")


def _largest(unit: int, most: int) -> int:
    return unit * max(number for number in _highly_composite(most) if number <= most // unit)


@functools.lru_cache(maxsize=8)
def _highly_composite(most: int) -> tuple[int, ...]:
    """Numbers with more divisors than any smaller one, up to ``most``. Each is a product of the first primes with
    exponents that do not rise, so only those are looked at (Ramanujan 1915)."""
    primes = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    found: list[tuple[int, int]] = []

    def extend(number: int, divisors: int, place: int, bound: int) -> None:
        found.append((number, divisors))
        for exponent in range(1, bound + 1):
            number *= primes[place]
            if number > most:
                return
            if place + 1 < len(primes):
                extend(number, divisors * (exponent + 1), place + 1, exponent)

    extend(1, 1, 0, most.bit_length())
    best, records = 0, []
    for number, divisors in sorted(found):
        if divisors > best:
            best = divisors
            records.append(number)
    return tuple(records)


def shares(batch: int, ranks: int, max_micro_batch: int) -> list[list[int]]:
    """A global batch over any number of ranks: the micro-batches of each rank, as many on every rank.

    Rank r takes ⌊(r+1)·B/W⌋ − ⌊r·B/W⌋ samples, consecutive ones, in G = ⌈⌈B/W⌉ / max⌉ micro-batches as equal as can
    be, the larger ones first; a micro-batch may have none. With each sample's loss weighted by 1/B the gradient is that
    of one process that takes the whole batch, whatever W is.

    Args:
        batch: B.
        ranks: W.
        max_micro_batch: samples that a rank can take at a time.

    Raises:
        ElasticityConfigError: a number below 1.
    """
    for name, number in (("batch", batch), ("ranks", ranks), ("max_micro_batch", max_micro_batch)):
        if number < 1:
            raise ElasticityConfigError(f"{name} is {number}; give 1 or more.")
    most = (batch + ranks - 1) // ranks
    times = (most + max_micro_batch - 1) // max_micro_batch
    counts = [(rank + 1) * batch // ranks - rank * batch // ranks for rank in range(ranks)]
    return [[(count + times - 1 - turn) // times for turn in range(times)] for count in counts]
