"""The section ``activation_checkpointing`` of a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from zoo.config import Section

if TYPE_CHECKING:
    from zoo.config import Config

__all__ = ["ActivationCheckpointingConfig"]


class ActivationCheckpointingConfig(Section):
    """Where the saved inputs of checkpointed functions wait for backward, and what is checkpointed."""

    partition_activations: bool = False
    """Each rank of the mesh axis "tensor" (of the mpu's model-parallel group) keeps 1/n of every saved floating-point
    tensor; they are gathered before the function is computed again. The tensors must be equal on these ranks."""

    cpu_checkpointing: bool = False
    """Saved tensors of a GPU wait in page-locked host memory. Those of the CPU stay where they are."""

    contiguous_memory_optimization: bool = False
    """Saved tensors are copied into buffers that are allocated once, for ``number_checkpoints`` calls, and used again.
    Without a number, of this key or of ``configure(num_checkpoints=...)`` before, they stay where they are, which is
    warned of."""

    number_checkpoints: int | None = Field(default=None, ge=1)
    """Checkpointed calls that wait for their backward at the same time; the contiguous buffers have so many places.
    false is null."""

    synchronize_checkpoint_boundary: bool = False
    """Wait for the device at the beginning and the end of each checkpointed function, in forward and in backward."""

    profile: bool = False
    """Log how long each checkpointed function takes, in forward and when it is computed again."""

    nvme_path: str | None = None
    """Saved tensors wait in a file in this directory, which no other process sees and which is gone when the job is."""

    use_reentrant: bool = False
    """Forward without a graph, and an autograd function that makes it in backward; otherwise what the graph saves is
    left out of it and found again in backward, which also takes ``torch.autograd.grad``."""

    save: list[str] = Field(default_factory=list)
    """Operations whose results are kept instead of being computed again: "matmul", "attention", or names such as
    "aten.mm"."""

    blocks: Literal["auto"] | list[str] | None = None
    """Modules that are checkpointed without a change of the model: their paths, or that of their container; "auto": the
    longest list of modules of one class. null: those that the model's own code gives to ``checkpoint``."""

    @field_validator("number_checkpoints", mode="before")
    @classmethod
    def _no_number(cls, value: Any) -> Any:
        return None if value is False else value

    def contradictions(self, config: Config | None = None) -> Iterable[str]:
        """Sentences about values that do not fit each other."""
        where = "activation_checkpointing"
        for key in ("cpu_checkpointing", "contiguous_memory_optimization"):
            if self.nvme_path is not None and getattr(self, key):
                yield f"{where}.nvme_path and {where}.{key} both say where saved tensors wait; remove one"
        if self.save and self.use_reentrant:
            yield f"{where}.save works without {where}.use_reentrant only; remove one"
