"""When ranks that train the same parameters bring together what: policies, as data.

A policy says of every step, counted from 1, what it synchronises (:class:`Sync`). It knows no optimizer and no ranks,
keeps nothing, and is the same on all ranks, so that whoever makes the gradients can ask before a backward.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Sync:
    """What one step brings together.

    Attributes:
        gradients: the gradient that it gets is the mean over ranks, in full precision; otherwise each rank's own.
        variance: the second moment is updated, from the mean gradient in full precision.
        momentum: ranks agree on a momentum, by compressed messages.
        parameters: ranks agree on the parameters, in full precision.
    """

    gradients: bool = False
    variance: bool = False
    momentum: bool = False
    parameters: bool = False


class SyncPolicy(Protocol):
    """What each step synchronises. The optimizer asks in its step, and whoever reduces gradients before a backward."""

    def at(self, step: int) -> Sync:
        """Of step ``step``, from 1."""


@dataclass(frozen=True, kw_only=True)
class AfterWarmUp:
    """``freeze_step`` steps with mean gradients; then the variance stays, and momentum is compressed.

    Tang et al. 2021, "1-bit Adam", algorithm 1, with T_w = ``freeze_step``; None for a warm-up that has no end yet.
    """

    freeze_step: int | None

    def at(self, step: int) -> Sync:
        """See :class:`SyncPolicy`."""
        warm = self.freeze_step is None or step <= self.freeze_step
        return Sync(gradients=True, variance=True) if warm else Sync(momentum=True)


@dataclass(frozen=True, kw_only=True)
class ZeroOneSchedule:
    """The steps T_v that update the variance and T_u after which ranks have one momentum, of 0/1 Adam.

    Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", sections 4 and 5:

        T_v: k_0 = 1,  k_(j+1) = k_j + 2^⌊j / κ⌋,  up to F
        T_u: every step up to F; then from a step t in T_u to t + min(2^⌊(t - F) / S⌋, H)

    Attributes:
        var_freeze_step: F. var_update_scaler: κ. local_step_scaler: S. local_step_clipper: H.
    """

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def at(self, step: int) -> Sync:
        """See :class:`SyncPolicy`."""
        if self._has_variance(step):
            return Sync(gradients=True, variance=True)
        return Sync(momentum=self.last_sync(step) == step)

    @cached_property
    def _variance_steps(self) -> list[int]:
        found, step = [], 1
        while step <= self.var_freeze_step:
            found.append(step)
            step += 2 ** ((len(found) - 1) // self.var_update_scaler)
        return found

    def _has_variance(self, step: int) -> bool:
        at = bisect_left(self._variance_steps, step)
        return at < len(self._variance_steps) and self._variance_steps[at] == step

    def num_variances(self, step: int) -> int:
        """How many steps up to and with ``step`` update the variance."""
        return bisect_left(self._variance_steps, step + 1)

    def last_sync(self, step: int) -> int:
        """The latest step of T_u that is not after ``step``; 0 before the first."""
        if step <= self.var_freeze_step:
            return step
        at, plateau = self.var_freeze_step, 0
        while True:
            interval = min(1 << plateau, self.local_step_clipper)
            end = self.var_freeze_step + (plateau + 1) * self.local_step_scaler  # the first step of the next plateau
            begun = max(-(-(end - at) // interval), 0)  # intervals that begin on this one
            if interval == self.local_step_clipper or step < at + begun * interval:
                return at + (step - at) // interval * interval
            at += begun * interval
            plateau += 1


@dataclass(frozen=True, kw_only=True)
class EverySteps:
    """Each rank steps by itself, and every ``interval`` steps they agree on the parameters.

    Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1; Douillard et al. 2023, "DiLoCo:
    Distributed Low-Communication Training of Language Models", algorithm 1.
    """

    interval: int

    def at(self, step: int) -> Sync:
        """See :class:`SyncPolicy`."""
        return Sync(parameters=step % self.interval == 0)
