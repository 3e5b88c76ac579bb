"""Root mean square normalisation with the residual added in. The maths is in ``rms_norm.h``."""

from zoo.kernels.rms_norm.ops import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
