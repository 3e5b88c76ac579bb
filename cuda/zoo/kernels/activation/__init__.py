"""The activation of a perceptron, gated or not, into memory that is there: ``activation.h`` has the maths."""

from zoo.kernels.activation.ops import FORMS, activate_, activate_backward_

__all__ = ["FORMS", "activate_", "activate_backward_"]
