"""``deepspeed.utils.timer``: timers by name, and the speed of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from zoo.deepspeed.adapters.utilities.logs import logger, print_dist

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without ``round(n · trim_percent)`` of the smallest and as many of the largest; 0 of nothing.

    Raises:
        AssertionError: ``trim_percent`` is not in [0, 1], or nothing is left.
    """
    if not 0.0 <= trim_percent <= 1.0:
        raise AssertionError(f"trim_mean got trim_percent={trim_percent}; it is a share, from 0 to 1.")
    if not len(data):
        return 0
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    if not kept:
        raise AssertionError(f"trim_mean of {len(data)} numbers with trim_percent={trim_percent} leaves none.")
    return sum(kept) / len(kept)


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class SynchronizedWallClockTimer:
    """Timers by name: ``timers("fwd").start()``, ``.stop()``; each waits for the GPU."""

    class Timer:
        """One of them. Times are in milliseconds."""

        def __init__(self, name: str) -> None:
            self.name_, self.started_ = name, False
            self._begin = 0.0
            self._records: list[float] = []

        def start(self) -> None:
            """Begin.

            Raises:
                AssertionError: it runs already.
            """
            if self.started_:
                raise AssertionError(f"the timer {self.name_} runs already; call stop() first.")
            _synchronize()
            self._begin, self.started_ = time.perf_counter(), True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """End; the time is added to those since the last reset. ``reset`` and ``record`` make no difference.

            Raises:
                AssertionError: it does not run.
            """
            if not self.started_:
                raise AssertionError(f"the timer {self.name_} does not run; call start() first.")
            _synchronize()
            self.started_ = False
            self._records.append((time.perf_counter() - self._begin) * 1e3)

        def reset(self) -> None:
            """Forget all times."""
            self.started_ = False
            self._records.clear()

        def elapsed(self, reset: bool = True) -> float:
            """The sum since the last reset; one that runs is counted up to now, and goes on."""
            running = self.started_
            if running:
                self.stop()
            found = sum(self._records)
            if reset:
                self.reset()
            if running:
                self.start()
            return found

        def mean(self) -> float:
            """The mean without the outer tenths."""
            return trim_mean(self._records, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, Any] = {}

    def get_timers(self) -> dict[str, Any]:
        """All of them, by name."""
        return self.timers

    def __call__(self, name: str) -> Timer:
        """The timer of that name, made when it is first asked for."""
        found: SynchronizedWallClockTimer.Timer = self.timers.setdefault(name, self.Timer(name))
        return found

    @staticmethod
    def memory_usage() -> str:
        """Of the accelerator, now and at most."""
        from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator

        here: Any = get_accelerator()
        gib = 1024.0**3
        return (
            f"memory: {here.memory_allocated() / gib:.4f} GB allocated, {here.max_memory_allocated() / gib:.4f} GB at "
            f"most, {here.memory_reserved() / gib:.4f} GB reserved, {here.max_memory_reserved() / gib:.4f} GB at most"
        )

    def log(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Print times, divided by ``normalizer``, on these ranks (rank 0).

        Raises:
            AssertionError: ``normalizer`` is not positive.
        """
        times = self._of(names, normalizer, lambda timer: timer.elapsed(reset=reset))
        text = "time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in times.items())
        print_dist(text + (f" | {self.memory_usage()}" if memory_breakdown else ""), ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Means by name, divided by ``normalizer``.

        Raises:
            AssertionError: ``normalizer`` is not positive.
        """
        found = self._of(names, normalizer, lambda timer: timer.mean())
        if reset:
            for name in found:
                self.timers[name].reset()
        return found

    def _of(self, names: Sequence[str], normalizer: float, read: Callable[[Any], float]) -> dict[str, float]:
        if not normalizer > 0.0:
            raise AssertionError(f"normalizer={normalizer}; times are divided by it: it is positive.")
        return {name: read(self.timers[name]) / normalizer for name in names if name in self.timers}


class NoopTimer:
    """A :class:`SynchronizedWallClockTimer` that measures nothing, for when nobody wants times."""

    class Timer:
        """One of them."""

        def start(self) -> None:
            """Nothing."""

        def stop(self, **kwargs: Any) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def elapsed(self, **kwargs: Any) -> float:
            """0."""
            return 0

        def mean(self) -> float:
            """0."""
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        """The one timer."""
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """None are kept."""
        return {}

    def log(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Nothing."""

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """None."""


def throughput_timer(document: Mapping[str, Any], engine: Any) -> ThroughputTimer:
    """``engine.tput_timer``. It waits for the GPU where ``timers.throughput.synchronized`` asks for it."""
    section = (document.get("timers") or {}).get("throughput") or {}
    config = SimpleNamespace(
        enabled=bool(section.get("enabled", True)), synchronized=bool(section.get("synchronized", False))
    )
    return ThroughputTimer(config, engine.train_batch_size, steps_per_output=engine.config.steps_per_print)


class ThroughputTimer:
    """Samples a second: ``start()`` before a micro-batch, ``stop(global_step=...)`` after it.

    Args:
        config: an object whose attribute ``enabled`` says whether anything is measured, and ``synchronized`` (True
            where there is none) whether the GPU is waited for.
        batch_size: samples of a step, all ranks.
        start_step: steps before this one are not counted.
        steps_per_output: log after so many steps; None: never.
        monitor_memory: log the host's memory too.
        logging_fn: instead of the log.

    Attributes:
        initialized: whether it was ever started.
    """

    def __init__(
        self, config: Any, batch_size: int | None, start_step: int = 2, steps_per_output: int | None = None,
        monitor_memory: bool = False, logging_fn: Callable[[str], Any] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.batch_size = config, 1 if batch_size is None else batch_size
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.monitor_memory, self.logging = monitor_memory, logging_fn or logger.info
        self.started, self.start_time, self.end_time = False, 0.0, 0.0
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.initialized = False

    def update_epoch_count(self) -> None:
        """A new epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Before a micro-batch."""
        if not self.config.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self._wait()
            self.start_time = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """After a micro-batch; ``global_step``: it was the last of its step."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if global_step:
            self.global_step_count += 1
        if self.start_time > 0:
            self._wait()
            self.end_time = time.perf_counter()
            took = self.end_time - self.start_time
            self.start_time = 0.0
            self.total_elapsed_time += took
            self.step_elapsed_time += took
            if global_step:
                if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                    self._report()
                self.step_elapsed_time = 0.0

    def _wait(self) -> None:
        if getattr(self.config, "synchronized", True):
            _synchronize()

    def _report(self) -> None:
        text = (
            f"epoch {self.epoch_count}, micro-batch {self.micro_step_count}, step {self.global_step_count}: "
            f"{self.avg_samples_per_sec():.4g} samples/s on average, "
            f"{self.batch_size / max(self.step_elapsed_time, 1e-6):.4g} samples/s now"
        )
        if self.monitor_memory:
            from zoo.deepspeed.adapters.accelerator.cpu import host_memory

            total, available = host_memory()
            text += f", {100 * (1 - available / total):.1f}% of the host's memory used"
        self.logging(text)

    def avg_samples_per_sec(self) -> float:
        """Over the steps that were counted; -inf before the first."""
        steps = self.global_step_count - self.start_step
        if steps <= 0 or self.total_elapsed_time <= 0:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time
