"""The records of a run's steps: whether they are finite, and how fast they come."""

from __future__ import annotations

import math

from zoo.parts import StepRecord
from zoo.train.diagnosis import Recorder


class NotFiniteError(ValueError):
    """The loss, or the norm of the gradient, is infinite or NaN: the run stopped before anything was saved."""

    everywhere = True


class Judge:
    """Looks at each record when it is made: before the next update, and before anything is saved. An engine part.

    Args:
        scaled: losses have a loss scale, and a norm that is not finite is a step of another scale.

    Attributes:
        bad: the record that ended the run, None without.
        recorder: what it need not keep any more is forgotten.
    """

    def __init__(self, *, scaled: bool) -> None:
        self._scaled = scaled
        self._records: list[StepRecord] = []
        self.bad: StepRecord | None = None
        self.recorder: Recorder | None = None

    def after_update(self, record: StepRecord) -> None:
        """A step is over.

        Raises:
            NotFiniteError: nothing of it may be saved.
        """
        bad_norm = not self._scaled and record.grad_norm is not None and not math.isfinite(record.grad_norm)
        if bad_norm or record.loss is None or not math.isfinite(record.loss):
            self.bad = record
            raise NotFiniteError(f"step {record.step} is not finite.")
        self._records.append(record)
        if self.recorder is not None:
            self.recorder.forget(record.step)

    def take(self) -> list[StepRecord]:
        """Those that were made since the last call."""
        found, self._records = self._records, []
        return found


class Pace:
    """Seconds and tokens of steps, smoothed: each counts for a tenth.

    Args:
        units_per_sample: what counts where batches have no tokens.

    Attributes:
        train_s: seconds of all steps. tokens: of all steps that are known.
    """

    def __init__(self, units_per_sample: int) -> None:
        self._units = units_per_sample
        self.train_s, self.tokens = 0.0, 0
        self._recent_s = self._recent_tokens = 0.0

    def launched(self, seconds: float) -> None:
        """A step took so long."""
        self.train_s += seconds
        self._recent_s = seconds if not self._recent_s else 0.9 * self._recent_s + 0.1 * seconds

    def known(self, record: StepRecord) -> float:
        """Tokens a second, now that the tokens of a further step are known."""
        counted = record.tokens or record.samples * self._units
        self.tokens += counted
        self._recent_tokens = counted if not self._recent_tokens else 0.9 * self._recent_tokens + 0.1 * counted
        return self._recent_tokens / self._recent_s
