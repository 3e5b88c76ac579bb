"""Masks against plain NumPy: ties, zeros, shares of nothing and of all, blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.profiles import examples

from zoo.compression.pruning.masks import (
    Pattern,
    as_matrix,
    check_finite,
    from_matrix,
    largest,
    num_kept,
    over_units,
    pack,
    unit_norms,
    unpack,
)

FEW = st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, 2.0])  # many ties
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)
ARRAYS = hnp.arrays(np.float32, SHAPES, elements=FEW | st.floats(-9, 9, width=32))


def reference(scores: np.ndarray, num: int) -> np.ndarray:
    """One after the other: the largest that is left, the first of equals."""
    flat = [float(x) for x in scores.reshape(-1)]
    stays = np.zeros(len(flat), dtype=bool)
    for _ in range(num):
        best = None
        for i, value in enumerate(flat):
            if not stays[i] and (best is None or value > flat[best]):
                best = i
        assert best is not None
        stays[best] = True
    return stays.reshape(scores.shape)


@examples(times=8)
@given(ARRAYS, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_largest_stay_and_of_equals_the_first(values: np.ndarray, ratio: float, dtype: torch.dtype) -> None:
    scores = torch.from_numpy(values).to(dtype)
    num = num_kept(ratio, scores.numel())
    mask = largest(scores, num)
    assert mask.shape == scores.shape
    assert int(mask.sum()) == num
    np.testing.assert_array_equal(mask.numpy(), reference(scores.float().numpy(), num))


def test_how_many_stay() -> None:
    assert [num_kept(r, 10) for r in (0.0, 0.01, 0.1, 0.3, 0.99, 1.0)] == [0, 1, 1, 3, 10, 10]
    assert num_kept(0.29, 100) == 29, "29 in spite of 0.29 * 100 = 28.999..."
    assert num_kept(0.5, 0) == 0


def block_reference(matrix: np.ndarray, rows: int, columns: int, ratio: float) -> np.ndarray:
    r, c = matrix.shape
    sums = np.zeros((r // rows, c // columns))
    for i in range(r):
        for j in range(c):
            sums[i // rows, j // columns] += abs(float(matrix[i, j]))
    stays = reference(sums, num_kept(ratio, sums.size))
    return np.array([[stays[i // rows, j // columns] for j in range(c)] for i in range(r)]).reshape(r, c)


@examples(times=8)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.1, 0.5, 1.0]))
def test_blocks(data: st.DataObject, rows: int, columns: int, ratio: float) -> None:
    shape = (rows * data.draw(st.integers(1, 3)), columns * data.draw(st.integers(1, 3)))
    values = data.draw(hnp.arrays(np.float32, shape, elements=FEW))
    pattern = Pattern.parse(f"{rows}x{columns}")
    scores = pattern.scores(torch.from_numpy(values).abs())
    np.testing.assert_array_equal(
        pattern.spread(pattern.keep(scores, ratio)).numpy(), block_reference(values, rows, columns, ratio)
    )


@examples(times=8)
@given(st.data(), st.integers(2, 6))
def test_n_of_m_neighbours_go(data: st.DataObject, m: int) -> None:
    n = data.draw(st.integers(1, m - 1))
    shape = (data.draw(st.integers(1, 3)), m * data.draw(st.integers(1, 3)))
    values = np.abs(data.draw(hnp.arrays(np.float32, shape, elements=FEW)))
    pattern = Pattern.parse(f"{n}:{m}")
    mask = pattern.spread(pattern.keep(pattern.scores(torch.from_numpy(values)), 0.123)).numpy()
    for row, stays in zip(values, mask, strict=True):
        for start in range(0, shape[1], m):
            part = slice(start, start + m)
            np.testing.assert_array_equal(stays[part], reference(row[part], m - n))
    assert pattern.dense_ratio == pytest.approx(1 - n / m)


@pytest.mark.parametrize(("text", "fits"), [("4x1", (8, 3)), ("1x4", (3, 8)), ("2:4", (3, 8)), ("8x8", (8, 8))])
def test_patterns_and_what_does_not_fit(text: str, fits: tuple[int, int]) -> None:
    pattern = Pattern.parse(text)
    assert str(pattern) == text
    pattern.check(fits, "fc.weight", "here")
    with pytest.raises(ValueError, match=rf"here: the block_pattern '{text}' does not fit fc.weight, which has 7"):
        pattern.check((7, 7), "fc.weight", "here")


@pytest.mark.parametrize("text", ["", "4", "x4", "0x1", "4:2", "4:4", "a:b", "4x1x1"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(ValueError, match="allowed is NxM"):
        Pattern.parse(text)


@given(hnp.array_shapes(min_dims=2, max_dims=5, min_side=1, max_side=4), st.integers(0, 1))
def test_a_matrix_has_outputs_as_rows_and_input_channels_as_neighbours(shape: tuple[int, ...], out_dim: int) -> None:
    weight = torch.arange(int(np.prod(shape))).reshape(shape)
    matrix = as_matrix(weight, out_dim)
    assert matrix.shape[0] == shape[out_dim]
    assert torch.equal(from_matrix(matrix, shape, out_dim), weight)
    channels = shape[1 - out_dim]
    first = weight.select(out_dim, 0).movedim(0, -1).reshape(-1)[:channels]
    assert torch.equal(matrix[0, :channels], first)


@examples(times=8)
@given(hnp.arrays(np.bool_, SHAPES))
def test_bits_come_back_and_cost_one_bit_an_element(values: np.ndarray) -> None:
    mask = torch.from_numpy(values)
    bits = pack(mask)
    assert bits.dtype == torch.uint8
    assert bits.numel() == (values.size + 7) // 8
    np.testing.assert_array_equal(bits.numpy(), np.packbits(values.reshape(-1), bitorder="little"))
    assert torch.equal(unpack(bits, mask.shape, "w"), mask)


def test_bits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fc.weight: a mask of the shape \(4, 4\) has 2 bytes"):
        unpack(torch.zeros(3, dtype=torch.uint8), (4, 4), "fc.weight")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_units_along_a_dim(units: int, per: int, others: int) -> None:
    weight = torch.randn(others, units * per, 2)
    norms = unit_norms(weight, 1, units)
    wanted = [float(weight[:, u * per : (u + 1) * per].abs().sum()) for u in range(units)]
    torch.testing.assert_close(norms, torch.tensor(wanted))
    mask = norms > norms.mean()
    wide = over_units(mask, weight.shape, 1)
    assert wide.shape == (1, units * per, 1)
    assert wide.reshape(units, per).all(1).equal(mask)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inf_and_nan_are_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match=r"fc\.weight: a mask was to be made, and the values have inf or NaN"):
        check_finite(torch.tensor([0.0, bad]), "fc.weight")
