"""What a step multiplies the gradients by: clipping, and what becomes of gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch

from zoo.comm import Communicator
from zoo.shard.gradients import BucketGradients
from zoo.zero.update.gradient_scale import Factors
from zoo.zero.update.loss_scaler import LossScaler
from zoo.zero.update.norms import Tally, are_wide, global_norm
from zoo.zero.update.outcome import Outcome

Nonfinite = Literal["skip", "error", "use"]
EPSILON = 1e-6
"""Added to a norm before it divides, as torch does."""


class NonFiniteGradientsError(FloatingPointError, RuntimeError):
    """The norm of the gradients is infinite or NaN, and nothing was changed."""


class Clipping:
    """The global norm ‖g‖_p of the mean gradient g, and g ← g · min(c / (‖g‖_p + 1e-6), 1) (Pascanu et al. 2013, "On
    the difficulty of training recurrent neural networks", section 3.2).

    A step measures (:meth:`measure`), updates with :meth:`factors` or :meth:`factors_on_device`, and learns what it
    came to (:meth:`learn`): before its update, or, where that takes ``found_inf`` on the device, at any time after it.

    Args:
        max_norm: c of every step, with p = 2; 0 for none, infinity to know the norm and change nothing.
        scaler: the gradients are so many times too large.
        nonfinite: what a step does whose norm is not finite: changes nothing, raises, or goes on.

    Attributes:
        norm: of the latest step or :meth:`clip`, None before.
        skipped: the latest step was.
        num_skipped: how many were.
        sums: what its tally came to.
        refuses: is shown what was read, before anything follows from it.
    """

    def __init__(self, max_norm: float, scaler: LossScaler | None, nonfinite: Nonfinite) -> None:
        number: Any = max_norm
        if not isinstance(number, Real) or not max_norm >= 0:
            raise ValueError(
                f"clip_norm={max_norm!r}; it must be a norm > 0 (math.inf only measures), or 0 for no clipping."
            )
        if nonfinite not in get_args(Nonfinite):
            raise ValueError(f"nonfinite_gradients={nonfinite!r}; allowed are 'skip', 'error' and 'use'.")
        if nonfinite == "use" and scaler is not None:
            raise ValueError(
                "nonfinite_gradients='use' with a loss scale, which is found by steps that overflow and are skipped: "
                "leave one of the two out."
            )
        self.max_norm, self._scaler, self._nonfinite = max_norm, scaler, nonfinite
        self.norm: float | None = None
        self.skipped, self.num_skipped = False, 0
        self.sums: list[float] = []
        self.refuses: Callable[[Outcome], None] | None = None
        self.clipped = 1.0  # what clip() has multiplied by since gradients were dropped
        self._suspect = False  # clip() saw a norm that is not finite
        self._behind = 1.0  # what the gradients have to be multiplied by to have the scale of the next backward
        self._gradients: Sequence[BucketGradients] = ()
        self._layers: Communicator | None = None
        self._wide = False

    @property
    def measures(self) -> bool:
        """Every step computes the norm."""
        return bool(self.max_norm) or self._scaler is not None

    @property
    def may_skip(self) -> bool:
        """The next step computes the norm, and changes nothing where that is not finite."""
        return self.measures or self._suspect

    @property
    def raises(self) -> bool:
        """A norm that is not finite is an error of the step."""
        return self._nonfinite == "error"

    def adopt(self, gradients: Sequence[BucketGradients], layers: Communicator | None) -> None:
        """Of which gradients; ``layers``: the ranks that have other layers of the model. Collective over these."""
        self._gradients, self._layers = gradients, layers
        self._wide = are_wide(gradients, layers)

    @property
    def _scale(self) -> float:
        return self._scaler.scale if self._scaler is not None else 1.0

    @property
    def unscale(self) -> float:
        """What takes the loss scale off gradients that have it now."""
        return 1.0 / self._scale

    def measure(self, norm_type: float = 2.0, tally: Tally | None = None) -> torch.Tensor:
        """‖g‖_p without the loss scale, () fp64 on the device; ``tally`` travels with it. Collective."""
        norm, scale = global_norm(self._gradients, self._layers, norm_type, tally, wide=self._wide), self._scale
        # By a tensor: a GPU multiplies by the inverse of a number, which is rounded.
        return norm if scale == 1.0 else norm / torch.full_like(norm, scale)

    def travel(self, tally: Tally) -> None:
        """Send a tally where a step measures, and this rank has no gradients. Collective, as :meth:`measure` is."""
        global_norm(self._gradients, self._layers, 2.0, tally, wide=self._wide, absent=True)

    def measured(self, norm_type: float = 2.0) -> float:
        """The same as a number, which is ``norm`` then. Collective."""
        self.norm = float(self.measure(norm_type))
        return self.norm

    def begin(self) -> None:
        """A step begins."""
        self.skipped, self.sums = False, []

    def learn(self, outcome: Outcome) -> bool:
        """What a step came to: the loss scale moves, and a step is counted that was skipped. Whether it was not.

        Raises:
            NonFiniteGradientsError: the norm is not finite, and steps are not to be skipped.
            Exception: whatever ``refuses`` raises.
        """
        norm, sums = outcome.read()
        if self.refuses is not None:
            self.refuses(outcome)
        self.sums = sums
        if norm is None:
            return True
        self.norm, self._suspect = norm, False
        finite = math.isfinite(norm)
        if self._scaler is not None:
            before = self._scaler.scale
            self._scaler.update(overflow=not finite)
            self._behind *= self._scaler.scale / before
        if finite or self._nonfinite == "use":
            return True
        self.rescale()
        if self.raises:
            raise NonFiniteGradientsError(
                f"the norm of the gradients is {norm}: the parameters stay as they were. Call zero_grad() and go "
                "on, or find the batch; nonfinite_gradients='skip' skips such steps and counts them."
            )
        self.skipped = True
        self.num_skipped += 1
        return False

    def factors(self, norm: float | None, unscale: float) -> Factors:
        """What an update multiplies by, of gradients with this norm; None where nothing is clipped."""
        if not 0.0 < self.max_norm < math.inf or norm is None:
            return Factors(unscale=unscale)
        # Of a norm that is NaN it is NaN, as torch's.
        return Factors(unscale=unscale, clip=min(self.max_norm / (norm + EPSILON), 1.0))

    def factors_on_device(self, norm: torch.Tensor) -> Factors:
        """The same while the host does not know the norm, with the bits that it would compute."""
        skips = norm.isfinite().logical_not()
        if self._nonfinite == "use":
            skips = torch.zeros_like(skips)
        clip: torch.Tensor | float = 1.0
        if 0.0 < self.max_norm < math.inf:
            clip = (torch.full_like(norm, self.max_norm) / (norm + EPSILON)).clamp(max=1.0)
            clip = clip.masked_fill(skips, 1.0)  # what is kept of a step that is skipped stays as it is
        return Factors(unscale=self.unscale, clip=clip, found_inf=skips.float())

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> float:
        """See :meth:`zoo.zero.ZeroOptimizer.clip_grad_norm_`; there are gradients."""
        if not max_norm >= 0:
            raise ValueError(f"clip_grad_norm_(max_norm={max_norm}); it must be a norm >= 0.")
        norm = self.measured(norm_type)
        if not math.isfinite(norm):
            if error_if_nonfinite:
                raise NonFiniteGradientsError(
                    f"the norm of order {norm_type} of the gradients is {norm}: they stay as they were. Call "
                    "zero_grad() and go on, or leave error_if_nonfinite=False, and the next step does what "
                    "nonfinite_gradients= says."
                )
            self._suspect = True
            return norm
        factor = max_norm / (norm + EPSILON)
        if factor < 1.0:
            self.clipped *= factor
            self._multiply(factor)
        return norm

    def rescale(self) -> None:
        """After a step: where the scale has changed, gradients that are added to later get the new one."""
        factor, self._behind = self._behind, 1.0
        if factor != 1.0:
            self._multiply(factor)

    def _multiply(self, factor: float) -> None:
        for gradients in self._gradients:
            if gradients.reduced:  # not dropped since the step
                for chunk in gradients.bucket.updated_chunks():
                    with gradients.edited(chunk) as mean:
                        mean.mul_(factor)

    def forget(self) -> None:
        """The gradients were dropped."""
        self._suspect, self.clipped = False, 1.0
