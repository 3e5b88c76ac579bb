"""The section ``tensor_parallel`` of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from zoo.config import Section
from zoo.config.fates import Fate, unnecessary, waits
from zoo.config.section import OWN

if TYPE_CHECKING:
    from zoo.config import Config

__all__ = ["TensorParallelConfig", "TpConfig"]


class TpConfig(Section):
    """The older spelling of the degree, and the grain."""

    tp_size: int = Field(default=1, ge=1)
    """Ranks that have parts of the same layers; ``autotp_size`` is the same."""

    tp_grain_size: int = Field(default=1, ge=1)
    """Hidden features and the vocabulary are dealt in multiples of this."""


class TensorParallelConfig(Section):
    """Matrices cut over ranks that see the same samples (``zoo.tensor``): how many ranks, and by which plan."""

    autotp_size: int = Field(default=0, ge=0)
    """Ranks along the mesh axis "tensor"; 0 and 1: nothing is cut."""

    tp: TpConfig = Field(default_factory=TpConfig)
    """``tp_size`` and ``tp_grain_size``."""

    plan: Annotated[dict[str, Any] | None, OWN] = None
    """A plan as data (``Plan.as_data()``). null: what the model's method ``tensor_plan()`` returns, if it has one; else
    the plan of its family, or the styles that it ships."""

    prove: Annotated[bool, OWN] = True
    """Before a model of transformers is cut, a small one of its class is, and compared with the whole one."""

    sequence: Annotated[bool, OWN] = False
    """Between blocks each rank has a share of the tokens."""

    vocab_parallel_lm_head: bool = False
    """The loss of a causal language model is computed from parts of the logits, which are not gathered."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "preset_model": unnecessary("the model's own type says which family's plan is its", None, str),
        "partition_config": waits("plans written as DeepSpeed's layer_specs; give tensor_parallel.plan", None, dict),
        "injection_policy_tuple": waits("plans written as an injection policy; give tensor_parallel.plan", None, list),
        "tp_overlap_comm": unnecessary("sums over ranks are not cut in pieces", False, nothing=(True,)),
        "keep_module_on_host": unnecessary("a part has its own memory, and the rest is given back", False,
                                           nothing=(True,)),
        "replace_with_kernel_inject": waits("kernel injection", False),
    }  # fmt: skip

    @property
    def degree(self) -> int:
        """Ranks that have parts of the same layers."""
        return max(self.autotp_size, self.tp.tp_size, 1)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """What the engine's mesh has to have."""
        return {"tensor": self.degree}

    def contradictions(self, config: Config | None = None) -> Iterable[str]:
        """Sentences about values that do not fit each other."""
        where = "tensor_parallel"
        if self.autotp_size > 1 and self.tp.tp_size not in (1, self.autotp_size):
            yield f"{where}.autotp_size={self.autotp_size} and {where}.tp.tp_size={self.tp.tp_size}: keep one of them"
        if self.plan is not None:
            from zoo.tensor.plans import Plan

            try:
                Plan.of_data(self.plan)
            except (ValueError, TypeError, AttributeError) as error:
                yield f"{where}.plan: {error}"
