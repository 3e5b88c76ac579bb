"""The loader: every sample once an epoch, every rank its own, from any position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

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


@pytest.mark.parametrize(("given", "told"), [
    ({"micro_batch_size": 0}, r"micro_batch_size of ShardedLoader got 0 \(int\); it takes a whole number from 1"),
    ({"micro_batch_size": "2"}, r"micro_batch_size of ShardedLoader got '2' \(str\)"),
    ({"size": 0}, r"size of ShardedLoader got 0"),
    ({"size": 2, "rank": 2}, r"ShardedLoader got rank=2 of size=2 ranks; ranks are numbered from 0 to 1"),
    ({"size": 2, "rank": -1}, r"rank of ShardedLoader got -1"),
    ({"seed": "x"}, r"seed of ShardedLoader got 'x' \(str\)"),
    ({"num_workers": "1"}, r"num_workers of ShardedLoader got '1' \(str\); it takes a whole number of at least 0"),
    ({"num_workers": -1}, r"num_workers of ShardedLoader got -1"),
    ({"num_workers": 1, "prefetch_factor": 0}, r"prefetch_factor of ShardedLoader got 0"),
    ({"shuffle": "no"}, r"shuffle of ShardedLoader got 'no' \(str\); it takes True or False"),
    ({"pin_memory": 1.5}, r"pin_memory of ShardedLoader got 1\.5 \(float\)"),
    ({"collate_fn": 5}, r"collate_fn of ShardedLoader got 5 \(int\); it takes a callable"),
])  # fmt: skip
def test_what_a_loader_cannot_take_is_told_when_it_is_made(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ShardedLoader(numbers(12), **{"micro_batch_size": 2, **given})


def test_numbers_of_other_types_are_taken() -> None:
    same = ShardedLoader(numbers(12), 2.0, rank=torch.tensor(1), size=2, seed=3.0, shuffle=1)  # type: ignore[arg-type]
    assert taken(same) == taken(ShardedLoader(numbers(12), 2, rank=1, size=2, seed=3))


@pytest.mark.parametrize(("changes", "told"), [
    ({"position": 14}, r"the loader's state has the position 14; a data set of 12 samples has 0 to 12"),
    ({"position": -2}, r"the position of the loader's state got -2"),
    ({"epoch": "x"}, r"the epoch of the loader's state got 'x'"),
])  # fmt: skip
def test_a_state_that_is_no_place_in_the_data_is_refused(changes: dict[str, Any], told: str) -> None:
    loader = ShardedLoader(numbers(12), 2)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=told):
        loader.load_state_dict({**before, **changes})
    with pytest.raises(ValueError, match=r"the loader's state is a NoneType"):
        loader.load_state_dict(None)  # type: ignore[arg-type]
    assert loader.state_dict() == before


def test_what_cannot_begin_anew_is_told() -> None:
    assert list(itertools.islice(RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]
    once = RepeatingLoader(iter([1, 2]))
    assert [next(once), next(once)] == [1, 2]
    with pytest.raises(
        StopIteration, match=r"a list_iterator is an iterator, which cannot begin anew.*give the loader"
    ):
        next(once)
    with pytest.raises(StopIteration, match=r"the loader, a list, has no batches"):
        next(RepeatingLoader([]))
    with pytest.raises(ValueError, match=r"RepeatingLoader got 5 \(int\); it takes a loader"):
        RepeatingLoader(5)
