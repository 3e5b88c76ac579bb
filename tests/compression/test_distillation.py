"""Losses of distillation against their formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoo.compression import attention_loss, hidden_loss, logits_loss


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def pair(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=dice), torch.randn(shape, generator=dice)


def mask_of(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


@given(seed=st.integers(0, 99), temperature=st.sampled_from([0.5, 1.0, 4.0]), masked=st.booleans())
def test_logits(seed: int, temperature: float, masked: bool) -> None:
    student, teacher = pair(2, 3, 5, seed=seed)
    mask = mask_of(2, 3, seed=seed) if masked else None
    p, q = (softmax(x.double().numpy() / temperature) for x in (teacher, student))
    each = (p * np.log(p / q)).sum(-1)
    count = mask.numpy() if mask is not None else np.ones((2, 3), dtype=bool)
    wanted = temperature**2 * (each[count].mean() if count.any() else 0.0)
    found = logits_loss(student, teacher, temperature=temperature, mask=mask)
    assert float(found) == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@given(seed=st.integers(0, 99), masked=st.booleans())
def test_hidden_states_and_attention_of_pairs_of_layers(seed: int, masked: bool) -> None:
    mask = mask_of(2, 3, seed=seed) if masked else None
    count = mask.numpy() if mask is not None else np.ones((2, 3), dtype=bool)
    student, teacher = pair(2, 2, 3, 4, seed=seed)[0], pair(5, 2, 3, 4, seed=seed)[1]
    layers = {0: 1, 1: 4}
    each = sum(((student[i] - teacher[j]).double().numpy() ** 2).mean(-1) for i, j in layers.items())
    found = hidden_loss(list(student), list(teacher), layers, mask=mask)
    assert float(found) == pytest.approx(each[count].mean() if count.any() else 0.0, rel=1e-4, abs=1e-7)
    ours, theirs = pair(2, 2, 4, 3, 3, seed=seed)
    ours[..., 2], theirs[..., 2] = -torch.inf, torch.finfo(torch.float32).min
    a, b = (np.where(x.numpy() < -100, 0.0, x.double().numpy()) for x in (ours, theirs))
    each = sum(((a[i] - b[i]) ** 2).mean(-1).mean(1) for i in range(2))
    found = attention_loss(list(ours), list(theirs), {0: 0, 1: 1}, mask=mask)
    assert float(found) == pytest.approx(each[count].mean() if count.any() else 0.0, rel=1e-4, abs=1e-7)


def test_only_the_student_learns_and_it_learns_the_teachers_answers() -> None:
    student, teacher = pair(4, 6, seed=0)
    student.requires_grad_()
    teacher.requires_grad_()
    optimizer = torch.optim.Adam([student], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        logits_loss(student, teacher, temperature=2.0).backward()
        optimizer.step()
    assert teacher.grad is None
    torch.testing.assert_close(student.softmax(-1), teacher.softmax(-1), rtol=0, atol=1e-2)
    assert float(logits_loss(teacher, teacher).detach()) == pytest.approx(0.0, abs=1e-7)


def test_what_is_masked_out_may_be_anything() -> None:
    student, teacher = pair(2, 3, seed=0)
    teacher[1] = torch.nan
    mask = torch.tensor([1, 0])
    student.requires_grad_()
    loss = hidden_loss([student[None]], [teacher[None]], {0: 0}, mask=mask[None])
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()


def test_classes_that_both_rule_out_add_nothing() -> None:
    student, teacher = pair(4, 6, seed=1)
    out = torch.tensor([False, False, False, True, False, True])  # a vocabulary that is padded
    student.requires_grad_()
    loss = logits_loss(student.masked_fill(out, -torch.inf), teacher.masked_fill(out, -torch.inf), temperature=2.0)
    (grad,) = torch.autograd.grad(loss, student)
    fewer = logits_loss(student[:, ~out], teacher[:, ~out], temperature=2.0)
    torch.testing.assert_close(loss, fewer)
    torch.testing.assert_close(grad, torch.autograd.grad(fewer, student)[0])
    assert torch.isinf(logits_loss(student.masked_fill(out, -torch.inf), teacher))  # the teacher asks for them
    assert torch.isnan(logits_loss(student, torch.full_like(teacher, torch.nan)))


def test_what_is_in_fp64_stays_in_fp64() -> None:
    student, teacher = (x.double() for x in pair(3, 4, seed=2))
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logits_loss(x, teacher), student)
    assert torch.autograd.gradcheck(lambda x: hidden_loss([x], [teacher], {0: 0}), student)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"logits: the student has \(2, 3, 4\), the teacher \(2, 3, 5\)"):
        logits_loss(x, torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="temperature = 0"):
        logits_loss(x, x, temperature=0)
    with pytest.raises(ValueError, match="hidden states: layers has 2 for the teacher, which gives 2: 0 to 1"):
        hidden_loss([x, x], [x, x], {0: 2})
    with pytest.raises(ValueError, match="attention: layers is empty"):
        attention_loss([x], [x], {})
    with pytest.raises(ValueError, match=r"mask has the shape \(3, 2\); it is \(2, 3\) here"):
        hidden_loss([x], [x], {0: 0}, mask=torch.ones(3, 2))
