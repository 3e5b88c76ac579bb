"""Norm, scaling and the check for infinities and NaNs in one pass: x ← σ·x, S = Σx². The maths is in ``norm.h``."""

from zoo.kernels.norm.ops import grad_norm, scale_sum_squares_, sum_squares

__all__ = ["grad_norm", "scale_sum_squares_", "sum_squares"]
