"""Parameters that have a gradient in some steps only, with the optimizers that synchronise.

The law: a step in which a parameter has no gradient leaves it and its states alone, and does not count for it. A step
by which ranks agree brings in what has moved since they last did, gradient or not. When that is, the number of calls
says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoo.optim import DiLoCo, LocalSGD, OnebitAdam, OnebitLamb, ZeroOneAdam
from zoo.optim.sync_policy import ZeroOneSchedule

Array = npt.NDArray[np.float64]
Gradients = Sequence[Array | None]
STEPS, LR, DECAY, BETA1, BETA2, EPS = 14, 0.05, 0.1, 0.9, 0.99, 1e-6
ADAM: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "betas": (BETA1, BETA2), "eps": EPS}
ROUNDS = {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4}
FROZEN, EVERY = 4, 4


# The law, parameter by parameter, in float64 --------------------------------------------------------------------------


class Moments:
    """m and v of one parameter, and how many steps and updates of v it has made."""

    def __init__(self, n: int) -> None:
        self.m, self.v, self.steps, self.variances = np.zeros(n), np.zeros(n), 0, 0

    def take(self, g: Array, *, variance: bool) -> None:
        self.steps += 1
        if variance:
            self.variances += 1
            self.v = BETA2 * self.v + (1 - BETA2) * g**2
        self.m = np.where(self.v == 0, 0.0, BETA1 * self.m + (1 - BETA1) * g)

    def along(self, m: Array) -> Array:
        return m / (np.sqrt(self.v / (1 - BETA2 ** max(self.variances, 1))) + EPS)

    @property
    def direction(self) -> Array:
        return self.along(self.m / (1 - BETA1**self.steps))


def zero_one(x: Array, grads: Gradients) -> Iterator[Array]:
    schedule, of = ZeroOneSchedule(**ROUNDS), Moments(len(x))
    anchor, u, rate, kept, alone = x, np.zeros_like(x), 0.0, 1.0, False
    for t, g in enumerate(grads, 1):
        now = schedule.at(t)
        local = alone or not (now.variance or now.momentum)
        if g is not None:
            of.take(g, variance=now.variance)
            if local:
                anchor = anchor if rate else x
                gamma = LR / (1 - BETA1**of.steps)
                u, rate, kept = u + gamma * of.m, rate + gamma, kept * (1 - LR * DECAY)
            x = x * (1 - LR * DECAY) - LR * of.direction
        if now.momentum and rate:
            of.m, x = u / rate, anchor * kept - of.along(u)
            u, rate, kept = np.zeros_like(x), 0.0, 1.0
        alone = not (now.variance or now.momentum)
        yield x


def onebit(x: Array, grads: Gradients) -> Iterator[Array]:
    of = Moments(len(x))
    for t, g in enumerate(grads, 1):
        if g is not None:
            of.take(g, variance=t <= FROZEN)
            x = x * (1 - LR * DECAY) - LR * of.direction
        yield x


def lamb(x: Array, grads: Gradients) -> Iterator[Array]:
    of, c, w, rho, begun = Moments(len(x)), 0.0, np.zeros_like(x), 1.0, False
    for t, g in enumerate(grads, 1):
        if g is None:
            yield x
            continue
        of.take(g, variance=t <= FROZEN)
        d = of.direction + DECAY * x
        if t <= FROZEN:
            phi = float(np.clip(np.linalg.norm(x) / np.linalg.norm(d), 0.01, 10.0))
            c, x = 0.5 * c + 0.5 * phi, x - LR * phi * d
        else:
            w, begun = w if begun else of.v, True
            w = np.where(of.v == 0, 0.0, BETA2 * w + (1 - BETA2) * g**2)
            largest = float(((np.sqrt(of.v) + EPS) / (np.sqrt(w) + EPS)).max())
            rho = float(np.clip(np.clip(largest, 0.5, 4.0), 0.9 * rho, 1.1 * rho))
            x = x - LR * c * rho * d
        yield x


def outer(x: Array, grads: Gradients, *, adam: bool) -> Iterator[Array]:
    of, anchor, b = Moments(len(x)), x, np.zeros_like(x)
    for t, g in enumerate(grads, 1):
        if g is not None:
            of.take(g, variance=True)
            x = x * (1 - LR * DECAY) - LR * (of.direction if adam else g)
        if t % EVERY == 0 and (g is not None or (x != anchor).any()):
            delta = anchor - x
            b = 0.9 * b + delta
            x = anchor = anchor - 0.7 * (delta + 0.9 * b)
        yield x


OUTER: dict[str, Any] = {"sync_every": EVERY, "outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Iterator[Array]]]] = {
    "ZeroOneAdam": (lambda params: ZeroOneAdam(params, **ADAM, **ROUNDS), zero_one),
    "OnebitAdam": (lambda params: OnebitAdam(params, **ADAM, freeze_step=FROZEN), onebit),
    "OnebitLamb": (lambda params: OnebitLamb(params, **ADAM, freeze_step=FROZEN, coeff_beta=0.5), lamb),
    "DiLoCo": (lambda params: DiLoCo(params, **ADAM, **OUTER), lambda x, grads: outer(x, grads, adam=True)),
    "LocalSGD": (
        lambda params: LocalSGD(params, lr=LR, weight_decay=DECAY, **OUTER),
        lambda x, grads: outer(x, grads, adam=False),
    ),
}


# What the optimizers do -----------------------------------------------------------------------------------------------


def beginnings(number: int) -> list[Array]:
    return [np.linspace(1.0, 2.0, 3) + i for i in range(number)]


def drawn(has: Sequence[Sequence[bool]]) -> list[list[Array | None]]:
    """By parameter the gradients of all steps: other ones in each, where ``has`` says so."""
    found: list[list[Array | None]] = []
    for i, row in enumerate(has):
        rng = np.random.default_rng(i)
        every = [rng.choice([-1.0, 1.0], 3) * rng.uniform(0.5, 2.0, 3) for _ in row]
        found.append([g if there else None for g, there in zip(every, row, strict=True)])
    return found


def train(make: Callable[..., Any], x: Sequence[Array], grads: Sequence[Gradients], *, saved: int = -1) -> torch.Tensor:
    """(steps, parameters, 3) values after each step; before step ``saved`` another optimizer takes the state over."""
    params = [torch.nn.Parameter(torch.tensor(value, dtype=torch.float32)) for value in x]
    optimizer, found = make(params), []
    for t in range(len(grads[0])):
        if t == saved:
            state = optimizer.state_dict()
            optimizer = make(params)
            optimizer.load_state_dict(state)
        for p, of in zip(params, grads, strict=True):
            g = of[t]
            p.grad = None if g is None else torch.tensor(g, dtype=torch.float32)
        optimizer.step()
        found.append(torch.stack([p.detach().clone() for p in params]))
    return torch.stack(found)


patterns = st.lists(st.lists(st.booleans(), min_size=STEPS, max_size=STEPS), min_size=2, max_size=3)


@pytest.mark.parametrize("kind", KINDS)
@given(has=patterns, saved=st.integers(0, STEPS - 1))
def test_each_parameter_goes_as_if_it_were_alone_and_by_the_law(kind: str, has: list[list[bool]], saved: int) -> None:
    make, law = KINDS[kind]
    x, grads = beginnings(len(has)), drawn(has)
    together = train(make, x, grads)
    assert torch.equal(train(make, x, grads, saved=saved), together)
    for i, of in enumerate(grads):
        assert torch.equal(train(make, x[i : i + 1], [of])[:, 0], together[:, i])
        want = torch.tensor(np.stack(list(law(x[i], of))), dtype=torch.float32)
        torch.testing.assert_close(together[:, i], want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["ZeroOneAdam", "OnebitAdam"])
def test_who_is_trained_from_a_frozen_step_on_stays_what_it_was_and_is_told(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, _ = KINDS[kind]
    has = [[True] * STEPS, [t > 7 for t in range(STEPS)]]
    with caplog.at_level("WARNING", logger="zoo.optim"):
        found = train(lambda params: make([{"params": params, "weight_decay": 0.0}]), beginnings(2), drawn(has))
    assert torch.equal(found[-1, 1], torch.tensor(beginnings(2)[1], dtype=torch.float32))
    assert [r.getMessage()[:32] for r in caplog.records] == ["3 of 3 elements had no gradient "]
