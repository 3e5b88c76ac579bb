"""``deepspeed.module_inject.autotp_config`` and ``tp_plan_converter``: specs of layers by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.deepspeed.adapters.utilities.logs import warning_once
from zoo.tensor.patterns import PRESETS, LayerSpec, PartitionConfig, PartitionType, preset_specs

__all__ = ["AutoTPConfig", "AutoTPPresets", "PartitionType", "TPLayerSpec", "TPPlanConverter", "merge_autotp_configs"]


@dataclass
class TPLayerSpec(LayerSpec):
    """:class:`zoo.tensor.patterns.LayerSpec`."""

    def has_unequal_sub_params(self) -> bool:
        """Whether the blocks of the dealt dim have sizes of their own."""
        return self.shape is not None and isinstance(self.shape[self.get_partition_dim()], tuple)

    def get_sub_param_sizes(self) -> tuple[int, ...] | None:
        """Of such blocks; None without."""
        size = None if self.shape is None else self.shape[self.get_partition_dim()]
        return size if isinstance(size, tuple) else None

    def get_num_sub_params(self) -> int | None:
        """How many blocks the shape says; None where it says nothing of them."""
        size = -1 if self.shape is None else self.shape[self.get_partition_dim()]
        return len(size) if isinstance(size, tuple) else size if size > 0 else None


@dataclass
class AutoTPConfig(PartitionConfig):
    """:class:`zoo.tensor.patterns.PartitionConfig`, by DeepSpeed's method names."""

    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> AutoTPConfig:
        """Of the mapping ``partition_config``; unknown keys are an error."""
        read = PartitionConfig.of_data(config_dict)
        specs = [TPLayerSpec(**vars(spec)) for spec in read.layer_specs]
        more = {name: value for name, value in vars(read).items() if name not in ("layer_specs", "lm_head_patterns")}
        return cls(layer_specs=list(specs), lm_head_patterns=list(read.lm_head_patterns), **more)

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> LayerSpec | None:
        """The first spec for a parameter; where others match too, that is warned of once."""
        found = [spec for spec in self.layer_specs if spec.matches(param_name, model_type)]
        if len(found) > 1:
            warning_once(
                f"{param_name} matches {len(found)} specs, {'; '.join(map(str, found))}: the first one counts."
            )
        return found[0] if found else None


class _Presets(type):
    """``AutoTPPresets.llama()`` for every preset that zoo.tensor has."""

    def __getattr__(cls, name: str) -> Any:
        if name not in PRESETS:
            raise AttributeError(f"there is no preset {name!r}; there are {', '.join(sorted(PRESETS))}.")
        return lambda: AutoTPConfig(layer_specs=[TPLayerSpec(**vars(spec)) for spec in preset_specs(name)])


class AutoTPPresets(metaclass=_Presets):
    """The specs that ``preset_model`` names: ``AutoTPPresets.llama()`` and others."""

    @staticmethod
    def llama_gqa(num_heads: int, num_kv_heads: int, head_dim: int) -> AutoTPConfig:
        """Queries, keys and values in one matrix, with fewer keys and values than queries."""
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        fused = TPLayerSpec([r".*\.self_attn\.qkv_proj\.weight$"], shape=((queries, keys, keys), -1), partition_dim=0)
        return merge_autotp_configs(AutoTPPresets.llama(), AutoTPConfig(layer_specs=[fused]))

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig | None:
        """By name; None where there is none."""
        name = model_type.lower()
        return getattr(AutoTPPresets, name)() if name in PRESETS else None


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """The specs of both, those of ``override`` first; its other settings."""
    more = {name: value for name, value in vars(override).items() if name not in ("layer_specs", "tp_size")}
    more["lm_head_patterns"] = override.lm_head_patterns or base.lm_head_patterns
    size = override.tp_size if override.tp_size > 1 else base.tp_size
    return AutoTPConfig(tp_size=size, layer_specs=[*override.layer_specs, *base.layer_specs], **more)


_STYLES: Mapping[str, Mapping[str, Any]] = {
    "colwise": {},
    "colwise_rep": {"gather_output": True},
    "colwise_gather_output": {"gather_output": True},
    "rowwise": {"partition_type": PartitionType.ROW},
    "replicated_with_grad_allreduce": {"partition_type": PartitionType.SKIP, "grad_allreduce": True},
}


class TPPlanConverter:
    """Styles that models of transformers ship, as specs. The engine reads them itself, all of them
    (:func:`zoo.tensor.plan_of`)."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec] | None:
        """One spec for each entry, in order; None of an empty plan.

        Raises:
            ValueError: a style that specs cannot say.
        """
        other = sorted({style for style in hf_tp_plan.values() if style.lower() not in _STYLES})
        if other:
            raise ValueError(
                f"{', '.join(other)}: unsupported partition style{'s' if len(other) > 1 else ''} of a plan of "
                f"transformers; specs can say {', '.join(_STYLES)}. Without specs, the engine reads the plan itself."
            )
        found = []
        for pattern, style in hf_tp_plan.items():
            text = TPPlanConverter._wildcard_to_regex(pattern)
            end = "$" if text.endswith(r"\.weight") else r"\.weight$"
            found.append(TPLayerSpec([text + end], **_STYLES[style.lower()]))
        return found or None

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        """Of names with ``*``, which is any text here, behind any text."""
        return ".*" + pattern.replace(".", r"\.").replace("*", ".*")
