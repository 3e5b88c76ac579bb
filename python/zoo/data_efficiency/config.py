"""The sections ``curriculum_learning``, ``progressive_layer_drop`` and ``data_efficiency`` of a configuration.

Keys and defaults are the documented ones; those that are zoo's own say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from zoo.config import Section
from zoo.data_efficiency.schedules import build_schedule

if TYPE_CHECKING:
    from zoo.config import Config

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


class Switched(Section):
    """A section with ``enabled`` around others that have it too."""

    enabled: bool = False

    def contradictions(self, config: Config) -> Iterable[str]:
        if "enabled" in self.model_fields_set:
            return  # switched off on purpose, with all that is in it
        for name in type(self).model_fields:
            if getattr(getattr(self, name), "enabled", False):
                yield (
                    f"data_efficiency: {name}.enabled is true in a section without enabled, which is false by default, "
                    f"so that nothing would come of it; give enabled beside {name}"
                )


class Difficulty(Section):
    """A difficulty that grows with steps."""

    min_difficulty: int = Field(default=1, ge=1)
    """Difficulty of the first steps."""
    max_difficulty: int = Field(default=1, ge=1)
    """Difficulty of the last steps."""
    schedule_type: ScheduleType = "fixed_linear"
    """How it grows; "custom": as the function says that the program gives to ``set_schedule`` of the engine part."""
    schedule_config: dict[str, Any] = Field(default_factory=dict)
    """Of fixed_linear and fixed_root: total_curriculum_step, difficulty_step, and root_degree of fixed_root. Of
    fixed_discrete: difficulty, max_step."""

    def check_schedule(self) -> None:
        """Raise ValueError unless there is such a schedule."""
        build_schedule(self.schedule_type, self.schedule_config, low=self.min_difficulty, high=self.max_difficulty)


class CurriculumConfig(Difficulty):
    """Curriculum learning by the length of sequences (Li, Zhang, He 2022)."""

    enabled: bool = False
    curriculum_type: Literal["seqlen"] = "seqlen"
    """What grows: the length of sequences."""
    apply: Literal["auto", "truncate", "reshape", "argument"] = "auto"
    """Own key. truncate: sequences are cut to the length. reshape: what is cut off becomes further samples. argument:
    the model's forward gets ``curriculum_seqlen`` and cuts itself. auto: argument where forward has a parameter of
    that name, else truncate."""
    sequence_dim: int = Field(default=1, ge=1)
    """Own key. The dimension of token ids, (B, T), along which the sequence lies."""
    tensors: dict[str, list[Annotated[int, Field(ge=1)]]] | None = None
    """Own key. Which tensors are cut along which dimensions: {"0": [1], "attention_mask": [2, 3]}, by position or name
    of the model's argument; dimension 0 is that of samples. null: those whose shape says so (README)."""

    @model_validator(mode="after")
    def _complete(self) -> CurriculumConfig:
        if self.enabled:
            self.check_schedule()
        return self


class LayerDropConfig(Section):
    """Progressive layer dropping (Zhang, He 2020)."""

    enabled: bool = False
    theta: float = Field(default=1.0, gt=0, le=1)
    """Keep probability of the last block that training tends to."""
    gamma: float = Field(default=0.001, ge=0)
    """How fast it tends there, by step."""
    apply: Literal["auto", "blocks", "arguments"] = "auto"
    """Own key. blocks: zoo skips blocks. arguments: the model's forward gets ``progressive_layer_drop=True`` and
    ``pld_theta`` and skips itself. auto: arguments where forward has parameters of these names, else blocks."""
    blocks: list[str] | None = None
    """Own key. Paths of the blocks, or of one container of them; null: the longest container of one class."""

    def contradictions(self, config: Config) -> Iterable[str]:
        zero = getattr(config, "zero_optimization", None)
        if self.enabled and self.theta < 1 and not getattr(zero, "ignore_unused_parameters", True):
            yield (
                "progressive_layer_drop.enabled, and zero_optimization.ignore_unused_parameters is false: a block that "
                "is skipped has no gradient; set ignore_unused_parameters to true"
            )


class CurriculumMetric(Difficulty):
    """One metric of samples whose limit grows."""

    index_to_sample_path: str | None = None
    """File of sample numbers in the order of the metric, which zoo.data_efficiency.DataAnalyzer writes."""
    index_to_metric_path: str | None = None
    """File of the metric's values in that order."""
    difficulty_type: Literal["value", "percentile"] = "value"
    """value: samples whose metric is at most the difficulty. percentile: the difficulty per cent of all samples whose
    metric is lowest."""
    clustering_type: Literal["schedule_based", "single_cluster"] = "schedule_based"
    """single_cluster: no sample is left out. The metrics seqlen_truncate and seqlen_reshape cut sequences to the
    difficulty; the difficulty of others is told to users only."""

    @model_validator(mode="after")
    def _complete(self) -> CurriculumMetric:
        self.check_schedule()
        if self.clustering_type == "schedule_based":
            needs = ["index_to_sample_path"] + ["index_to_metric_path"] * (self.difficulty_type == "value")
            for name in needs:
                if not getattr(self, name):
                    raise ValueError(
                        f"{name} is missing; give the file that zoo.data_efficiency.DataAnalyzer wrote, or set "
                        'clustering_type to "single_cluster" to leave out no sample'
                    )
            if self.difficulty_type == "percentile" and self.max_difficulty > 100:
                raise ValueError(f"max_difficulty = {self.max_difficulty}; a percentile is at most 100")
        return self


class MetricCurriculumConfig(Section):
    """Curriculum learning by metrics of samples."""

    enabled: bool = False
    data_cluster_path: str | None = None
    """Not needed here: the samples that are allowed are a beginning of the sorted index."""
    curriculum_metrics: dict[str, CurriculumMetric] = Field(default_factory=dict)
    """Name → metric; a sample is allowed when all metrics allow it."""

    @model_validator(mode="after")
    def _some(self) -> MetricCurriculumConfig:
        if self.enabled and not self.curriculum_metrics:
            raise ValueError("curriculum_metrics is empty; give at least one metric, or set enabled to false")
        both = {"seqlen_truncate", "seqlen_reshape"} & set(self.curriculum_metrics)
        if self.enabled and len(both) == 2:
            raise ValueError("curriculum_metrics has seqlen_truncate and seqlen_reshape; sequences are cut in one way")
        return self


class DynamicBatchingConfig(Section):
    """Micro-batches of about the same number of tokens, and a learning rate that follows the size of batches."""

    enabled: bool = False
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in one micro-batch of one rank, sample lengths added up."""
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """The rate of a step with b samples is multiplied by b / train_batch_size, by its square root, or not at all."""
    min_batch_size: int = Field(default=1, ge=1)
    """Fewest samples in a micro-batch."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Most samples in a micro-batch."""
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    """In which order samples are packed: that of the data set, shuffled in each epoch, or by length; micro-batches of
    samples sorted by length come in a shuffled order."""
    metrics_path: str | None = None
    """Directory of the metric "seqlen" that zoo.data_efficiency.DataAnalyzer wrote; null: lengths are measured."""
    verbose: bool = False
    """Whether the log has the sizes of the micro-batches of each epoch."""

    @model_validator(mode="after")
    def _complete(self) -> DynamicBatchingConfig:
        if self.enabled and self.max_tokens is None:
            raise ValueError("max_tokens is missing; say how many tokens a micro-batch has at most")
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise ValueError(
                f"max_batch_size = {self.max_batch_size} is less than min_batch_size = {self.min_batch_size}"
            )
        return self


class DataSamplingConfig(Switched):
    """Which samples a micro-batch has."""

    enabled: bool = False
    num_epochs: int = Field(default=1000, ge=1)
    """Passes over the data after which the loader ends for good; under a curriculum, as many samples as so many passes
    have."""
    num_workers: int = Field(default=0, ge=0)
    """Processes that read samples ahead; 0: the training process reads them."""
    pin_memory: bool = False
    """Whether batches lie in page-locked memory, for GPUs."""
    curriculum_learning: MetricCurriculumConfig = Field(default_factory=MetricCurriculumConfig)
    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)

    @model_validator(mode="after")
    def _one_picks(self) -> DataSamplingConfig:
        if not self.enabled:
            return self
        metrics = self.curriculum_learning.curriculum_metrics if self.curriculum_learning.enabled else {}
        picks = [name for name, metric in metrics.items() if metric.clustering_type == "schedule_based"]
        if (self.num_workers or self.pin_memory) and not picks and not self.dynamic_batching.enabled:
            raise ValueError(
                "num_workers or pin_memory is set, and no loader of this section reads samples; remove them, or enable "
                "a curriculum metric or dynamic_batching"
            )
        if self.dynamic_batching.enabled and picks:
            raise ValueError(
                f"dynamic_batching.enabled, and the curriculum metric {picks[0]!r} picks samples too; enable one of "
                'the two, or set its clustering_type to "single_cluster"'
            )
        return self


class LtdScheduleConfig(Section):
    """How many tokens a layer sees."""

    min_value: int = Field(default=1, ge=1)
    """Tokens at the first step."""
    max_value: int = Field(default=1, ge=1)
    """Tokens from step require_steps on; all of them where sequences are no longer."""
    schedule_type: Literal["fixed_linear"] = "fixed_linear"
    """The number grows linearly."""
    schedule_config: dict[str, Any] = Field(default_factory=dict)
    """require_steps: when max_value is reached. seq_per_step: numbers are multiples of it."""


class LayerTokenLrConfig(Section):
    """A learning rate that follows tokens of layers: not carried out, only its absence."""

    enabled: bool = False
    """Only false: a schedule under ``scheduler`` says the rate."""

    @model_validator(mode="after")
    def _absent(self) -> LayerTokenLrConfig:
        if self.enabled:
            raise ValueError(
                "layer_token_lr_schedule.enabled is true, and rates do not follow tokens of layers here; set it to "
                "false and give a longer schedule under scheduler"
            )
        return self


class RandomLtdConfig(Section):
    """Random layerwise token dropping (Yao et al. 2022)."""

    enabled: bool = False
    total_layer_num: int | None = Field(default=None, ge=1)
    """Blocks of the model, compared with those that are found; null: no comparison."""
    random_ltd_layer_num: int | None = Field(default=None, ge=0)
    """How many blocks drop tokens, compared with random_ltd_layer_id."""
    random_ltd_layer_id: list[int] | None = None
    """Which blocks drop tokens, counted from 0; null: all but the first and the last."""
    model_mask_name: str | None = None
    """Name of the blocks' argument that is the attention mask; null: masks are known by their shape."""
    model_type: Literal["encoder", "decoder"] | None = None
    """Makes no difference here: kept tokens stay in order, so a causal mask stays causal."""
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = "batch_seq_dim"
    """Order of the dimensions of hidden states."""
    random_ltd_schedule: LtdScheduleConfig = Field(default_factory=LtdScheduleConfig)
    layer_token_lr_schedule: LayerTokenLrConfig = Field(default_factory=LayerTokenLrConfig)
    per_sample: bool = True
    """Own key. Each sample keeps tokens of its own; false: all samples of a micro-batch keep the same positions, which
    blocks need that take arguments without a batch dimension, such as (T, T) masks."""
    blocks: list[str] | None = None
    """Own key. Paths of the blocks, or of one container of them; null: the longest container of one class."""

    @model_validator(mode="after")
    def _complete(self) -> RandomLtdConfig:
        if not self.enabled:
            return self
        section = self.random_ltd_schedule
        known = {"require_steps", "seq_per_step"}
        unknown, missing = sorted(set(section.schedule_config) - known), sorted(known - set(section.schedule_config))
        if unknown or missing:
            which = f"has the unknown key {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
            raise ValueError(f"random_ltd_schedule.schedule_config {which}; it has require_steps and seq_per_step")
        renamed = {
            "total_curriculum_step": section.schedule_config["require_steps"],
            "difficulty_step": section.schedule_config["seq_per_step"],
        }
        try:
            build_schedule("fixed_linear", renamed, low=section.min_value, high=section.max_value)
        except ValueError as error:
            text = (
                str(error).replace("total_curriculum_step", "require_steps").replace("difficulty_step", "seq_per_step")
            )
            text = text.replace("min_difficulty", "min_value").replace("max_difficulty", "max_value")
            raise ValueError(f"random_ltd_schedule: {text}") from None
        ids = self.random_ltd_layer_id
        if ids is not None and (ids != sorted(set(ids)) or any(i < 0 for i in ids)):
            raise ValueError(f"random_ltd_layer_id = {ids}; it lists blocks from 0 on, in order, each once")
        if ids is not None and self.random_ltd_layer_num not in (None, len(ids)):
            raise ValueError(
                f"random_ltd_layer_num = {self.random_ltd_layer_num}, and random_ltd_layer_id has {len(ids)} blocks"
            )
        return self


class DataRoutingConfig(Switched):
    """Which tokens a layer sees."""

    enabled: bool = False
    random_ltd: RandomLtdConfig = Field(default_factory=RandomLtdConfig)


class DataEfficiencyConfig(Switched):
    """Which samples a micro-batch has, and which tokens a layer sees."""

    enabled: bool = False
    seed: int = Field(default=1234, ge=0)
    """Of the tokens that layers drop. Samples are shuffled by the root's seed, as they are without this section."""
    data_sampling: DataSamplingConfig = Field(default_factory=DataSamplingConfig)
    data_routing: DataRoutingConfig = Field(default_factory=DataRoutingConfig)
