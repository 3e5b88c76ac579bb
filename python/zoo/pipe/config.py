"""The section ``pipeline`` of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from zoo.config import ComponentChoice, Section
from zoo.config.fates import Fate, unnecessary

if TYPE_CHECKING:
    from zoo.config import Config

__all__ = ["PipelineConfig", "ScheduleChoice"]


class ScheduleChoice(ComponentChoice):
    """Which schedule, and its options."""

    kind: ClassVar[str] = "pipe_schedule"

    type: Literal["auto"] | str
    """Name of the component; "auto" is one of them, and nothing that is left to be filled in."""


class PipelineConfig(Section):
    """How a pipeline of stages is run. The model, a PipelineModule, says what the stages are."""

    runner: ClassVar[str] = "pipeline"

    stages: int | Literal["auto"] | None = None
    """Pipeline ranks; null or "auto" for as many as the model has."""

    schedule: ScheduleChoice | None = None
    """The order of computations; it has to have the stages where the model has them. Default: the model's own
    schedule."""

    reduce: Literal["once", "each"] = "once"
    """Whether gradients are reduced in the last backward of a step, or in each: with stages 2 and 3 of ZeRO a rank then
    never has whole gradients of all of its layers, and sends them as often as there are micro-batches. Rounding
    differs."""

    max_bytes: int | None = Field(default=None, ge=0)
    """Stage 3 of ZeRO: gathered parameters stay from micro-batch to micro-batch as long as all that is whole has at
    most this many bytes; null: each use gathers them again, but for what ``max_live_parameters`` keeps."""

    dynamic_shapes: bool = False
    """Whether activations have other shapes each time, also where the inputs look alike: their shapes travel with
    them."""

    check_shapes: bool = True
    """Whether the layers are run once on the meta device, where the first stage is, before the first batch: a layer
    that does not take what the one before it gives is then named before anything is sent. Functions among the layers
    are called once more for it."""

    activation_checkpoint_interval: int = Field(default=0, ge=0)
    """Layers between two activations that are kept, in place of what the model says; 0: what the model says
    (``PipelineModule(activation_checkpoint_interval=...)``)."""

    use_reentrant: bool = True
    """False: activations are computed again by the form that is not re-entrant, whatever the model and the section
    ``activation_checkpointing`` say. True: by what they say."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "partition": unnecessary("PipelineModule(partition_method=...) says which layers a stage has", "best"),
        "seed_layers": unnecessary("PipelineModule(seed_layers=...) says it", False, nothing=(True,)),
        "pipe_partitioned": unnecessary("activations travel whole", True, nothing=(False,)),
        "grad_partitioned": unnecessary("gradients of activations travel whole", True, nothing=(False,)),
    }

    def contradictions(self, config: Config) -> Iterable[str]:
        ranks = config.mesh.axes.get("pipe")
        if isinstance(self.stages, int) and self.stages < 1:
            yield f"pipeline.stages = {self.stages}; at least 1"
        elif isinstance(self.stages, int) and ranks not in (None, -1, self.stages):
            yield f"pipeline.stages = {self.stages} and mesh.axes.pipe = {ranks} say the same thing; remove one"
