"""What a step multiplies the gradients by, and what it came to: their norm, clipping, gradients that are not finite.

The norm of the whole mean gradient has the same bits at every stage and bucket size (:func:`global_norm`). It, and with
it whether a step is skipped, may be known to the device only (:class:`~zoo.zero.update.alike.Outcome`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch

from zoo.comm import Communicator
from zoo.shard.gradients import BucketGradients
from zoo.shard.placement.axes import Axes
from zoo.shard.roles import power_of, sums_of_squares
from zoo.zero.update.alike import Outcome, Tally, of_all
from zoo.zero.update.loss_scale import LossScaler

Nonfinite = Literal["skip", "error", "use"]
EPSILON = 1e-6
"""Added to a norm before it divides, as torch does."""


class NonFiniteGradientsError(FloatingPointError, RuntimeError):
    """The norm of the gradients is infinite or NaN, and nothing was changed."""


def check_norm(max_norm: Any) -> None:
    """Raise ValueError for what is no norm to clip to."""
    number: Any = max_norm
    if not isinstance(number, Real) or not max_norm >= 0:
        raise ValueError(
            f"clip_norm={max_norm!r}; it must be a norm > 0 (math.inf only measures), or 0 for no clipping."
        )


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
        check_norm(max_norm)
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

    def change(self, max_norm: float) -> None:
        """Another c from the next step on.

        Raises:
            ValueError: it is no norm; or steps do not measure, on which ranks agree when they begin.
        """
        check_norm(max_norm)
        if not self.measures and max_norm:
            raise ValueError(
                f"clip_norm = {max_norm!r} of an optimizer that was made with clip_norm=0: its steps do not measure "
                "the norm. Make it with clip_norm=math.inf, which measures and changes nothing."
            )
        self.max_norm = max_norm or (math.inf if self.max_norm else 0.0)

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
        for gradients in self._gradients:
            gradients.pay()
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
                for chunk in gradients.bucket.updated_chunks:
                    with gradients.edited(chunk) as mean:
                        mean.mul_(factor)

    def owe(self, factors: Factors) -> None:
        """An update begins that clips: kept gradients are clipped with it, when somebody needs them."""
        if isinstance(factors.clip, torch.Tensor) or factors.clip != 1.0:
            for gradients in self._gradients:
                gradients.owed = factors.clip

    def forget(self) -> None:
        """The gradients were dropped."""
        self._suspect, self.clipped = False, 1.0


class Factors:
    """The gradient of an update is ``unscale * clip`` times the reduced one.

    Args:
        unscale: takes the loss scale off; kept gradients stay without it, because more may be added to them.
        clip: clips; kept gradients are clipped with it, as by torch's ``clip_grad_norm_`` before a step. A number, or
            () fp64 on the device, whose products have the bits of those with the same number.
        found_inf: () fp32 on the device: 1 where the step is to change nothing, else 0. For optimizers that take it.

    Attributes:
        neutral: gradients stay as they are.
    """

    __slots__ = ("_cast", "clip", "found_inf", "neutral", "unscale")

    def __init__(
        self, *, unscale: float = 1.0, clip: float | torch.Tensor = 1.0, found_inf: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        self.unscale, self.clip, self.found_inf = unscale, clip, found_inf
        self.neutral = unscale == 1.0 and not isinstance(clip, torch.Tensor) and clip == 1.0
        self._cast: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    def product(self) -> float | torch.Tensor:
        """``unscale * clip``, for optimizers that multiply by themselves; () fp64 where only the device knows it."""
        return self.clip * self.unscale

    def apply(self, gradient: torch.Tensor, kept: BucketGradients | None) -> torch.Tensor:
        """The gradient that the optimizer gets. ``kept``: its memory is that of the reduced one, which lives on."""
        if self.neutral:
            return gradient
        if kept is None:
            return gradient.mul_(self._clip(gradient.dtype, unscaled=True))
        kept.paid()
        if isinstance(self.clip, torch.Tensor) or self.clip != 1.0:
            gradient = gradient.mul_(self._clip(gradient.dtype, unscaled=False))
        return gradient * self.unscale if self.unscale != 1.0 else gradient

    def _clip(self, dtype: torch.dtype, *, unscaled: bool) -> float | torch.Tensor:
        if not isinstance(self.clip, torch.Tensor):
            return self.unscale * self.clip if unscaled else self.clip
        key = (dtype, unscaled)
        if key not in self._cast:  # the product is rounded once, as that of two numbers of Python is
            self._cast[key] = (self.clip * self.unscale if unscaled else self.clip).to(dtype)
        return self._cast[key]


UNCHANGED = Factors()
"""Gradients as they are."""


Groups = Sequence[Mapping[str, Any]]


class SkipsOnDevice:
    """Whether the next update may have ``found_inf``, by which the wrapped optimizer skips a step on the device so that
    the host need not wait.

    Args:
        takes: whether the wrapped optimizer takes it; asked at most once, and where it matters.
        option: of a group, without which it does not.
    """

    def __init__(self, takes: Callable[[], bool], option: str = "fused") -> None:
        self._ask, self._option = takes, option
        self._takes: bool | None = None
        self._coming: list[dict[str, bool]] | None = None
        self._made: list[dict[str, bool]] | None = None  # with these on the latest update has made all states

    def possible(self, groups: Groups) -> bool:
        """For an update with the options of ``groups``.

        Not for the first one, nor where an option is on that was off: such an update makes states, which one that is
        skipped has to leave unmade, and torch's SGD leaves memory that nobody has written.
        """
        if self._takes is None:
            self._takes = self._ask()
        if not self._takes:
            return False
        # But for the learning rate, which warm-ups begin with at 0: it makes none.
        self._coming = [
            {k: v != 0 for k, v in g.items() if k != "lr" and isinstance(v, (bool, int, float))} for g in groups
        ]
        return self._made == self._coming and all(group.get(self._option) for group in groups)

    def updated(self) -> None:
        """The update is over."""
        self._made = self._coming

    def loaded(self) -> None:
        """States came from elsewhere, and perhaps not all."""
        self._made = self._coming = None


# The norm ------------------------------------------------------------------------------------------------------------


def global_norm(
    gradients: Sequence[BucketGradients], layers: Communicator | None = None, norm_type: float = 2.0,
    tally: Tally | None = None, *, wide: bool = False, absent: bool = False,
) -> torch.Tensor:  # fmt: skip
    """(Σ |g|^p)^(1/p) or, for p = ``norm_type`` = infinity, max |g|. Collective.

    Powers are added in fp64, family by family, chunk by chunk and bucket by bucket, in an order that no stage changes,
    and the norm is rounded to fp32 once, at the end, so that its bits do not tell how parameters share buckets, which
    instruction set or device added, or how many threads. (Sums that differ by n·2^-53 round to two values where one
    of them is as near to the middle between two fp32 numbers: about n in 10^8 norms.) Of fp64 gradients it is not
    rounded (``wide``, see :func:`are_wide`), and its last bit may depend on ``reduce_bucket_size``.

    Each element counts once: chunks are added over the ranks that split a bucket, and parts along other mesh axes over
    the ranks that have them; ranks that repeat something do not add it. What ``layers``, the ranks with other layers,
    have is added at the end, in their order, so that all of them have the same bits.

    Where gradients are left to the optimizer, so that ranks have different ones, it is ((1/R) Σ_r ‖g_r‖^p)^(1/p).

    A ``tally`` rides in the same collective where the ranks are the same. ``absent``: this rank has no gradients, which
    count as zero; others may have some.

    Returns:
        () fp64, on the device: nothing waits for it.

    Raises:
        ValueError: p is no number > 0.
    """
    number: Any = norm_type
    number = math.inf if number == "inf" else number  # torch takes both
    if not isinstance(number, Real) or not float(number) > 0:
        raise ValueError(f"norm_type={norm_type!r}; a norm over all gradients has a number > 0, or math.inf, for it.")
    p = float(number)
    families = dict.fromkeys(g.bucket.routes.axes for g in sorted(gradients, key=lambda g: g.bucket.spec.axes))
    found = [(_powers(gradients, axes, p, tally, absent), axes.in_norm) for axes in families]
    if tally is not None:
        tally.have_measured(
            [power for (power, _), axes in zip(found, families, strict=True) if _is_alone(axes, gradients)]
        )
    powers = _joined(torch.stack([power if counts else torch.zeros_like(power) for power, counts in found]), p)
    if layers is not None:
        powers = _joined(of_all(layers, powers.reshape(1)), p)
    norm = powers.sqrt() if p == 2.0 else powers if math.isinf(p) else powers.pow(1.0 / p)
    if wide:
        return norm
    rounded = norm.float().double()
    return torch.where(rounded.isinf(), norm, rounded)  # a finite norm may be larger than any number of fp32


def are_wide(gradients: Sequence[BucketGradients], layers: Communicator | None) -> bool:
    """Whether any gradients are fp64, on this rank or on those with other layers. Collective over ``layers``."""
    here = any(g.bucket.spec.gradient_dtype is torch.float64 for g in gradients)
    return here if layers is None or layers.is_dry else any(layers.all_gather_object(here))


def _is_alone(axes: Axes, gradients: Sequence[BucketGradients]) -> bool:
    """Whether every rank has the whole gradients of a family, and measures them by itself."""
    bucket = next(g.bucket for g in gradients if g.bucket.routes.axes is axes)
    whole = len(bucket.updated_chunks) == axes.shard.size
    return whole and axes.parts is None and bucket.routes.apart() is None


def _joined(powers: torch.Tensor, p: float) -> torch.Tensor:
    """Σ over (k,) sums of |g|^p, or the largest of (k,) maxima."""
    return powers.amax() if math.isinf(p) else powers.sum()


def _powers(
    gradients: Sequence[BucketGradients], axes: Axes, p: float, tally: Tally | None, absent: bool
) -> torch.Tensor:
    """Σ |g|^p over the parameters of one family, or max |g|."""
    mine = [g for g in gradients if g.bucket.routes.axes is axes]
    none = torch.zeros(len(mine), dtype=torch.float64, device=mine[0].bucket.device)
    chunks = [none if absent else powers_of(mine, c, p) for c in mine[0].bucket.updated_chunks]
    each = torch.cat(chunks)
    if len(chunks) < axes.shard.size:
        ridden = tally.ride(axes.shard, each) if tally is not None else None
        each = of_all(axes.shard, each) if ridden is None else ridden
    powers = _joined(each, p)
    apart = mine[0].bucket.routes.apart()
    if apart is not None:  # the root mean square of the ranks' own norms
        everyone = of_all(apart, powers.reshape(1))
        powers = everyone.amax() if math.isinf(p) else everyone.mean()
    return powers if axes.parts is None else _joined(of_all(axes.parts, powers.reshape(1)), p)


def powers_of(gradients: Sequence[BucketGradients], index: int, p: float) -> torch.Tensor:
    """(k,) fp64: Σ |g|^p over chunk ``index`` of each, or the largest |g| for p = infinity."""
    found = [g.squares if p == 2.0 else None for g in gradients]
    together = [i for i, g in enumerate(gradients) if found[i] is None and not g.role.is_away] if p == 2.0 else []
    if len({gradients[i].dtype for i in together}) == 1:  # one call of the kernel
        chunks = [gradients[i].reduced_chunk(index) for i in together]
        for i, squares in zip(together, sums_of_squares(chunks), strict=True):
            found[i] = squares
    each = zip(gradients, found, strict=True)
    return torch.stack([power_of(g.reduced_chunk(index), p) if power is None else power for g, power in each])
