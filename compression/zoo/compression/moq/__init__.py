"""MoQ: bits that fall layer after layer, later where the loss is curved (``quantize_training`` of a configuration)."""

from zoo.compression.moq.curvature import eigenvalues, power_iteration
from zoo.compression.moq.guide import Guide
from zoo.compression.moq.periods import factors_of

__all__ = ["Guide", "eigenvalues", "factors_of", "power_iteration"]
