"""Batches that fit many numbers of ranks. Figures are those of DeepSpeed's own tables, written down."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.launch.elastic import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    Policy,
    _highly_composite,
    shares,
    table,
    table_of_nodes,
    world_sizes,
)  # fmt: skip

POLICIES = st.builds(
    Policy, micro_batches=st.lists(st.integers(1, 20), min_size=1, max_size=4), max_batch=st.integers(60, 3000),
    min_ranks=st.integers(1, 3), max_ranks=st.one_of(st.none(), st.integers(3, 200)), prefers_larger=st.booleans(),
)  # fmt: skip


def policy(micro: list[Any], most: int, low: int = 1, high: int | None = None, **more: Any) -> Policy:
    return Policy(micro_batches=micro, max_batch=most, min_ranks=low, max_ranks=high, **more)


def test_the_first_table() -> None:
    large = policy([8, 12, 16, 17], 10_000, 32, 1500)
    found = table(large, 64)
    assert (found.batch, len(found.world_sizes), found.micro_batch) == (9792, 23, 17)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"128 data-parallel ranks do not divide a batch of 9792"):
        table(large, 128)
    found = table(policy([2, 4, 6], 2000))
    assert (found.batch, len(found.world_sizes), found.micro_batch) == (1680, 32, None)
    small = policy([4, 6], 64)
    assert table(small, 6).batch == 48
    assert table(small).world_sizes == [1, 2, 3, 4, 6, 8, 12]
    assert table(small, 6).micro_batch == 4
    with pytest.raises(ElasticityIncompatibleWorldSize, match="1, 2, 3, 4, 6, 8, 12 do"):
        table(small, 5)


def test_the_table_of_nodes() -> None:
    found = table_of_nodes(policy([2, 4, 6], 2000, 8, 256), 8, 8)
    assert (found.batch, len(found.world_sizes), found.micro_batch) == (1920, 13, 6)
    assert table_of_nodes(policy([2, 4, 6], 2000, 8, 256), 24, 8).micro_batch == 4
    assert table_of_nodes(policy([2, 3, 8], 1000, 8, 128), 64, 8, 4).batch == 960
    odd = table_of_nodes(policy([2, 4], 512, 8, 128), 88, 8)
    assert (odd.batch, odd.world_sizes, odd.micro_batch) == (352, [88], 4)
    assert table_of_nodes(policy([8], 64, 16, 16), 16, 8, 2).micro_batch == 8  # of a data-parallel rank


def test_a_batch_stays_within_its_cap() -> None:
    assert table(policy([1, 2, 3, 7], 32), 4).micro_batch == 3  # the least common multiple, 42, is over it
    assert table(policy([8, 10, 12], 100)).batch <= 100


@examples(times=1)
@given(POLICIES)
def test_every_size_of_the_table_divides_its_batch(given_policy: Policy) -> None:
    try:
        found = table(given_policy)
    except ElasticityConfigError:
        with pytest.raises(ElasticityConfigError, match=r"no number of ranks from .* fits a batch"):
            table(given_policy)
        return
    assert found.batch <= given_policy.max_batch
    assert found.world_sizes == world_sizes(found.batch, given_policy) != []
    for ranks in found.world_sizes:
        micro = table(given_policy, ranks).micro_batch
        assert micro in given_policy.micro_batches
        assert found.batch % (ranks * micro) == 0
        assert given_policy.min_ranks <= ranks <= given_policy.most_ranks
        assert not any(found.batch % (ranks * other) == 0 for other in given_policy.micro_batches if other > micro), (
            "the largest that fits"
        )


@examples(times=1)
@given(POLICIES, st.integers(1, 6), st.sampled_from([(1, 1), (4, 2), (8, 8), (6, 3)]))
def test_a_table_of_nodes_never_has_no_micro_batch(given_policy: Policy, nodes: int, shape: tuple[int, int]) -> None:
    each, model_parallel = shape
    try:
        found = table_of_nodes(given_policy, nodes * each, each, model_parallel)
    except ElasticityError:
        return
    data_parallel = nodes * each // model_parallel
    assert data_parallel in found.world_sizes
    assert found.micro_batch is not None
    assert 0 < found.batch <= given_policy.max_batch
    assert found.batch % (data_parallel * found.micro_batch) == 0


def test_highly_composite_numbers_are_those_with_more_divisors_than_any_before() -> None:
    divisors = [0] * 5001
    for one in range(1, 5001):
        for multiple in range(one, 5001, one):
            divisors[multiple] += 1
    before = itertools.accumulate(divisors, max)
    expected = [n for n, most in zip(range(1, 5001), before, strict=False) if divisors[n] > most]
    assert list(_highly_composite(5000)) == expected
    assert _highly_composite(10**6)[-3:] == (554400, 665280, 720720)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], 64), "the list of micro-batches is empty"),
        (([4, None], 64), r"micro-batches \[4, None\] have None"),
        (([0.5], 64), "have 0.5"),
        (([True], 64), "have True"),
        (([-1], 64), "have -1"),
        (([65], 64), "micro-batch 65 is larger than the largest batch, 64"),
        (([4], 64, 0), "from 0 to 16 ranks is no range"),
        (([4], 64, 9, 8), "from 9 to 8 ranks is no range"),
    ],
)
def test_what_cannot_be(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ElasticityConfigError, match=said):
        policy(*arguments)


def test_an_empty_table_and_a_micro_batch_of_none_are_refused() -> None:
    with pytest.raises(ElasticityConfigError, match="no number of ranks from 20 to 30 fits a batch of at most 64"):
        table(policy([4, 6], 64, 20, 30))
    with pytest.raises(ElasticityIncompatibleWorldSize, match="80 data-parallel ranks of at least 2 samples make more"):
        table_of_nodes(policy([2, 4], 128, 8, 64), 80, 8)
    with pytest.raises(ElasticityConfigError, match="a node of 8 ranks does not hold whole groups of 3"):
        table_of_nodes(policy([2], 64), 8, 8, 3)


@examples(times=1)
@given(st.integers(1, 200), st.integers(1, 17), st.integers(1, 9))
def test_shares_are_the_whole_batch_as_even_as_can_be(batch: int, ranks: int, most: int) -> None:
    found = shares(batch, ranks, most)
    totals = [sum(one) for one in found]
    assert sum(totals) == batch
    assert max(totals) - min(totals) <= 1
    assert len({len(one) for one in found}) == 1, "as many micro-batches on every rank: collectives meet"
    assert all(0 <= micro <= most for one in found for micro in one)
    assert all(max(one) - min(one) <= 1 and one == sorted(one, reverse=True) for one in found)
    assert (len(found[0]) - 1) * most < max(totals), "no more micro-batches than needed"
