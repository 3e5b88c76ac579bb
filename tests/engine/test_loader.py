"""The loader: every sample once an epoch, every rank its own, from any position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch.utils.data import IterableDataset, TensorDataset

from zoo.engine import RepeatingLoader, ShardedLoader, shuffled


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def taken(loader: ShardedLoader[list[torch.Tensor]], batches: int | None = None) -> list[int]:
    found: list[int] = []
    for number, (batch,) in enumerate(loader):
        found += batch.tolist()
        if number + 1 == batches:
            break
    return found


@examples(times=5)
@given(st.integers(1, 300), st.integers(0, 2**40))
def test_shuffled_is_a_permutation(size: int, seed: int) -> None:
    assert sorted(shuffled(i, size, seed) for i in range(size)) == list(range(size))


def test_shuffled_is_written_down() -> None:
    assert [shuffled(i, 10, 7) for i in range(10)] == SHUFFLE_OF_TEN


SHUFFLE_OF_TEN = [0, 8, 5, 7, 9, 2, 6, 1, 3, 4]


def test_shuffles_look_random() -> None:
    # Mean distance between an index and its place is size / 3 for a random permutation; and seeds differ.
    size = 3000
    orders = [[shuffled(i, size, seed) for i in range(size)] for seed in range(4)]
    for order in orders:
        distance = sum(abs(i - j) for i, j in enumerate(order)) / size
        assert abs(distance - size / 3) < 0.05 * size
        rising = sum(a < b for a, b in itertools.pairwise(order))
        assert abs(rising - size / 2) < 0.05 * size
    assert len({tuple(order) for order in orders}) == 4


@examples(times=5)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 60), st.integers(0, 9))
def test_an_epoch_is_dealt_out_once(size: int, batch: int, extra: int, seed: int) -> None:
    count = size * batch + extra
    loaders = [ShardedLoader(numbers(count), batch, rank=r, size=size, seed=seed) for r in range(size)]
    epochs = []
    for epoch in range(2):
        found = [taken(loader) for loader in loaders]
        assert all(len(f) == len(loaders[0]) * batch for f in found)
        everything = [n for f in found for n in f]
        assert len(set(everything)) == len(everything) == len(loaders[0]) * batch * size
        assert [loader.epoch for loader in loaders] == [epoch + 1] * size
        epochs.append(found)
    if count > 12:
        assert epochs[0] != epochs[1]


@examples(times=5)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 10))
def test_it_goes_on_at_any_number_of_ranks(before: int, after: int, steps: int) -> None:
    # Twelve samples a step, dealt out to any number of ranks: the samples of each step stay the same.
    def steps_of(size: int, count: int, state: dict[str, int] | None) -> tuple[list[set[int]], dict[str, int]]:
        loaders = [ShardedLoader(numbers(100), 12 // size, rank=r, size=size, seed=1) for r in range(size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        streams = [RepeatingLoader(loader) for loader in loaders]
        found = [{int(n) for stream in streams for n in next(stream)[0]} for _ in range(count)]
        return found, loaders[0].state_dict()

    expected, _ = steps_of(1, 20, None)
    head, state = steps_of(before, steps, None)
    tail, _ = steps_of(after, 20 - steps, state)
    assert head + tail == expected


def test_the_datas_own_order() -> None:
    assert taken(ShardedLoader(numbers(6), 2, shuffle=False)) == [0, 1, 2, 3, 4, 5]


def test_other_data_is_refused() -> None:
    state = ShardedLoader(numbers(6), 2).state_dict()
    with pytest.raises(ValueError, match="of 6 samples; this one has 8"):
        ShardedLoader(numbers(8), 2).load_state_dict(state)


def test_a_stream_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ValueError, match="map-style"):
        ShardedLoader(Stream(), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    plain = ShardedLoader(numbers(30), 4, seed=5)
    ahead = ShardedLoader(numbers(30), 4, seed=5, num_workers=workers)
    before = torch.get_rng_state()
    assert taken(ahead, 3) == taken(plain, 3)
    assert ahead.state_dict() == plain.state_dict()  # what was loaded ahead does not count
    again = ShardedLoader(numbers(30), 4, seed=0, num_workers=workers)
    again.load_state_dict(ahead.state_dict())
    assert taken(again) == taken(plain)
    assert torch.equal(torch.get_rng_state(), before)
    assert taken(again) == taken(plain)
