"""The section ``moe`` of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from zoo.config import Section

if TYPE_CHECKING:
    from zoo.config import Config
    from zoo.moe.huggingface.presets import ExpertsPreset


class ExpertsPresetSection(Section):
    """Where the experts of a family are: see zoo.moe.ExpertsPreset."""

    experts: str
    """Name of the class of the module that has them."""
    up: str = "gate_up_proj"
    """Parameter of the first map, (experts, 2 x intermediate, hidden), or half of it without a gate."""
    down: str = "down_proj"
    """Parameter of the second map, (experts, hidden, intermediate)."""
    up_bias: str | None = None
    """Parameter, (experts, 2 x intermediate)."""
    down_bias: str | None = None
    """Parameter, (experts, hidden)."""
    transposed: bool = False
    """Whether the last two dimensions of the weights are the other way round."""
    gated: bool = True
    """Whether the first map has a gate."""
    activation: str = "act_fn"
    """Attribute of the module."""
    join: str | None = "_apply_gate"
    """Method that joins gate and first map, where the module has one of this name."""
    balance_bias: str | None = None
    """Buffer that is added to scores for choosing only, by its path from the module around the experts."""

    def preset(self) -> ExpertsPreset:
        """As ``parallelise`` takes it."""
        from zoo.moe.huggingface.presets import ExpertsPreset

        return ExpertsPreset(**dict(self))


class MoEConfig(Section):
    """Mixture of experts: Hugging Face models with grouped experts and expert parallelism, from here alone."""

    enabled: bool = False
    ep_size: int = Field(default=1, ge=1)
    """Ranks that share the experts of each layer; it divides their number. Consecutive ranks do, unless mesh.axes names
    the axis expert itself."""
    chunks: int = Field(default=1, ge=1)
    """Into how many groups a rank's experts are cut, of which one computes while the next one's tokens come."""
    modules: list[str] = Field(default_factory=lambda: ["*"])
    """Patterns of paths of experts; others stay as they are."""
    presets: list[ExpertsPresetSection] = Field(default_factory=list)
    """Experts of classes that are not known."""
    bias_speed: float = Field(default=0.0, ge=0)
    """By how much the bias of routers that have one (DeepSeek-V3) moves after each step; 0 leaves it alone."""
    balance_coefficient: float = Field(default=0.0, ge=0)
    """Times this the balance losses of layers that zoo.moe.upcycle made are added to the loss. Models of transformers
    with routers of their own add theirs with output_router_logits."""

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """Axes that the job's mesh has to have."""
        return {"expert": self.ep_size}

    def contradictions(self, config: Config) -> Iterable[str]:
        axes = getattr(getattr(config, "mesh", None), "axes", None) or {}
        if self.enabled and self.ep_size > 1 and axes and axes.get("expert") != self.ep_size:
            yield (
                f"moe.ep_size = {self.ep_size}, and mesh.axes has {dict(axes)}; give it the axis "
                f'"expert": {self.ep_size}, or leave mesh.axes out'
            )
