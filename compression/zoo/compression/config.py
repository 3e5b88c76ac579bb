"""The section ``compression_training`` of a configuration.

Keys and defaults are the documented ones; those that are zoo's own say so. Where DeepSpeed's page and its code differ
in a default, the page's is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from zoo.compression.schedule import check_period
from zoo.config import Section
from zoo.config.fates import unnecessary

if TYPE_CHECKING:
    from zoo.config import Config

Ratio = Annotated[float, Field(gt=0, le=1)]
ROOT = "compression_training"


def known_bits(bits: int) -> int:
    """Bits of weights; raises ValueError for those between 16 and 32."""
    if 16 < bits < 32:
        raise ValueError(f"{bits} bits; allowed are 1 to 16, and 32 for none")
    return bits


class SharedSection(Section):
    """What all groups of a technique have in common."""

    enabled: bool = False
    schedule_offset: int = Field(default=0, ge=0)
    """Steps that are over before the technique begins."""


class ParamsSection(Section):
    """Options of one group."""


class GroupSection(Section):
    """Modules with options of their own."""

    modules: list[str] = Field(default_factory=lambda: ["*"], min_length=1)
    """Patterns of names: regular expressions that are searched for in the name of a module, "*" for all. One that
    matches no module that can be compressed so is an error."""
    params: ParamsSection = Field(default_factory=ParamsSection)
    """Options."""


class RelatedGroupSection(GroupSection):
    """Modules from which something is taken away, and those that go with them."""

    related_modules: list[list[str]] | None = None
    """For each pattern of ``modules`` those of the modules that lose what it loses. null: what is pruned is zero, and
    keeps its place."""

    @model_validator(mode="after")
    def _paired(self) -> RelatedGroupSection:
        if self.related_modules is not None and len(self.related_modules) != len(self.modules):
            raise ValueError(
                f"related_modules has {len(self.related_modules)} lists and modules {len(self.modules)} patterns; give "
                "one list for each pattern"
            )
        return self


class TechniqueSection(Section):
    """A technique: what its groups share, and the groups."""

    shared_parameters: SharedSection = Field(default_factory=SharedSection)
    """Of all groups."""
    different_groups: dict[str, GroupSection] = Field(default_factory=dict)
    """Groups by names of your choice."""

    @property
    def enabled(self) -> bool:
        """Whether it is asked for."""
        return self.shared_parameters.enabled


# ----------------------------------------------------------------------------------------------- weight quantisation


class MixedSection(Section):
    """``fp16_mixed_quantize``: v ← r·Q(v) + (1 - r)·v, r growing to 1."""

    enabled: bool = False
    quantize_change_ratio: Ratio = 0.001
    """What r begins with, and what each step adds to it; it begins anew when bits fall."""


class SharedWeightQuantization(SharedSection):
    """Of all groups of weight quantisation."""

    quantize_groups: int = Field(default=1, ge=1)
    """Into how many groups a weight is cut, row after row, each with a scale of its own. It divides the number of
    elements. Weights of embeddings have one for each row."""
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Steps around zero, or from the minimum to the maximum. Bits below 3 are symmetric."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest (of two as near ones to the even one), or up with the probability of the fraction, drawn from the
    seed of the configuration, the step and the name of the weight."""
    quantize_weight_in_forward: bool = False
    """In a model in bf16 or fp16 both mean the same, to the last bit: it computes with Q of its 16-bit weights, and
    fp32 masters keep their precision. A model in fp32 has no masters, and false, the default, is refused there."""
    fp16_mixed_quantize: MixedSection = Field(default_factory=MixedSection)
    """Mix the exact and the quantised value."""
    quantize_verbose: bool = False
    """Say in the log when bits change."""

    fates: ClassVar[dict[str, Any]] = {
        "quantizer_kernel": unnecessary("kernels are used where they are the same to the last bit", False),
    }


class WeightQuantizationParams(ParamsSection):
    """Of one group."""

    start_bits: int = Field(default=8, ge=1, le=32)
    """Bits to begin with: 32 and 16 are none at all, 2 is ternary, 1 is binary."""
    target_bits: int = Field(default=8, ge=1, le=32)
    """Bits to end with."""
    quantization_period: int = Field(default=1, ge=0)
    """Steps until bits fall by one for the first time; it doubles each time."""
    group_size: int | None = Field(default=None, ge=1)
    """Own: so many elements, row after row, have a scale of their own, whatever quantize_groups and the size of a
    weight are. It divides the number of elements."""

    _known = field_validator("start_bits", "target_bits")(known_bits)

    @model_validator(mode="after")
    def _falls(self) -> WeightQuantizationParams:
        check_period(self.start_bits, self.target_bits, self.quantization_period)
        return self


class WeightQuantizationGroup(GroupSection):
    """Weights with bits of their own."""

    params: WeightQuantizationParams = Field(default_factory=WeightQuantizationParams)
    """Bits."""


class WeightQuantizationSection(TechniqueSection):
    """Weights with few bits."""

    shared_parameters: SharedWeightQuantization = Field(default_factory=SharedWeightQuantization)
    """Of all groups."""
    different_groups: dict[str, WeightQuantizationGroup] = Field(default_factory=dict)  # type: ignore[assignment]
    """Groups by names of your choice."""

    @model_validator(mode="after")
    def _symmetric(self) -> WeightQuantizationSection:
        for name, group in self.different_groups.items():
            if self.shared_parameters.quantization_type == "asymmetric" and group.params.target_bits < 3:
                raise ValueError(
                    f"different_groups.{name}.params.target_bits = {group.params.target_bits} with quantization_type "
                    "asymmetric; ternary and binary weights are symmetric"
                )
        return self


# ------------------------------------------------------------------------------------------- activation quantisation


class SharedActivationQuantization(SharedSection):
    """Of all groups of activation quantisation."""

    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Steps around zero, or from the minimum to the maximum."""
    range_calibration: Literal["dynamic", "static"] = "static"
    """dynamic: each token (or image) has a range of its own, in each forward. static: one range for all, the mean of
    those seen in training with momentum, fixed for inference."""


class ActivationQuantizationParams(ParamsSection):
    """Of one group."""

    bits: int = Field(default=8, ge=2, le=32)
    """Bits of inputs: 2 to 16, 32 for none."""

    @field_validator("bits")
    @classmethod
    def _known(cls, bits: int) -> int:
        if 16 < bits < 32:
            raise ValueError(f"{bits} bits; allowed are 2 to 16, and 32 for none")
        return bits


class ActivationQuantizationGroup(GroupSection):
    """Modules whose inputs have few bits."""

    params: ActivationQuantizationParams = Field(default_factory=ActivationQuantizationParams)
    """Bits."""


class ActivationQuantizationSection(TechniqueSection):
    """Inputs of modules with few bits."""

    shared_parameters: SharedActivationQuantization = Field(default_factory=SharedActivationQuantization)
    """Of all groups."""
    different_groups: dict[str, ActivationQuantizationGroup] = Field(default_factory=dict)  # type: ignore[assignment]
    """Groups by names of your choice."""


# ----------------------------------------------------------------------------------------------------------- pruning


class PruningParams(ParamsSection):
    """Of one group."""

    dense_ratio: Ratio = 0.5
    """What is kept, as a share."""


class PruningGroup(GroupSection):
    """Modules of which a share is kept."""

    params: PruningParams = Field(default_factory=PruningParams)
    """The share."""


class RelatedPruningGroup(RelatedGroupSection):
    """Modules of which a share is kept, and those that lose with them."""

    params: PruningParams = Field(default_factory=PruningParams)
    """The share."""


class SharedSparsePruning(SharedSection):
    """Of all groups of sparse pruning."""

    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    """l1: the largest magnitudes stay, once for all. topk: scores are learned. snip_momentum: blocks by magnitude times
    gradient, in several strides."""
    schedule_offset_end: int = Field(default=0, ge=0)
    """snip_momentum: the step from which on the mask stays."""
    schedule_offset_stride: int = Field(default=1, ge=1)
    """snip_momentum: steps from one mask to the next."""
    block_pattern: str = "4x1"
    """"NxM": blocks of N outputs and M inputs that stay or go as a whole, or "N:M": of M inputs that are neighbours N
    go. Own: l1 and topk have it too, where it is given; else they go by single weights."""
    dense_ratio: Ratio = 0.1
    """snip_momentum: the share that is kept of all its weights together."""
    excluded_modules: list[str] = Field(default_factory=list)
    """Patterns of modules that are left alone."""

    @field_validator("block_pattern")
    @classmethod
    def _two_numbers(cls, pattern: str) -> str:
        found = re.fullmatch(r"(\d+)(x|:)(\d+)", pattern)
        if found is None or not int(found[1]) or not int(found[3]):
            raise ValueError(f"{pattern!r}; allowed is NxM or N:M with two numbers from 1, such as '4x1' or '2:4'")
        if found[2] == ":" and int(found[1]) >= int(found[3]):
            raise ValueError(f"{pattern!r} leaves nothing of {found[3]}; the first number is smaller")
        return pattern

    @model_validator(mode="after")
    def _ends(self) -> SharedSparsePruning:
        if self.enabled and self.method == "snip_momentum" and self.schedule_offset_end <= self.schedule_offset:
            raise ValueError(
                f"schedule_offset_end = {self.schedule_offset_end} with schedule_offset = {self.schedule_offset}; "
                "snip_momentum prunes between the two, so give a later end"
            )
        return self


class SparsePruningSection(TechniqueSection):
    """Single weights, or small blocks of them, that are zero."""

    shared_parameters: SharedSparsePruning = Field(default_factory=SharedSparsePruning)
    """Of all groups."""
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)  # type: ignore[assignment]
    """Groups by names of your choice; snip_momentum needs none."""


class SharedStructuredPruning(SharedSection):
    """Of all groups of row or channel pruning."""

    method: Literal["l1", "topk"] = "l1"
    """l1: those of the largest norm stay, once for all. topk: scores are learned."""


class RowPruningSection(TechniqueSection):
    """Rows of linear layers that go away."""

    shared_parameters: SharedStructuredPruning = Field(default_factory=SharedStructuredPruning)
    """Of all groups."""
    different_groups: dict[str, RelatedPruningGroup] = Field(default_factory=dict)  # type: ignore[assignment]
    """Groups by names of your choice."""


class SharedHeadPruning(SharedSection):
    """Of all groups of head pruning."""

    method: Literal["l1", "topk"] = "topk"
    """topk: scores are learned. l1, own: heads of the largest norm stay, once for all."""
    num_heads: int | None = Field(default=None, ge=1)
    """Heads of each layer; to be given."""

    @model_validator(mode="after")
    def _given(self) -> SharedHeadPruning:
        if self.enabled and self.num_heads is None:
            raise ValueError("num_heads is missing; give the number of heads of a layer")
        return self


class HeadPruningSection(TechniqueSection):
    """Heads of attention that go away."""

    shared_parameters: SharedHeadPruning = Field(default_factory=SharedHeadPruning)
    """Of all groups."""
    different_groups: dict[str, RelatedPruningGroup] = Field(default_factory=dict)  # type: ignore[assignment]
    """Groups by names of your choice: the output projections, related to those of queries, keys and values."""


class ChannelPruningSection(TechniqueSection):
    """Channels of convolutions that go away."""

    shared_parameters: SharedStructuredPruning = Field(default_factory=SharedStructuredPruning)
    """Of all groups."""
    different_groups: dict[str, RelatedPruningGroup] = Field(default_factory=dict)  # type: ignore[assignment]
    """Groups by names of your choice."""


# --------------------------------------------------------------------------------------------------- layer reduction


class LayerReductionSection(Section):
    """A student with fewer layers begins with layers of its teacher."""

    enabled: bool = False
    keep_number_layer: int | None = Field(default=None, ge=1)
    """Layers that the student has. null: as many as teacher_layer lists."""
    module_name_prefix: str | None = None
    """The list of layers, by its name: "bert.encoder.layer"."""
    teacher_layer: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Numbers of the teacher's layers from which those of the student begin, in order."""
    other_module_name: list[str] = Field(default_factory=list)
    """Names of further modules that begin as the teacher's: "bert.embeddings"."""

    @model_validator(mode="after")
    def _complete(self) -> LayerReductionSection:
        if not self.enabled:
            return self
        if not self.teacher_layer and not self.other_module_name:
            raise ValueError("neither teacher_layer nor other_module_name says what the student takes from its teacher")
        if self.teacher_layer and not self.module_name_prefix:
            raise ValueError("module_name_prefix is missing; give the name of the list of layers")
        if self.keep_number_layer not in (None, len(self.teacher_layer)):
            raise ValueError(
                f"keep_number_layer = {self.keep_number_layer}, and teacher_layer lists {len(self.teacher_layer)} "
                "layers; the two are the same number"
            )
        return self


class CompressionConfig(Section):
    """Quantisation, pruning and layer reduction (distribution zoo-compression)."""

    weight_quantization: WeightQuantizationSection = Field(default_factory=WeightQuantizationSection)
    """Weights with few bits."""
    activation_quantization: ActivationQuantizationSection = Field(default_factory=ActivationQuantizationSection)
    """Inputs of modules with few bits."""
    sparse_pruning: SparsePruningSection = Field(default_factory=SparsePruningSection)
    """Weights that are zero."""
    row_pruning: RowPruningSection = Field(default_factory=RowPruningSection)
    """Rows of linear layers that go away."""
    head_pruning: HeadPruningSection = Field(default_factory=HeadPruningSection)
    """Heads of attention that go away."""
    channel_pruning: ChannelPruningSection = Field(default_factory=ChannelPruningSection)
    """Channels of convolutions that go away."""
    layer_reduction: LayerReductionSection = Field(default_factory=LayerReductionSection)
    """Fewer layers than a teacher."""

    @property
    def techniques(self) -> Mapping[str, TechniqueSection]:
        """Those that are asked for, by name."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: s for name, s in found.items() if isinstance(s, TechniqueSection) and s.enabled}

    @property
    def enabled(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.techniques) or self.layer_reduction.enabled

    def contradictions(self, config: Config) -> Iterable[str]:
        yield from self.problems()
        if not self.weight_quantization.enabled or config.bf16.enabled or config.fp16.enabled:
            return
        if not self.weight_quantization.shared_parameters.quantize_weight_in_forward:
            yield (
                f"{ROOT}.weight_quantization.shared_parameters.quantize_weight_in_forward = false (its default) means "
                "16-bit weights that are rounded beside fp32 masters, and there are no 16-bit weights: enable bf16 or "
                "fp16, or set it to true"
            )

    def problems(self) -> Iterable[str]:
        """Sentences about what cannot be meant, whatever the rest of the document says."""
        for name, section in self.techniques.items():
            free = isinstance(section, SparsePruningSection) and section.shared_parameters.method == "snip_momentum"
            if not section.different_groups and not free:
                yield (
                    f"{ROOT}.{name}: enabled, and different_groups is empty, so that nothing would come of it; give a "
                    f'group, {{"all": {{"params": {{}}, "modules": ["*"]}}}}'
                )
        for name in type(self).model_fields:
            given: Any = getattr(self, name)
            if isinstance(given, TechniqueSection) and given.different_groups:
                shared = given.shared_parameters
                if not shared.enabled and "enabled" not in shared.model_fields_set:
                    yield (
                        f"{ROOT}.{name}: has groups and no shared_parameters.enabled, which is false by default, so "
                        "that nothing would come of them; give it"
                    )
