"""Layer normalisation, with the residual added in, and its gradient: ``layer_norm.h`` has the maths.

Bytes moved for each element in bf16: forward 4 (read x, write y), with a residual 8; backward 6 (read dy, s; write dx).
"""

from zoo.kernels.layer_norm.ops import LayerNorm, layer_norm, layer_norm_backward

__all__ = ["LayerNorm", "layer_norm", "layer_norm_backward"]
