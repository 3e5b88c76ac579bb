"""Losses by which a student learns from its teacher. Symbols: T temperature; teachers get no gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def logits_loss(student: Tensor, teacher: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """L = T²·mean Σ_c p_c·log(p_c/q_c), p = softmax(teacher/T), q = softmax(student/T), the mean over all but classes.

    T² keeps the size of the gradient (Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network",
    section 2). A class to which the teacher gives p = 0, such as one that both rule out by -infinity, adds 0. In fp32,
    of fp64 in fp64.

    Args:
        student, teacher: (..., C).
        mask: (...), what counts: not 0. The mean is over these; 0 where there are none.

    Raises:
        ValueError: shapes that differ, or a temperature that is not above 0.
    """
    _same("logits", student, teacher)
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}; it is above 0, and 1 leaves probabilities as they are.")
    student, teacher = _kept(_wide(student), mask), _kept(_wide(teacher.detach()), mask)
    log_q = F.log_softmax(student / temperature, dim=-1)
    log_p = F.log_softmax(teacher / temperature, dim=-1)
    p = log_p.exp()
    each = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1)
    return _mean(each, mask) * temperature**2


def hidden_loss(
    student: Sequence[Tensor], teacher: Sequence[Tensor], layers: Mapping[int, int], *, mask: Tensor | None = None
) -> Tensor:
    """L = Σ_(i, j) mean (s_i - t_j)², over pairs of layers.

    Jiao et al. 2020, "TinyBERT", section 3.1, with the identity in the place of a learned projection.

    Args:
        student, teacher: hidden states of all layers, (B, T, D) each.
        layers: layer of the student → layer of the teacher.
        mask: (B, T), what counts: not 0.

    Raises:
        ValueError: layers that are not there, or of another shape.
    """

    def one(s: Tensor, t: Tensor) -> Tensor:
        return _mean((_kept(s, mask) - _kept(t, mask)).square().mean(-1), mask)

    return _pairs("hidden states", student, teacher, layers, one)


def attention_loss(
    student: Sequence[Tensor], teacher: Sequence[Tensor], layers: Mapping[int, int], *, mask: Tensor | None = None
) -> Tensor:
    """L = Σ_(i, j) mean (A_i - B_j)², over pairs of layers: of attention scores or probabilities.

    Scores of pairs that are masked out (-infinity, or below -100) count as 0 on both sides, as in TinyBERT's training.

    Args:
        student, teacher: attention of all layers, (B, H, T, T) each.
        layers: layer of the student → layer of the teacher.
        mask: (B, T), rows that count: not 0.

    Raises:
        ValueError: layers that are not there, or of another shape.
    """

    def one(s: Tensor, t: Tensor) -> Tensor:
        s, t = (torch.where(a < -100.0, 0.0, a) for a in (s, t))
        rows = _kept(s.transpose(1, 2), mask) - _kept(t.transpose(1, 2), mask)
        return _mean(rows.square().flatten(2).mean(-1), mask)

    return _pairs("attention", student, teacher, layers, one)


def _pairs(
    what: str, student: Sequence[Tensor], teacher: Sequence[Tensor], layers: Mapping[int, int],
    one: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    if not layers:
        raise ValueError(f"{what}: layers is empty; give pairs of layers, {{student: teacher}}.")
    found: list[Tensor] = []
    for i, j in layers.items():
        for who, number, there in (("student", i, student), ("teacher", j, teacher)):
            if not 0 <= number < len(there):
                raise ValueError(
                    f"{what}: layers has {number} for the {who}, which gives {len(there)}: 0 to {len(there) - 1}."
                )
        _same(f"{what} of layers {i} and {j}", student[i], teacher[j])
        found.append(one(_wide(student[i]), _wide(teacher[j].detach())))
    return torch.stack(found).sum()


def _same(what: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ValueError(
            f"{what}: the student has {tuple(student.shape)}, the teacher {tuple(teacher.shape)}; they are compared "
            "element by element. Give a teacher of the same width and vocabulary, and the same batch."
        )


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype is torch.float64 else value.float()


def _kept(value: Tensor, mask: Tensor | None) -> Tensor:
    """0 where the mask is: what is there may be a NaN, also in gradients."""
    if mask is None:
        return value
    if mask.shape != value.shape[: mask.dim()]:
        raise ValueError(f"mask has the shape {tuple(mask.shape)}; it is {tuple(value.shape[: mask.dim()])} here.")
    wide = (mask != 0).reshape(*mask.shape, *[1] * (value.dim() - mask.dim()))
    return torch.where(wide, value, 0.0)


def _mean(each: Tensor, mask: Tensor | None) -> Tensor:
    """Of what counts; the rest is 0."""
    if mask is None:
        return each.mean()
    return each.sum() / (mask != 0).sum().clamp(min=1)
