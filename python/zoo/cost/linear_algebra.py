"""Multiply-accumulates of dense factorizations and solves, from sizes alone: leading terms, square matrices of n.

Direct algorithms have the counts of LAPACK (Anderson et al. 1999, "LAPACK Users' Guide", 3rd edition, table 3.13, and
Blackford and Dongarra 1999, LAPACK Working Note 41, appendix C), of which the FLOPs here are 2 · macs. Eigenvalues and
singular values are found by iterations, whose number the values decide: these counts are the estimates of Golub and
Van Loan 1996, "Matrix Computations", 3rd edition, sections 5.4.5, 7.5.6 and 8.3.5. Real numbers; of complex ones each
product is four.
"""

from __future__ import annotations

__all__ = [
    "cholesky",
    "cholesky_inverse",
    "eigenvalues",
    "inverse",
    "lu",
    "orthogonal",
    "qr",
    "singular_values",
    "solve_triangular",
    "symmetric_eigenvalues",
]


def lu(m: int, n: int) -> int:
    """P·L·U of an (m, n): with l = max(m, n) and s = min(m, n), s²·(l - s / 3) / 2; of a square n³ / 3."""
    long, short = max(m, n), min(m, n)
    return (3 * long * short**2 - short**3) // 6


def cholesky(n: int) -> int:
    """L·Lᵀ: n³ / 6."""
    return n**3 // 6


def cholesky_inverse(n: int) -> int:
    """Of a matrix whose factor is known: n³ / 3."""
    return n**3 // 3


def inverse(n: int) -> int:
    """By LU: n³, a third of it for the factors."""
    return n**3


def solve_triangular(n: int, columns: int) -> int:
    """One triangular matrix, r right-hand sides: n²·r / 2. Both factors of LU or Cholesky are twice that."""
    return n * n * columns // 2


def qr(m: int, n: int) -> int:
    """R and Householder vectors of an (m, n), l = max(m, n) and s = min(m, n): s²·(l - s / 3)."""
    long, short = max(m, n), min(m, n)
    return long * short**2 - short**3 // 3


def orthogonal(m: int, n: int, k: int) -> int:
    """The (m, n) matrix Q from k Householder vectors: 2·m·n·k - (m + n)·k² + 2·k³ / 3."""
    return 2 * m * n * k - (m + n) * k * k + 2 * k**3 // 3


def symmetric_eigenvalues(n: int, *, vectors: bool) -> int:
    """2·n³ / 3, with vectors 9·n³ / 2."""
    return 9 * n**3 // 2 if vectors else 2 * n**3 // 3


def eigenvalues(n: int, *, vectors: bool) -> int:
    """5·n³, with vectors 25·n³ / 2."""
    return 25 * n**3 // 2 if vectors else 5 * n**3


def singular_values(m: int, n: int, *, vectors: bool, full: bool = False) -> int:
    """Of an (m, n), l = max(m, n) and s = min(m, n), by Golub and Reinsch: 2·l·s² - 2·s³ / 3; with s left and right
    vectors 7·l·s² + 4·s³; with all l of the longer side (``full``) 2·l²·s + 4·l·s² + 9·s³ / 2."""
    long, short = max(m, n), min(m, n)
    if not vectors:
        return 2 * long * short**2 - 2 * short**3 // 3
    if full:
        return 2 * long**2 * short + 4 * long * short**2 + 9 * short**3 // 2
    return 7 * long * short**2 + 4 * short**3
