"""What an engine counts, and the record that it makes of each step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from zoo.parts import Clock, StepRecord

if TYPE_CHECKING:
    from zoo.comm import Communicator
    from zoo.config import Config
    from zoo.engine.attachments import Parts
    from zoo.engine.timing import Stopwatch
    from zoo.monitor import Feed
    from zoo.shard import ShardedModel
    from zoo.zero import ZeroOptimizer
    from zoo.zero.update.outcome import Outcome

_log = logging.getLogger("zoo.engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A step whose update has been launched: what its record has beside ``outcome``, which may be on the device still;
    None where the optimizer has read it."""

    step: int
    lr: tuple[float, ...]
    loss_scale: float
    step_s: float
    wire_bytes: int
    memory_bytes: int | None
    metrics: Mapping[str, float]
    lr_kwargs: Mapping[str, Any]
    outcome: Outcome | None


class Records:
    """The part of :class:`~zoo.engine.Engine` that counts and tells.

    On a GPU a step returns before anybody knows what it came to, where its optimizer can (:mod:`zoo.zero`). Whatever
    depends on that happens in :meth:`read_outcome`: before the next update, before a save or a load, or when somebody
    asks for the record, a count, the clock or a learning rate.
    """

    config: Config
    comm: Communicator
    sharded: ShardedModel
    feed: Feed
    device: torch.device
    batch_ranks: int
    global_steps: int
    _optimizer: ZeroOptimizer | None
    _parts: Parts
    _watch: Stopwatch | None
    _in_step: int

    def __init__(self) -> None:
        self._record: StepRecord | None = None
        self._launched: Launched | None = None
        self._schedule: Any = None
        self._skipped_steps = self._samples = self._tokens = 0
        self._losses: list[torch.Tensor] = []
        self._counts = [0, 0]  # samples and tokens of this step on this rank
        self._latest = (0, 0)  # those of the latest forward, which count when its micro-batch is over
        self._stop = False
        self._reported: dict[str, float] = {}
        self._began: float | None = None
        self._sent = 0

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def record(self) -> StepRecord | None:
        """The latest step's; None before the first. Waits for the device where the step has not."""
        self.read_outcome()
        return self._record

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradient was not finite."""
        self.read_outcome()
        return self._skipped_steps

    @property
    def global_samples(self) -> int:
        """Of all steps and ranks."""
        self.read_outcome()
        return self._samples

    @property
    def global_tokens(self) -> int:
        """Of all steps and ranks."""
        self.read_outcome()
        return self._tokens

    @property
    def clock(self) -> Clock:
        """Where training stands; the same on all ranks."""
        self.read_outcome()
        return Clock(self.global_steps, self._in_step, self._samples, self._tokens)

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule, None without one; it has seen the latest step."""
        self.read_outcome()
        return self._schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self._schedule = schedule

    def report(self, name: str, value: float) -> None:
        """A number for the next step's record, under ``name``, such as "user/accuracy"."""
        from zoo.engine.numbers import real, shown

        if not isinstance(name, str):
            raise ValueError(f"report() got {shown(name)} for a name; it is a text, such as 'user/accuracy'.")
        if "/" not in name:
            raise ValueError(f"report({name!r}, ...); a metric's name says whose it is: 'user/{name}'.")
        self._reported[name] = real(f"report({name!r}, ...)", value)

    def request_stop(self) -> None:
        """Tell all ranks that this one wants to stop: the next record's ``stop`` is true on each of them."""
        self._stop = True

    def restore_counts(self, *, steps: int, skipped: int, samples: int, tokens: int) -> None:
        """Go on from these."""
        self.global_steps, self._skipped_steps, self._samples, self._tokens = steps, skipped, samples, tokens

    def restart_counts(self) -> None:
        """A step begins, whatever was before."""
        self._in_step = 0
        self._losses, self._counts, self._latest, self._began = [], [0, 0], (0, 0), None

    # -- a step is over -----------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self._counts = [before + here for before, here in zip(self._counts, self._latest, strict=True)]
        self._latest = (0, 0)

    def _tally(self) -> torch.Tensor:
        """What ranks add up: losses, how many, samples, tokens, whether to stop."""
        losses = [loss.reshape(()).double() for loss in self._losses]
        total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=self.device)
        counts = [float(len(losses)), *self._counts, self._stop]
        if not total.is_cuda:
            return torch.cat([total.reshape(1), total.new_tensor(counts)])
        counted = torch.tensor(counts, dtype=torch.float64, pin_memory=True)
        return torch.cat([total.reshape(1), counted.to(total.device, non_blocking=True)])

    def _launch(self, optimizer: ZeroOptimizer, lr: tuple[float, ...], scale: float, lr_kwargs: Any) -> None:
        """The update of a step has been launched; its record is made when what it came to is read: now, where the
        optimizer has waited."""
        now, sent, every = time.perf_counter(), self.comm.log.wire_bytes, self.config.steps_per_print
        measured = every is not None and self.global_steps % every == 0
        timed = self._watch.read() if self._watch is not None else {}
        self._launched = Launched(
            step=self.global_steps, lr=lr, loss_scale=scale,
            step_s=now - self._began if self._began is not None else 0.0, wire_bytes=sent - self._sent,
            memory_bytes=optimizer.memory()["total"] if measured else None,
            metrics=MappingProxyType({**self._parts.metrics(), **timed, **self._reported}), lr_kwargs=lr_kwargs,
            outcome=optimizer.outcome,
        )  # fmt: skip
        self._began, self._sent = now, sent
        self._losses, self._counts = [], [0, 0]
        self._reported.clear()
        if optimizer.outcome is None:
            self.read_outcome()
        else:
            self.feed.expect(self.read_outcome)

    def _mean_loss(self) -> torch.Tensor:
        """Of the latest step, () fp32 on the device; does not wait. NaN where no loss went through the engine."""
        outcome = self._launched.outcome if self._launched is not None else None
        if outcome is not None and outcome.sums is not None:
            return (outcome.sums[0] / outcome.sums[1]).float()
        loss = self.record.loss if self.record is not None else None
        return torch.tensor(float("nan") if loss is None else loss, dtype=torch.float32, device=self.device)

    def read_outcome(self) -> None:
        """Wait for what the latest step came to, where it has not waited itself.

        Its record is made, the schedule moves the learning rate, and parts and sinks are told. A second call does
        nothing. Starts no collective.
        """
        launched, self._launched = self._launched, None
        if launched is None or self._optimizer is None:
            return
        self._record = self._recorded(launched, self._optimizer)
        try:  # whatever raises from here on: the step is over, and is told
            self._after(self._record, self._optimizer, launched.lr_kwargs)
        finally:
            self.feed.put(self._record)

    def _recorded(self, launched: Launched, optimizer: ZeroOptimizer) -> StepRecord:
        norm, skipped = optimizer.grad_norm, optimizer.skipped
        sums: Sequence[float] = optimizer.tallied  # see _tally
        if launched.outcome is not None:  # something may have been measured since
            norm, sums = launched.outcome.read()
            skipped = norm is not None and not math.isfinite(norm)
        loss, losses, samples, tokens, stop = sums
        layers = self.sharded.layers.size if self.sharded.layers is not None else 1
        samples = round(samples * self.batch_ranks / (self.comm.size * layers))  # some ranks see the same samples
        tokens = round(tokens / layers)
        self._samples += samples
        self._tokens += int(tokens)
        return StepRecord(
            step=launched.step, loss=loss / losses if losses else None, lr=launched.lr,
            grad_norm=norm, skipped=skipped, loss_scale=launched.loss_scale, samples=samples,
            tokens=int(tokens), total_samples=self._samples, total_tokens=self._tokens, step_s=launched.step_s,
            wire_bytes=launched.wire_bytes, memory_bytes=launched.memory_bytes, stop=stop > 0,
            metrics=launched.metrics,
        )  # fmt: skip

    def _after(self, record: StepRecord, optimizer: ZeroOptimizer, lr_kwargs: Mapping[str, Any]) -> None:
        if not record.skipped:
            if self._schedule is not None:
                self._schedule.step(**lr_kwargs)
        else:
            self._skipped_steps += 1
            if optimizer.scaler is None:
                _log.warning(
                    "step %d was skipped: the norm of its gradient is %s. Nothing has changed.",
                    record.step, record.grad_norm,
                )  # fmt: skip
        self._parts.after_update(record)
