"""Formulas of torch.linalg (:mod:`zoo.cost.linear_algebra`), of batches of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable

from zoo.cost import linear_algebra as counts
from zoo.cost.operators import COMPLEX, Work
from zoo.profiling.formulas.call import Call, Counted, Formula

__all__ = ["LINEAR_ALGEBRA"]


def _of(matrix: str, macs: Callable[[Call, int, int], int]) -> Formula:
    """``macs`` of one of the matrices (m, n) that an argument holds, once for each of the batch."""

    def formula(call: Call) -> Counted:
        *batch, m, n = call.shape(matrix)
        work = Work(macs=math.prod(batch) * macs(call, m, n))
        return COMPLEX * work if call[matrix].is_complex() else work

    return formula


def _solve(matrix: str, macs: Callable[[int, int], int]) -> Formula:
    """``macs`` of a matrix of n and r right-hand sides; batches of both are broadcast together."""

    def formula(call: Call) -> Counted:
        n = call.shape(matrix)[-1]
        columns = next(call.outputs).numel() // n if n else 0
        work = Work(macs=macs(n, columns))
        return COMPLEX * work if call[matrix].is_complex() else work

    return formula


def _substituted(n: int, columns: int) -> int:
    """Both triangular factors."""
    return 2 * counts.solve_triangular(n, columns)


def _solve_ex(call: Call) -> Counted:
    """Factors of each matrix of A; the columns of all right-hand sides."""
    *batch, n, _ = call.shape("A")
    columns = next(call.outputs).numel() // n if n else 0
    work = Work(macs=math.prod(batch) * counts.lu(n, n) + _substituted(n, columns))
    return COMPLEX * work if call["A"].is_complex() else work


def _qr(call: Call, m: int, n: int) -> int:
    factors, k = counts.qr(m, n), min(m, n)
    if call["mode"] == "r":
        return factors
    return factors + counts.orthogonal(m, m if call["mode"] == "complete" else k, k)


def _svd(call: Call, m: int, n: int) -> int:
    return counts.singular_values(m, n, vectors=bool(call["compute_uv"]), full=bool(call["full_matrices"]))


LINEAR_ALGEBRA: dict[str, Formula] = {
    **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex"), _of("A", lambda call, m, n: counts.lu(m, n))),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet"), _of("A", lambda call, m, n: counts.lu(m, n))),
    "linalg_inv_ex": _of("A", lambda call, m, n: counts.inverse(n)),
    "linalg_cholesky_ex": _of("self", lambda call, m, n: counts.cholesky(n)),
    "cholesky": _of("self", lambda call, m, n: counts.cholesky(n)),
    "cholesky_inverse": _of("self", lambda call, m, n: counts.cholesky_inverse(n)),
    "cholesky_solve": _solve("input2", _substituted),
    "linalg_lu_solve": _solve("LU", _substituted),
    "linalg_solve_triangular": _solve("self", counts.solve_triangular),
    "triangular_solve": _solve("A", counts.solve_triangular),
    "_linalg_solve_ex": _solve_ex,
    "geqrf": _of("self", lambda call, m, n: counts.qr(m, n)),
    "linalg_qr": _of("A", _qr),
    "linalg_householder_product": _of("input", lambda call, m, n: counts.orthogonal(m, n, call.shape("tau")[-1])),
    "_linalg_eigh": _of("A", lambda call, m, n: counts.symmetric_eigenvalues(n, vectors=bool(call["compute_v"]))),
    "linalg_eig": _of("self", lambda call, m, n: counts.eigenvalues(n, vectors=True)),
    "_linalg_eigvals": _of("self", lambda call, m, n: counts.eigenvalues(n, vectors=False)),
    "_linalg_svd": _of("A", _svd),
}
"""Of operators of ``aten``."""
