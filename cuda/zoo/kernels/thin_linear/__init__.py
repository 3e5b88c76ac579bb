"""A linear layer whose sums depend on nothing else in the batch, made for few tokens. The maths is in
``thin_linear.h``.
"""

from zoo.kernels.thin_linear.ops import linear, thin_linear, thin_linears

__all__ = ["linear", "thin_linear", "thin_linears"]
