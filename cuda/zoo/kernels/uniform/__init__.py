"""Random numbers as a function of their place. The maths is in ``uniform.h``."""

from zoo.kernels.uniform.ops import uniform

__all__ = ["uniform"]
