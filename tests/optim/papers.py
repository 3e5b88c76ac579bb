"""The algorithms of the papers in NumPy, float64, as they are printed: what the optimizers are held against.

Nothing of zoo is used here. Legend: ``grads`` (steps, ranks, n): gradient of each rank in each step; all ranks begin
with ``x`` (n,). Each function returns the parameters after every step, (steps, ranks, n). C(x) = sign(x)·mean|x| over
groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def signs(x: Array, group: int) -> Array:
    """sign(x)·mean |x| of each group; that of 0 is plus."""
    out = np.empty_like(x)
    for first in range(0, len(x), group):
        part = x[first : first + group]
        out[first : first + group] = np.where(part >= 0, 1.0, -1.0) * np.abs(part).mean()
    return out


@dataclass
class OnebitAllReduce:
    """1-bit Adam, algorithm 1, lines 6 to 12: worker i sends C[x_i + δ_i]; server j averages chunk j, compressed."""

    group: int
    chunks: list[slice]
    worker: dict[int, Array] = field(default_factory=dict)
    server: dict[int, Array] = field(default_factory=dict)

    def __call__(self, xs: Array) -> Array:
        seen = np.empty_like(xs)
        for i, x in enumerate(xs):
            c = x + self.worker.get(i, 0.0)
            for where in self.chunks:
                seen[i, where] = signs(c[where], self.group)
            self.worker[i] = c - seen[i]
        mean = np.empty(xs.shape[1])
        for j, where in enumerate(self.chunks):
            z = seen[:, where].mean(0) + self.server.get(j, 0.0)
            mean[where] = signs(z, self.group)
            self.server[j] = z - mean[where]
        return mean


def onebit_adam(
    x: Array, grads: Array, reduce: OnebitAllReduce, *, freeze_step: int, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float = 0.0, corrected: bool = False, eps_inside: bool = False,
) -> Array:  # fmt: skip
    """1-bit Adam, algorithm 1, with no momentum where there is no variance; ``corrected``: Adam's bias correction, of v
    at the step that froze it."""
    m, v, found = np.zeros_like(x), np.zeros_like(x), []
    for t, g in enumerate(grads, 1):
        if t <= freeze_step:
            m = beta1 * m + (1 - beta1) * g.mean(0)
            v = beta2 * v + (1 - beta2) * g.mean(0) ** 2
        else:
            m = reduce(np.where(v == 0, 0.0, np.stack([beta1 * m + (1 - beta1) * g_i for g_i in g])))
            m = np.where(v == 0, 0.0, m)
        m_hat = m / (1 - beta1**t) if corrected else m
        v_hat = v / (1 - beta2 ** min(t, freeze_step)) if corrected else v
        below = np.sqrt(v_hat + eps) if eps_inside else np.sqrt(v_hat) + eps
        x = x - lr * (m_hat / below + weight_decay * x)
        found.append(np.stack([x] * len(g)))
    return np.stack(found)


def steps_of_variance(last: int, kappa: int) -> list[int]:
    """T_v of 0/1 Adam: k_(j+1) = k_j + 2^⌊j/κ⌋."""
    found, k, j = [], 1, 0
    while k <= last:
        found.append(k)
        k, j = k + 2 ** math.floor(j / kappa), j + 1
    return found


def zero_one_adam(
    x: Array, grads: Array, reduce: OnebitAllReduce, *, last_variance: int, kappa: int, syncs: list[int], lr: Array,
    beta1: float, beta2: float, eps: float, weight_decay: float = 0.0,
) -> Array:  # fmt: skip
    """0/1 Adam, algorithm 1; v is updated before it divides, what is sent is divided by the sum of learning rates, and
    steps of T_v compress nothing: there all ranks have the mean gradient."""
    ranks, found = grads.shape[1], []
    m, v, u = np.zeros((ranks, len(x))), np.zeros_like(x), np.zeros((ranks, len(x)))
    local, anchor = np.stack([x] * ranks), x
    rates = 0.0
    for t, g in enumerate(grads, 1):
        exact = t in steps_of_variance(last_variance, kappa)
        if exact:
            g = np.stack([g.mean(0)] * ranks)
            v = beta2 * v + (1 - beta2) * g.mean(0) ** 2
        below = np.sqrt(v) + eps
        m = np.where(v == 0, 0.0, beta1 * m + (1 - beta1) * g)
        local = (1 - lr[t - 1] * weight_decay) * local - lr[t - 1] * m / below
        u, rates = u + lr[t - 1] * m, rates + lr[t - 1]
        anchor = (1 - lr[t - 1] * weight_decay) * anchor
        if t in syncs:
            sent = u / rates
            mean = np.where(v == 0, 0.0, sent[0] if exact else reduce(sent)) * rates
            m = np.stack([mean / rates] * ranks)
            anchor = anchor - mean / below
            local = np.stack([anchor] * ranks)
            u, rates = np.zeros_like(u), 0.0
        found.append(local)
    return np.stack(found)


def onebit_lamb(
    x: Array, grads: Array, reduce: OnebitAllReduce, tensors: list[slice], *, freeze_step: int, lr: float, beta1: float,
    beta2: float, beta3: float, eps: float, phi: tuple[float, float], factor: tuple[float, float, float],
) -> Array:  # fmt: skip
    """1-bit LAMB, algorithm 1, of several tensors; φ is clamped to ``phi``; ``factor``: r_min, r_max
    and the threshold."""
    m, v, w, found = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), []
    c, r = np.zeros(len(tensors)), np.ones(len(tensors))
    for t, g in enumerate(grads, 1):
        x = x.copy()
        if t <= freeze_step:
            m = beta1 * m + (1 - beta1) * g.mean(0)
            v = beta2 * v + (1 - beta2) * g.mean(0) ** 2
            w = v.copy()
        else:
            own = np.where(v == 0, 0.0, np.stack([beta1 * m + (1 - beta1) * g_i for g_i in g]))
            new = np.where(v == 0, 0.0, reduce(own))
            again = (new - beta1 * m) / (1 - beta1)
            m, w = new, beta2 * w + (1 - beta2) * again**2
        u = m / (np.sqrt(v) + eps)
        for i, where in enumerate(tensors):
            if t <= freeze_step:
                norms = np.linalg.norm(x[where]), np.linalg.norm(u[where])
                ratio = np.clip(norms[0] / norms[1], *phi) if min(norms) > 0 else 1.0
                c[i] = beta3 * c[i] + (1 - beta3) * ratio
            else:
                largest = ((np.sqrt(v[where]) + eps) / (np.sqrt(w[where]) + eps)).max()
                near = np.clip(np.clip(largest, factor[0], factor[1]), (1 - factor[2]) * r[i], (1 + factor[2]) * r[i])
                r[i], ratio = near, c[i] * near
            x[where] -= lr * ratio * u[where]
        found.append(np.stack([x] * len(g)))
    return np.stack(found)


def local_steps(
    x: Array, grads: Array, inner: Callable[[Array, Array, int], Array], *, every: int, outer_lr: float,
    momentum: float, nesterov: bool,
) -> Array:  # fmt: skip
    """DiLoCo, algorithm 1: ``inner(x, g, rank)`` is a step of one rank; Local SGD has outer_lr 1 and no momentum."""
    ranks, found = grads.shape[1], []
    local, shared, b = np.stack([x] * ranks), x, np.zeros_like(x)
    for t, g in enumerate(grads, 1):
        local = np.stack([inner(local[r], g[r], r) for r in range(ranks)])
        if t % every == 0:
            delta = (shared - local).mean(0)
            b = momentum * b + delta
            shared = shared - outer_lr * (delta + momentum * b if nesterov else b)
            local = np.stack([shared] * ranks)
        found.append(local)
    return np.stack(found)


class Adamw:
    """Loshchilov and Hutter 2019, algorithm 2, of each of several ranks."""

    def __init__(self, ranks: int, n: int, *, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> None:
        self.m, self.v, self.t = np.zeros((ranks, n)), np.zeros((ranks, n)), [0] * ranks
        self.lr, self.betas, self.eps, self.decay = lr, (beta1, beta2), eps, decay

    def __call__(self, x: Array, g: Array, rank: int) -> Array:
        beta1, beta2 = self.betas
        self.t[rank] += 1
        self.m[rank] = beta1 * self.m[rank] + (1 - beta1) * g
        self.v[rank] = beta2 * self.v[rank] + (1 - beta2) * g**2
        m, v = self.m[rank] / (1 - beta1 ** self.t[rank]), self.v[rank] / (1 - beta2 ** self.t[rank])
        return x - self.lr * (m / (np.sqrt(v) + self.eps) + self.decay * x)
