"""The engine part ``flops_profiler``: profiles one step of training."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo.parts import Clock, Environment, StepRecord
from zoo.profiling.config import FlopsProfilerConfig
from zoo.profiling.flame import flame_page
from zoo.profiling.profiler import FlopsProfiler

__all__ = ["FlopsProfilerPart", "Job"]

_log = logging.getLogger("zoo.profiling")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a profile's heading says of the job."""

    world_size: int
    dp_world_size: int
    mp_world_size: int
    train_micro_batch_size_per_gpu: int


class FlopsProfilerPart:
    """Profiles the step after ``profile_step`` steps, and tells of it when it is over; on the first rank.

    It is the first micro-batch, forward and backward; of a pipeline, whose micro-batches overlap, all of them, as far
    as this rank's stage goes.

    Attributes:
        profiler: of the model; what it has found stays.
    """

    after = ("activation_checkpointing", "compression_training", "data_efficiency", "moe", "tensor_parallel")

    def __init__(self, section: FlopsProfilerConfig, environment: Environment) -> None:
        self.section, self._environment = section, environment
        self.profiler: FlopsProfiler | None = None
        self._on, self._done = False, False

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Take the model as other parts have left it."""
        peak = self.section.peak_tflops
        self.profiler = FlopsProfiler(
            module, self._job(mesh), self.section.recompute_fwd_factor,
            peak_flops_per_s=None if peak is None else peak * 1e12,
        )  # fmt: skip

    def _job(self, mesh: Any) -> Job:
        names = getattr(mesh, "mesh_dim_names", None) or ()
        here = self._environment
        return Job(
            world_size=here.world_size, dp_world_size=here.batch_ranks,
            mp_world_size=int(mesh["tensor"].size()) if "tensor" in names else 1,
            train_micro_batch_size_per_gpu=int(here.config.train_micro_batch_size_per_gpu),
        )  # fmt: skip

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin before the first micro-batch of the step, end before the next one that follows a backward."""
        profiler = self.profiler
        if profiler is not None and self._environment.rank == 0:
            if self._on and profiler.profile_so_far_has_backward:
                self._end()
            elif not self._on and not self._done and clock.step == self.section.profile_step and not clock.micro_batch:
                profiler.start_profile()
                self._on = True
        return args, kwargs

    def after_update(self, record: StepRecord) -> None:
        """End, and tell."""
        if self._on:
            self._end()

    def _end(self) -> None:
        profiler = self.profiler
        self._on, self._done = False, True
        if profiler is None:
            return
        profiler.end_profile()
        if profiler.not_counted:
            _log.warning("no formula for %s: what they compute is not in the profile.", sorted(profiler.not_counted))
        try:
            self._write(profiler)
        except OSError as error:  # on rank 0 alone, in the midst of training: the other ranks would wait for it
            _log.error("the profile could not be written: %s", error)

    def _write(self, profiler: FlopsProfiler) -> None:
        section = self.section
        profiler.print_model_profile(
            profile_step=section.profile_step, module_depth=section.module_depth, top_modules=section.top_modules,
            detailed=section.detailed, output_file=section.output_file,
        )  # fmt: skip
        if section.json_file is not None:
            profiler.profile.to_json(section.json_file)
        if section.flame_file is not None:
            flame_page(profiler.profile, section.flame_file)

    def close(self) -> None:
        """Nothing is watched any more."""
        if self.profiler is not None:
            self.profiler.end_profile()
        self._on = False
