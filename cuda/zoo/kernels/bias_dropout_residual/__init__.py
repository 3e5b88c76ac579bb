"""residual + dropout(x + bias) in one pass, its gradient, dropout alone: ``bias_dropout_residual.h`` has the maths."""

from zoo.kernels.bias_dropout_residual.ops import bias_dropout_residual, bias_dropout_residual_backward, dropout

__all__ = ["bias_dropout_residual", "bias_dropout_residual_backward", "dropout"]
