"""A linear layer whose sums depend on nothing else in the batch, made for few tokens. The maths is in
``thin_linear.h``.
"""

from zoo.kernels.thin_linear.ops import FEW, linear, thin_linear, thin_linears

__all__ = ["FEW", "linear", "thin_linear", "thin_linears"]
