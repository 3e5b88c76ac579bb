"""residual + dropout(x + bias) in one pass, and its gradient: ``bias_dropout_residual.h`` has the maths."""

from zoo.kernels.bias_dropout_residual.ops import bias_dropout_residual, bias_dropout_residual_backward

__all__ = ["bias_dropout_residual", "bias_dropout_residual_backward"]
