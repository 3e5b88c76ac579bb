"""Three values and two (XTC: Wu et al. 2022, "Extreme Compression for Pre-trained Transformers Made Simple and
Efficient", section 2), with scales that are means of magnitudes. w (G, n) groups in fp32."""

from __future__ import annotations

from torch import Tensor

THRESHOLD = 0.7


def ternary(w: Tensor) -> tuple[Tensor, Tensor]:
    """v in {-a, 0, a}: v = a·sign(w) where |w| > d, else 0; d = 0.7·mean|w|, a = mean of |w| over |w| > d.

    0.7 is nearly the best threshold for weights that are normal or uniform (Li, Zhang, Liu 2016, "Ternary Weight
    Networks", section 2.2).

    Returns:
        v, (G, n), and the means of |w|, (G, 1).
    """
    scale, large, mean = ternary_scale(w)
    return w.sign() * large * scale, mean


def ternary_scale(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a, (G, 1), where |w| > d, (G, n), and the means of |w|, (G, 1): see :func:`ternary`."""
    size = w.abs()
    mean = size.mean(1, keepdim=True)
    large = size > THRESHOLD * mean
    return (size * large).sum(1, keepdim=True) / large.sum(1, keepdim=True).clamp(min=1), large, mean


def binary(w: Tensor) -> tuple[Tensor, Tensor]:
    """v in {-a, a}: v = a where w >= 0, else -a; a = mean|w|.

    a is the best scale for v = a·sign(w) in the least squares sense (Rastegari et al. 2016, "XNOR-Net", section 3.1).

    Returns:
        v, (G, n), and the scales, (G, 1).
    """
    scale = binary_scale(w)
    return (w >= 0).to(w.dtype).mul(2).sub(1) * scale, scale


def binary_scale(w: Tensor) -> Tensor:
    """a, (G, 1): see :func:`binary`."""
    return w.abs().mean(1, keepdim=True)
