"""Factorizations, solves and sparse products, equal to integers that are derived by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.profiling.test_counts import Calls, macs_of, profiled
from torch import nn

from zoo.profiling import FlopsProfiler

L = torch.linalg
N = 6
MATRIX = torch.eye(N) * 9 + torch.arange(36.0).reshape(N, N) / 36
SPD = MATRIX @ MATRIX.T
TALL, RIGHT = torch.ones(8, N) + torch.eye(8, N), torch.ones(N, 2)
KEPT = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])  # three elements that are not 0


@pytest.mark.parametrize(
    ("function", "given", "macs"),
    [
        (L.lu_factor, (MATRIX,), 72),
        (L.lu, (TALL,), (3 * 8 * 36 - 216) // 6),
        (L.det, (MATRIX,), 72),
        (L.slogdet, (MATRIX,), 72),
        (L.inv, (MATRIX,), 216),
        (L.inv, (MATRIX.expand(5, N, N),), 5 * 216),
        (L.inv, (MATRIX.to(torch.complex64),), 4 * 216),
        (L.cholesky, (SPD,), 36),
        (torch.cholesky_inverse, (L.cholesky(SPD),), 72),
        (torch.cholesky_solve, (RIGHT, L.cholesky(SPD)), 36 * 2),
        (L.solve, (MATRIX, RIGHT), 72 + 36 * 2),
        (L.solve, (MATRIX.expand(3, N, N), RIGHT.expand(3, N, 2)), 3 * (72 + 36 * 2)),
        (L.lu_solve, (*L.lu_factor(MATRIX), RIGHT), 36 * 2),
        (lambda a, b: L.solve_triangular(a, b, upper=True), (MATRIX.triu(), RIGHT), 36),
        (lambda a: L.qr(a, mode="r"), (TALL,), 8 * 36 - 72),
        (L.qr, (TALL,), 2 * (8 * 36 - 72)),
        (torch.ops.aten._linalg_eigh, (SPD, "L", False), 144),
        (L.eigh, (SPD,), 972),
        (torch.ops.aten._linalg_eigvals, (MATRIX,), 1080),
        (L.eig, (MATRIX,), 2700),
        (torch.ops.aten._linalg_svd, (TALL, False, False), 2 * 8 * 36 - 144),
        (lambda a: L.svd(a, full_matrices=False), (TALL,), 7 * 8 * 36 + 4 * 216),
        (L.svd, (TALL,), 2 * 64 * 6 + 4 * 8 * 36 + 972),
        (torch.sparse.mm, (KEPT.to_sparse(), torch.ones(3, 5)), 3 * 5),
        (torch.sparse.addmm, (torch.ones(2, 5), KEPT.to_sparse(), torch.ones(3, 5)), 3 * 5),
        (torch.matmul, (KEPT.to_sparse_csr(), torch.ones(3, 5)), 3 * 5),
        (torch.matmul, (KEPT.to_sparse(), torch.ones(3)), 3),
        (torch.bmm, (KEPT[None].to_sparse(), torch.ones(1, 3, 5)), 3 * 5),
        (torch.sparse.sampled_addmm, (KEPT.to_sparse_csr(), torch.ones(2, 7), torch.ones(7, 3)), 3 * 7),
    ],
)  # fmt: skip
def test_multiply_accumulates(function: Any, given: tuple[Any, ...], macs: int) -> None:
    assert macs_of(function, *given) == macs


def test_bytes_and_operations_of_what_is_sparse_are_those_of_what_it_stores() -> None:
    found = profiled(Calls(torch.mul), KEPT.to_sparse(), 2.0).model.forward
    assert found.elementwise == 3
    assert found.read_bytes == 3 * 4 + 2 * 3 * 8, "values, and two indices of each"


def test_a_product_of_two_sparse_matrices_is_listed() -> None:
    profiler = FlopsProfiler(Calls(torch.matmul))
    profiler.start_profile()
    profiler.model(KEPT.to_sparse(), KEPT.T.to_sparse())
    profiler.stop_profile()
    assert profiler.not_counted == {"aten::mm": 1}


@pytest.mark.parametrize("stopped", [(0, 1), (1, 0)])
def test_profilers_stop_in_any_order(stopped: tuple[int, int]) -> None:
    """The one that goes on counts, the other one does not; and torch.compile is as it was."""
    import torch._dynamo.eval_frame

    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    profilers = [FlopsProfiler(model) for model in models]
    for profiler in profilers:
        profiler.start_profile()
    first, last = stopped
    profilers[first].stop_profile()
    for model in models:
        model(torch.ones(2, 4))
    profilers[last].stop_profile()
    for model in models:
        model(torch.ones(2, 4))
    assert profilers[first].macs == 0
    assert profilers[last].macs == 2 * 4 * 4
    assert torch._dynamo.eval_frame._stance.stance == "default"  # later models compile again
