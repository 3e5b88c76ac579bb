"""Attention over keys and values that are there, whose sums depend on what a query sees alone. The maths is in
``cached_attention.h``.
"""

from zoo.kernels.cached_attention.ops import cached_attention

__all__ = ["cached_attention"]
