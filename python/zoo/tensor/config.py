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

    preset_model: str | None = None
    """Patterns of names of layers, ready made: "llama", "qwen2", "bloom", "chatglm", "phi3", "mixtral",
    "deepseek_v2". null: the model's own family says it."""

    partition_config: dict[str, Any] | None = None
    """Patterns of parameter names (``layer_specs``): what matches is column- or row-parallel, or stays whole. They
    count before those of ``preset_model``, or, with ``use_default_specs`` false, in their place."""

    injection_policy_tuple: list[str] | dict[str, list[str]] | None = None
    """Names of row-parallel layers in the modules that are repeated; other linear layers there are column-parallel. Or
    such names by the class of the module: {"LlamaDecoderLayer": ["o_proj", "down_proj"]}."""

    tp_overlap_comm: bool = False
    """Outputs of row-parallel layers are made in two pieces; the first is summed over ranks while the second is
    computed."""

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
        "dtype": unnecessary("fp16, bf16 and data_types say the dtype of parameters", None, str),
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
        ways: dict[str, Any] = {"plan": self.plan, "injection_policy_tuple": self.injection_policy_tuple}
        ways |= {"partition_config": self.partition_config, "preset_model": self.preset_model}
        given = [key for key, value in ways.items() if value is not None]
        if len(given) > 1 and given != ["partition_config", "preset_model"]:
            yield f"{where}: {', '.join(given)} say how the model is cut; keep one of them"
        if self.sequence and self.tp_overlap_comm:
            yield f"{where}.sequence with tp_overlap_comm: tokens are summed and scattered whole; keep one of them"
        if self.plan is not None or self.partition_config is not None or self.preset_model is not None:
            yield from self._misread(where)

    def _misread(self, where: str) -> Iterable[str]:
        from zoo.tensor.patterns import PartitionConfig, preset_specs
        from zoo.tensor.plans import Plan

        for key, read in (
            ("plan", Plan.of_data), ("partition_config", PartitionConfig.of_data), ("preset_model", preset_specs),
        ):  # fmt: skip
            value: Any = getattr(self, key)
            try:
                found = None if value is None else read(value)
                if isinstance(found, Plan) and not found.rules:
                    yield f"{where}.plan has no rules, so that every rank would keep the whole model"
            except ValueError as error:
                yield f"{where}.{key}: {error}"
