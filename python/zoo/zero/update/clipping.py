"""What a step multiplies the gradients by, and what it came to: loss scale, clipping, gradients that are not finite.

The norm, and with it whether a step is skipped, may be known to the device only (:class:`Outcome`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch

from zoo.comm import Communicator
from zoo.shard.gradients import BucketGradients
from zoo.zero.update.norms import Tally, are_wide, global_norm

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

    def apply(self, gradient: torch.Tensor, *, kept: bool) -> torch.Tensor:
        """The gradient that the optimizer gets. ``kept``: its memory is that of the reduced one, which lives on."""
        if self.neutral:
            return gradient
        if not kept:
            return gradient.mul_(self._clip(gradient.dtype, unscaled=True))
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


@dataclass
class LossScaler:
    """The factor the loss is multiplied by, and how it moves: keeps small gradients above fp16's smallest number.

    Static (``dynamic=False``): the scale never changes; a step whose gradients overflow is still skipped.
    Dynamic (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2): after ``window`` steps in a row without
    overflow the scale doubles; an overflow uses up one of ``hysteresis`` lives, and once none is left the scale halves,
    down to ``min_scale``. Lives come back when the scale doubles, or after every good step with
    ``consecutive_hysteresis``.
    """

    scale: float = 2.0**16
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    good_steps: int = 0
    lives: int = -1

    def __post_init__(self) -> None:
        numbers: tuple[Any, ...] = (self.scale, self.min_scale, self.window, self.hysteresis, self.lives)
        if wrong := [number for number in numbers if not isinstance(number, Real)]:
            raise ValueError(f"a loss scaler got {wrong[0]!r}, a {type(wrong[0]).__name__}; it takes numbers.")
        if not 0 < self.scale < math.inf or not self.min_scale > 0 or self.window < 1 or self.hysteresis < 1:
            raise ValueError(
                f"a loss scaler needs a finite scale > 0, min_scale > 0, window >= 1 and hysteresis >= 1; got "
                f"scale={self.scale}, min_scale={self.min_scale}, window={self.window}, hysteresis={self.hysteresis}."
            )
        if self.lives < 0:
            self.lives = self.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Move the scale after a step."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            if self.lives > 1:
                self.lives -= 1
            else:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.lives = self.hysteresis
        if self.good_steps % self.window == 0:
            self.scale *= 2
            self.lives = self.hysteresis

    def state(self) -> dict[str, float]:
        """What a checkpoint has to keep."""
        return {"scale": self.scale, "good_steps": self.good_steps, "lives": self.lives}

    def load(self, state: dict[str, float]) -> None:
        """Take over what :meth:`state` returned."""
        self.scale = float(state["scale"])
        self.good_steps, self.lives = int(state["good_steps"]), int(state["lives"])


def make_scaler(loss_scale: float | str | LossScaler | None) -> LossScaler | None:
    """None, "dynamic", a number (a static scale), or a scaler made by the caller."""
    if loss_scale is None or isinstance(loss_scale, LossScaler):
        return loss_scale
    if loss_scale == "dynamic":
        return LossScaler()
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return LossScaler(scale=float(loss_scale) if abs(loss_scale) < 2**1000 else math.inf, dynamic=False)
    raise ValueError(f"loss_scale={loss_scale!r}; allowed are None, 'dynamic', a positive number, or a LossScaler.")


Groups = Sequence[Mapping[str, Any]]


class Outcome:
    """The norm of the gradients and sums over ranks, on their way to the host.

    On a GPU they are copied to pinned memory behind the work that makes them, and nothing waits until :meth:`read`,
    which waits for this copy alone and not for what was launched after it.

    Args:
        norm: () fp64, without the loss scale; None where it was not measured.
        sums: (k,) fp64, of a tally; None without one.
        rows: (1 + N A,) fp64, what ranks have to have alike (:meth:`~zoo.zero.update.norms.Tally.rows`).

    Attributes:
        sums: as given, on the device.
        made: when it is read, the update has been made.
        rows: as given, once it has been read.
    """

    def __init__(
        self, norm: torch.Tensor | None, sums: torch.Tensor | None, rows: torch.Tensor | None = None, *,
        made: bool = False,
    ) -> None:  # fmt: skip
        self.sums, self._measured, self.made = sums, norm is not None, made
        self.rows: list[float] = []
        self._num_rows = 0 if rows is None else rows.numel()
        given = [t for t in (norm.reshape(1) if norm is not None else None, sums, rows) if t is not None]
        if not given:
            raise AssertionError("an outcome of nothing.")
        numbers = torch.cat(given) if len(given) > 1 else given[0]
        self._copied: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(numbers.device))
            numbers = host
        self._numbers = numbers

    def read(self) -> tuple[float | None, list[float]]:
        """(the norm or None, the k sums); ``rows`` are there from now on. Starts no collective."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._numbers.tolist()
        end = len(numbers) - self._num_rows
        self.rows = numbers[end:]
        return (numbers[0], numbers[1:end]) if self._measured else (None, numbers[:end])


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
