"""The batch-size triangle against the equation itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.config import BatchSizeError, ConfigError, load
from zoo.config.batch import BATCH_KEYS, G, M, T, solve

SIZES = st.integers(1, 64)


@examples(times=5)
@given(SIZES, SIZES, SIZES, st.sets(st.sampled_from(BATCH_KEYS)))
def test_any_consistent_choice_gives_the_same_triangle(micro: int, steps: int, ranks: int, keys: set[str]) -> None:
    whole = {T: micro * steps * ranks, M: micro, G: steps}
    given_sizes = {key: whole[key] for key in keys}
    if not {T, M} & keys:
        with pytest.raises(BatchSizeError, match="must be given"):
            solve(given_sizes, {}, ranks)
        return
    solved = {**given_sizes, **solve(given_sizes, {}, ranks)}
    assert solved[T] == solved[M] * solved[G] * ranks
    if len(keys) > 1:
        assert solved == whole
    else:
        assert solved[G] == 1


@examples(times=5)
@given(SIZES, st.none() | SIZES, st.none() | SIZES, st.integers(1, 8))
def test_what_does_not_divide_is_refused_with_every_number(
    total: int, micro: int | None, steps: int | None, ranks: int
) -> None:
    sizes = {key: value for key, value in ((T, total), (M, micro), (G, steps)) if value is not None}
    product = (micro or 1) * (steps or 1) * ranks
    fits = total == product if micro and steps else total % product == 0
    if fits:
        assert solve(sizes, {}, ranks) is not None
        return
    with pytest.raises(BatchSizeError) as caught:
        solve(sizes, {key: f"from {key}" for key in BATCH_KEYS}, ranks)
    for key, value in sizes.items():
        assert f"{key} = {value} (from {key})" in str(caught.value)
    assert f"world_size = {ranks}" in str(caught.value)


def test_the_error_shows_where_each_number_came_from() -> None:
    with pytest.raises(ConfigError) as caught:
        load({T: 32, M: 3}, world_size=4, overrides={G: 2})
    assert "the product is 24, not 32" in str(caught.value)
    for part in (f"{T} = 32 (dict)", f"{M} = 3 (dict)", f"{G} = 2 (override)", "world_size = 4 (argument of load)"):
        assert part in str(caught.value)


def test_world_size_comes_from_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load({T: 8}).train_micro_batch_size_per_gpu == 2
    monkeypatch.delenv("WORLD_SIZE")
    assert load({T: 8}).train_micro_batch_size_per_gpu == 8
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'four'"):
        load({T: 8})
    with pytest.raises(ConfigError, match="positive"):
        load({T: 8}, world_size=0)


def test_the_triangle_holds_for_any_size() -> None:
    config = load({T: 3 * 2**70, G: 3}, world_size=2)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (3 * 2**70, 2**69)


@pytest.mark.parametrize("bad", ["8", 0, -1, 1.5, True])
def test_sizes_that_are_no_sizes(bad: object) -> None:
    with pytest.raises(ConfigError, match=f"{M}: given"):
        load({M: bad})
