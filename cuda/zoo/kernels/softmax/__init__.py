"""Softmax of attention with scale, additive mask and causality, and its gradient: ``softmax.h`` has the maths."""

from zoo.kernels.softmax.ops import softmax, softmax_backward

__all__ = ["softmax", "softmax_backward"]
