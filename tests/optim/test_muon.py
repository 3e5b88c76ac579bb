"""The orthogonalisation of Muon."""

from __future__ import annotations

import pytest
import torch

from zoo.optim.muon import orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (1, 7), (7, 1)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix).float()
    assert found.shape == matrix.shape
    values = torch.diagonal(u.t() @ found @ v.t())
    assert float(values[:-1].min() if len(values) > 1 else values[0]) > 0.3  # the smallest may be tiny
    assert float(values.max()) < 1.3
    torch.testing.assert_close(u @ torch.diag(values) @ v, found, rtol=0, atol=0.1)  # bf16


def test_a_zero_matrix_stays_zero() -> None:
    assert torch.equal(orthogonal(torch.zeros(3, 4)).float(), torch.zeros(3, 4))
