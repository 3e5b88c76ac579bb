"""Three values and two (XTC: Wu et al. 2022, "Extreme Compression for Pre-trained Transformers Made Simple and
Efficient", section 2), with scales that are means of magnitudes. w (G, n) groups in fp32.

Zeros, which masks leave, stay zero and count in no mean: whatever is written for them, they say nothing about the rest.
"""

from __future__ import annotations

from torch import Tensor

THRESHOLD = 0.7


def ternary(w: Tensor) -> tuple[Tensor, Tensor]:
    """v in {-a, 0, a}: v = a·sign(w) where |w| > d, else 0; d = 0.7·mean of |w| over w ≠ 0, a = that over |w| > d.

    0.7 is nearly the best threshold for weights that are normal or uniform (Li, Zhang, Liu 2016, "Ternary Weight
    Networks", section 2.2).

    Returns:
        v, (G, n), and the means of |w|, (G, 1).
    """
    scale, large, mean = ternary_scale(w)
    return w.sign() * large * scale, mean


def ternary_scale(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a, (G, 1), where |w| > d, (G, n), and the means of |w|, (G, 1): see :func:`ternary`."""
    size, mean = w.abs(), binary_scale(w)
    large = size > THRESHOLD * mean
    return (size * large).sum(1, keepdim=True) / large.sum(1, keepdim=True).clamp(min=1), large, mean


def binary(w: Tensor) -> tuple[Tensor, Tensor]:
    """v in {-a, a}: v = a·sign(w), 0 where w is 0; a = mean of |w| over w ≠ 0.

    a is the best scale for that in the least squares sense (Rastegari et al. 2016, "XNOR-Net", section 3.1).

    Returns:
        v, (G, n), and the scales, (G, 1).
    """
    scale = binary_scale(w)
    return w.sign() * scale, scale


def binary_scale(w: Tensor) -> Tensor:
    """a, (G, 1): see :func:`binary`."""
    return w.abs().sum(1, keepdim=True) / (w != 0).sum(1, keepdim=True).clamp(min=1)
