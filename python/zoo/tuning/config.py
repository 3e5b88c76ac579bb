"""The section ``autotuning``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from zoo.config import Section
from zoo.config.fates import Fate, unnecessary
from zoo.config.section import OWN

if TYPE_CHECKING:
    from zoo.config import Config

__all__ = ["AutotuningConfig"]


class AutotuningConfig(Section):
    """How ``zoo tune`` searches for the fastest way to run the job; nothing else reads it."""

    carried_by: ClassVar[str] = "zoo.tuning"

    enabled: bool = False
    """``zoo tune`` is what asks for a search; this changes nothing."""
    results_dir: str = "autotuning_results"
    """Journal, report, picture and the best configuration go here, from where the command runs."""
    exps_dir: str = "autotuning_exps"
    """Configurations, logs and results of the trials, in a folder of their own for each results_dir."""
    overwrite: bool = False
    """A search that is in results_dir already is put aside (``journal-1.jsonl``, …) and a new one begins."""
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    """What is made best. The batch of a step is kept, so all three are best where a step takes the fewest seconds."""
    start_profile_step: int = Field(default=3, ge=1)
    """The first step of a trial that is measured."""
    end_profile_step: int = Field(default=5, ge=1)
    """The last one, where it did not take too short a time: see least_s."""
    fast: bool = True
    """Search stage and micro-batch alone, and keep all else as it is. ``zoo tune --full`` says false."""
    max_train_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """The largest micro-batch that is tried, where space.micro names none; null for the whole batch of a rank."""
    min_train_micro_batch_size_per_gpu: int = Field(default=1, ge=1)
    """The smallest one."""
    num_tuning_micro_batch_sizes: int = Field(default=3, ge=1)
    """With fast: so many micro-batches, the largest ones between the bounds; all otherwise."""
    tuner_type: Literal["model_based", "gridsearch", "random"] = "model_based"
    """"model_based": a model of the time, fitted to the trials so far, says which is next; optuna says it of those that
    the model cannot tell apart. "gridsearch": in order. "random": by lot."""
    tuner_early_stopping: int | None = Field(default=5, ge=1)
    """Trials in a row that bring nothing faster, after which the search ends; null for no such end."""
    tuner_num_trials: int = Field(default=50, ge=1)
    """The most trials."""
    minutes: Annotated[float | None, OWN] = Field(default=None, gt=0)
    """The most minutes of all trials together."""
    timeout_s: Annotated[float, OWN] = Field(default=600.0, gt=0)
    """Seconds after which a trial is ended."""
    least_s: Annotated[float, OWN] = Field(default=1.0, ge=0)
    """Steps are measured until they took so many seconds in all, beside those that are asked for."""
    memory_bytes: Annotated[int | None, OWN] = Field(default=None, ge=1)
    """What there is: of all ranks together on the CPU, of each device elsewhere. null: what the system says."""
    ranks: Annotated[int | None, OWN] = Field(default=None, ge=1)
    """Processes of a trial; null: the GPUs of the machine, or 1."""
    space: Annotated[dict[str, list[Any]], OWN] = Field(default_factory=dict)
    """Dimension → the values to try, in place of zoo's own: stage, micro, mesh, schedule, bucket, offload,
    checkpointing; and paths of the configuration, such as "zero_optimization.overlap_comm": [true, false]."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "metric_path": unnecessary("a trial measures its steps itself", None, str),
        "max_train_batch_size": unnecessary("the batch of a step is what the configuration says", None, int),
        "min_train_batch_size": unnecessary("the batch of a step is what the configuration says", 1),
        "mp_size": unnecessary("meshes are searched, or fixed by space.mesh", 1),
        "arg_mappings": unnecessary("a trial gets the whole configuration, not arguments of a script", {}),
        "model_info": unnecessary("parameters and activations are counted on the model itself", {}),
        "model_info_path": unnecessary("parameters and activations are counted on the model itself", None, str),
    }

    def contradictions(self, config: Config) -> Iterable[str]:
        del config
        if self.end_profile_step < self.start_profile_step:
            yield (
                f"autotuning.end_profile_step = {self.end_profile_step} is before start_profile_step = "
                f"{self.start_profile_step}"
            )
        most = self.max_train_micro_batch_size_per_gpu
        if most is not None and most < self.min_train_micro_batch_size_per_gpu:
            yield (
                f"autotuning.max_train_micro_batch_size_per_gpu = {most} is below "
                f"min_train_micro_batch_size_per_gpu = {self.min_train_micro_batch_size_per_gpu}"
            )
