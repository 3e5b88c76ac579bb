"""GELU of x + bias in one pass, and its gradient: ``bias_gelu.h`` has the maths."""

from zoo.kernels.bias_gelu.ops import bias_gelu, bias_gelu_backward

__all__ = ["bias_gelu", "bias_gelu_backward"]
