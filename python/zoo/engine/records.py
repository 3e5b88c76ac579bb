"""What an engine counts, and the record that it makes of each step."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zoo.parts import Clock, StepRecord
from zoo.shard.runtime.outputs import tensors_in

if TYPE_CHECKING:
    from zoo.config import Config
    from zoo.engine.attachments import Parts
    from zoo.engine.timing import Stopwatch
    from zoo.monitor import Feed
    from zoo.shard import ShardedModel
    from zoo.zero import ZeroOptimizer
    from zoo.zero.update.alike import Outcome

_log = logging.getLogger("zoo.engine")
_graph_task = torch._C._current_graph_task_id


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


def reductions_of(config: Config, micro_batches: int) -> int:
    """How often the gradients of a step are reduced: where they stay whole until the update, once."""
    section = config.zero_optimization
    return 1 if section.stage <= 1 or section.update_in_backward else micro_batches


class Boundary:
    """Where steps end: after how many micro-batches, and how many of this one are over.

    Attributes:
        micro_batches: of one step. was_set: by hand, and not by the configuration: checkpoints keep it.
        over: micro-batches since the latest update. broken: an exception has left gradients of this step behind.
        local: gradients are this rank's alone, within :meth:`locally`.
    """

    def __init__(self, config: Config, optimizer: ZeroOptimizer | None) -> None:
        self._optimizer = optimizer
        self._reduces_at_the_end = reductions_of(config, 2) == 1
        self.micro_batches, self.was_set = int(config.gradient_accumulation_steps), False
        self.over = 0
        self.local = self.broken = False
        self._fixed: bool | None = None

    def reached(self) -> bool:
        """Whether the micro-batch at hand is the last of its step."""
        return self.over + 1 >= self.micro_batches if self._fixed is None else self._fixed

    def fix(self, is_boundary: bool | None) -> None:
        """See :meth:`~zoo.engine.Engine.set_gradient_accumulation_boundary`."""
        given: Any = is_boundary
        if getattr(given, "ndim", None) == 0:  # of torch or NumPy
            given = given.item()
        if given is not None and not (isinstance(given, int) and given in (0, 1)):
            from zoo.engine.numbers import shown

            raise ValueError(
                f"set_gradient_accumulation_boundary() got {shown(is_boundary)}; it takes True, False or None."
            )
        self._fixed = None if given is None else bool(given)

    def begin(self) -> None:
        """No micro-batch of the step at hand is over."""
        self.over, self.broken = 0, False

    def fail(self) -> None:
        """The step at hand has raised; its gradients are dropped when the next begins."""
        self.broken = True  # to drop them now may wait for ranks that have not failed

    def count(self) -> None:
        """One more is over, and the step is not."""
        self.over += 1

    def set(self, micro_batches: int) -> None:
        """Steps have so many from now on."""
        self.micro_batches, self.was_set = micro_batches, True

    def change(self, micro_batches: int) -> None:
        """Another number of micro-batches in a step than the configuration's, between two steps; checkpoints keep it.

        Raises:
            ValueError: it is no whole number above 0, or a step is under way, whose gradients were divided by the old
                one.
        """
        from zoo.engine.numbers import whole

        number = whole("boundary.change()", micro_batches)
        self.check_between_steps("boundary.change()")
        self.set(number)

    def stays_local(self, *, last: bool) -> bool:
        """The gradients of this micro-batch wait for those of the last."""
        return self._reduces_at_the_end and not last and not self.local

    @contextlib.contextmanager
    def locally(self) -> Iterator[None]:
        """Backwards inside leave gradients of this rank alone."""
        outside, self.local = self.local, True
        try:
            yield
        finally:
            self.local = outside

    def check_synchronous(self, what: str) -> None:
        """Raise ValueError within :meth:`locally`."""
        if self.local:
            raise ValueError(
                f"It is illegal to call Engine.{what} inside no_sync context manager: {what} inside of no_sync() has "
                "this rank's gradients alone. Call it afterwards."
            )

    def check_between_steps(self, what: str) -> None:
        """Raise ValueError if there are gradients that no update has used."""
        if self.over or (self._optimizer is not None and self._optimizer.holds_gradients):
            raise ValueError(
                f"{what} in the middle of a step, after {self.over} of {self.micro_batches} micro-batches: there "
                "are gradients that no update has used, and they are not part of a checkpoint. Call it at the "
                "boundary, or engine.zero_grad() first."
            )


class Reached(NamedTuple):
    """A forward that a backward came through."""

    number: int
    counts: tuple[int, int]
    is_latest: bool


class Forwards:
    """Which of the forwards since the last micro-batch a backward came through, seen at their outputs.

    Attributes:
        adding: the latest graph task that added to gradients of the model; -1: none has.
    """

    def __init__(self) -> None:
        self.adding = self._number = -1
        self._reached: dict[int, tuple[int, tuple[int, int]]] = {}  # graph task → (number of a forward, its counts)

    def follow(self, output: Any, counts: tuple[int, int]) -> None:
        """The next forward has this output and these counts."""
        self._number = number = self._number + 1

        def reached(gradient: torch.Tensor) -> None:
            task = _graph_task()
            self._reached[task] = max(self._reached.get(task, (-1, counts)), (number, counts))

        reached.__torch_unserializable__ = True  # type: ignore[attr-defined]  # who saves an output is not warned
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return  # a function is differentiated, whose outputs are no tensors of a graph
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    def reached(self) -> Reached | None:
        """The last forward that the latest adding task came through; None where it came through none."""
        if self.adding not in self._reached:
            return None
        number, counts = self._reached[self.adding]
        return Reached(number, counts, number == self._number)

    def forget(self) -> None:
        """A micro-batch is over, or dropped."""
        self.adding = -1
        self._reached.clear()


class Records:
    """Counts, and tells of each step.

    On a GPU a step returns before anybody knows what it came to, where its optimizer can (:mod:`zoo.zero`). Whatever
    depends on that happens in :meth:`read_outcome`: before the next update, before a save or a load, or when somebody
    asks for the record, a count, the clock or a learning rate.

    Attributes:
        global_steps: steps taken, skipped ones included. micro_steps: micro-batches of all steps.
        losses: of the micro-batches of this step. schedule: of learning rates, None without one; it has seen the steps
        whose outcome was read.
    """

    def __init__(
        self, *, config: Config, sharded: ShardedModel, optimizer: ZeroOptimizer | None, boundary: Boundary,
        parts: Parts, feed: Feed, watch: Stopwatch | None, device: torch.device, batch_ranks: int,
    ) -> None:  # fmt: skip
        self._optimizer, self._boundary, self._parts, self._feed = optimizer, boundary, parts, feed
        self._watch, self._device, self._print_every = watch, device, config.steps_per_print
        self._comm = sharded.comm
        self._layers = sharded.layers.size if sharded.layers is not None else 1
        self._ranks, self._batch_ranks = sharded.comm.size * self._layers, batch_ranks
        self.global_steps = self.micro_steps = 0
        self._record: StepRecord | None = None
        self._launched: Launched | None = None
        self.schedule: Any = None
        self._skipped_steps = self._samples = self._tokens = 0
        self.losses: list[torch.Tensor] = []
        self._counts = [0, 0]  # samples and tokens of this step on this rank
        self._latest = (0, 0)  # those of the latest forward
        self._forwards = Forwards()
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

    def num_updates(self) -> int:
        """Steps that were not skipped."""
        return self.global_steps - self.skipped_steps

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
        return Clock(self.global_steps, self._boundary.over, self._samples, self._tokens)

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

    def restore_counts(
        self, *, steps: int, skipped: int, samples: int, tokens: int, micro_steps: int | None = None
    ) -> None:
        """Go on from these. ``micro_steps``: None: as it is."""
        self.global_steps, self._skipped_steps, self._samples, self._tokens = steps, skipped, samples, tokens
        self.micro_steps = self.micro_steps if micro_steps is None else micro_steps

    def restart_counts(self) -> None:
        """A step begins, whatever was before."""
        self._boundary.begin()
        self.losses, self._counts, self._latest, self._began = [], [0, 0], (0, 0), None
        self._forwards.forget()

    def restart_step(self) -> None:
        """A step begins, whose first micro-batch may have been forward already."""
        forward = self._latest
        self.restart_counts()
        if any(forward):
            self.begin()
            self.admitted(forward)

    # -- a step under way ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The time of a step begins, unless it has."""
        if self._began is None:
            self._began = time.perf_counter()

    def admitted(self, counts: tuple[int, int]) -> None:
        """A micro-batch of so many samples and tokens goes through the model; they count when it is over."""
        self._latest = counts

    def follow(self, output: Any) -> None:
        """What the latest micro-batch that was admitted came to: whether it goes backward is seen there."""
        self._forwards.follow(output, self._latest)

    def adds(self) -> None:
        """The autograd call that runs adds to gradients of the model."""
        self._forwards.adding = _graph_task()

    def take_counts(self) -> tuple[int, int]:
        """Samples and tokens of the micro-batch that is over, which do not count yet: of the forward that went
        backward, the last one where several did; of the latest one where that cannot be seen."""
        seen = self._forwards.reached()
        if seen is None or seen.is_latest:
            found, self._latest = self._latest, (0, 0)
        else:
            found = seen.counts
        self._forwards.forget()
        return found

    def note_counts(self, counts: Sequence[int]) -> None:
        """So many samples and tokens are part of this step."""
        self._counts = [before + here for before, here in zip(self._counts, counts, strict=True)]

    def count_micro_batch(self) -> None:
        """A micro-batch is over, and its step is not; the clock moves."""
        self._boundary.count()
        self.micro_steps += 1
        self.note_counts(self.take_counts())

    # -- a step is over -----------------------------------------------------------------------------------------------

    def tally(self) -> torch.Tensor:
        """What ranks add up: losses, how many, samples, tokens, whether to stop."""
        losses = [loss.reshape(()).double() for loss in self.losses]
        total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=self._device)
        counts = [float(len(losses)), *self._counts, self._stop]
        if not total.is_cuda:
            return torch.cat([total.reshape(1), total.new_tensor(counts)])
        counted = torch.tensor(counts, dtype=torch.float64, pin_memory=True)
        return torch.cat([total.reshape(1), counted.to(total.device, non_blocking=True)])

    def launched(
        self, optimizer: ZeroOptimizer, lr: tuple[float, ...], scale: float, lr_kwargs: Mapping[str, Any], *,
        micro_steps: int,
    ) -> None:  # fmt: skip
        """The update of a step has been launched; its record is made when what it came to is read: now, where the
        optimizer has waited. ``micro_steps``: of its micro-batches, how many :meth:`count_micro_batch` has not seen."""
        self._boundary.begin()
        self.global_steps += 1
        self.micro_steps += micro_steps
        now, sent, every = time.perf_counter(), self._comm.log.wire_bytes, self._print_every
        measured = every is not None and self.global_steps % every == 0
        timed = self._watch.read() if self._watch is not None else {}
        ours, failure = self._of_parts()
        self._launched = Launched(
            step=self.global_steps, lr=lr, loss_scale=scale,
            step_s=now - self._began if self._began is not None else 0.0, wire_bytes=sent - self._sent,
            memory_bytes=optimizer.memory()["total"] if measured else None,
            metrics=MappingProxyType({**ours, **timed, **self._reported}), lr_kwargs=lr_kwargs,
            outcome=optimizer.outcome,
        )  # fmt: skip
        self._began, self._sent = now, sent
        self.losses, self._counts = [], [0, 0]
        self._reported.clear()
        if optimizer.outcome is None:
            self.read_outcome()
        else:
            self._feed.expect(self.read_outcome)
        if failure is not None:
            raise failure

    def _of_parts(self) -> tuple[Mapping[str, float], Exception | None]:
        """Their metrics; and what was raised in their place: the step is over all the same, and is told."""
        try:
            return self._parts.metrics(), None
        except Exception as error:
            return {}, error

    def mean_loss(self) -> torch.Tensor:
        """Of the latest step, () fp32 on the device; does not wait. NaN where no loss went through the engine."""
        outcome = self._launched.outcome if self._launched is not None else None
        if outcome is not None and outcome.sums is not None:
            return (outcome.sums[0] / outcome.sums[1]).float()
        loss = self.record.loss if self.record is not None else None
        return torch.tensor(float("nan") if loss is None else loss, dtype=torch.float32, device=self._device)

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
            self._feed.put(self._record)

    def _recorded(self, launched: Launched, optimizer: ZeroOptimizer) -> StepRecord:
        norm, skipped = optimizer.grad_norm, optimizer.skipped
        sums: Sequence[float] = optimizer.tallied  # see tally
        if launched.outcome is not None:  # something may have been measured since
            norm, sums = launched.outcome.read()
            skipped = norm is not None and not math.isfinite(norm)
        loss, losses, samples, tokens, stop = sums
        samples = round(samples * self._batch_ranks / self._ranks)  # some ranks see the same samples
        tokens = round(tokens / self._layers)
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
            if self.schedule is not None:
                self.schedule.step(**lr_kwargs)
        else:
            self._skipped_steps += 1
            if optimizer.scaler is None:
                _log.warning(
                    "step %d was skipped: the norm of its gradient is %s. Nothing has changed.",
                    record.step, record.grad_norm,
                )  # fmt: skip
        self._parts.after_update(record)
