"""The sections ``quantize_training`` and ``eigenvalue`` of a configuration.

Keys and defaults are those of DeepSpeed's page on MoQ; where its code has others, the page's are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from zoo.compression.config import ROOT, CompressionConfig, MixedSection, WeightQuantizationSection, known_bits
from zoo.compression.schedule import check_period
from zoo.config import Section
from zoo.config.fates import unnecessary

if TYPE_CHECKING:
    from zoo.config import Config

MOQ = "quantize_training"
OFF = 16
Kind = Literal["symmetric", "asymmetric"]


class BitsSection(Section):
    """From how many bits to how many."""

    start_bits: int = Field(default=16, ge=1, le=32)
    """Bits to begin with: 32 and 16 are none at all, 2 is ternary, 1 is binary."""
    target_bits: int = Field(default=16, ge=1, le=32)
    """Bits to end with, below 16."""

    _known = field_validator("start_bits", "target_bits")(known_bits)


class PeriodSection(Section):
    """When bits fall."""

    quantize_period: int = Field(default=100, ge=0)
    """Steps until bits fall by one for the first time; it doubles each time."""
    schedule_offset: int = Field(default=100, ge=0)
    """Steps that are over before it begins."""


class AlgorithmSection(Section):
    """How a weight is rounded."""

    q_type: Kind | None = None
    """Another place for ``quantize_type``."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest, or up with the probability of the fraction."""


class CurvatureSection(Section):
    """Layers where the loss is curved keep their bits for longer, up to 5 periods (zoo.compression.moq)."""

    enabled: bool = False
    verbose: bool = False
    """Say eigenvalues and factors in the log."""
    max_iter: int = Field(default=100, ge=1)
    """Steps of power iteration for a layer, at most."""
    tol: float = Field(default=1e-2, gt=0)
    """It ends when an eigenvalue changes by less than this share of itself."""
    stability: float = Field(default=1e-6, ge=0)
    """Added to the norm that a vector is divided by."""
    gas_boundary_resolution: int = Field(default=1, ge=1)
    """Curvature is looked at in every n-th step after the offset only; a layer whose bits have fallen waits for it."""
    layer_name: str = "bert.encoder.layer"
    """The list of layers, by its name."""
    layer_num: int = Field(default=0, ge=0)
    """How many of them, from the first on; 0: all. Weights elsewhere have the plain period."""


class EigenvalueSection(CurvatureSection):
    """Another place for ``quantize_training.eigenvalue`` (distribution zoo-compression)."""

    carried_by: ClassVar[str] = "zoo.compression"

    def contradictions(self, config: Config) -> Iterable[str]:
        return self.problems(getattr(config, MOQ))

    def problems(self, section: QuantizeTrainingSection) -> Iterable[str]:
        """Sentences about what cannot be meant beside ``quantize_training``."""
        if self.enabled and not section.enabled:
            yield f"eigenvalue.enabled without {MOQ}.enabled: it says when bits fall, and no bits do; enable both"
        if self.enabled and section.eigenvalue.enabled:
            yield f"eigenvalue.enabled and {MOQ}.eigenvalue.enabled: two places for the same; leave one out"


class QuantizeTrainingSection(Section):
    """MoQ: weights whose bits fall as training goes on (distribution zoo-compression)."""

    enabled: bool = False
    quantize_verbose: bool = False
    """Say in the log when bits change."""
    quantize_type: Kind = "symmetric"
    """Steps around zero, or from the minimum to the maximum. Bits below 3 are symmetric."""
    quantize_groups: int = Field(default=1, ge=1)
    """Into how many groups a weight is cut, row after row. Weights of embeddings have one for each row."""
    quantize_bits: BitsSection = Field(default_factory=BitsSection)
    """Bits."""
    quantize_schedule: PeriodSection = Field(default_factory=PeriodSection)
    """When they fall."""
    quantize_algo: AlgorithmSection = Field(default_factory=AlgorithmSection)
    """How weights are rounded."""
    fp16_mixed_quantize: MixedSection = Field(default_factory=MixedSection)
    """Mix the exact and the quantised value."""
    eigenvalue: CurvatureSection = Field(default_factory=CurvatureSection)
    """Periods by the curvature of the loss."""

    fates: ClassVar[dict[str, Any]] = {
        "quantizer_kernel": unnecessary("kernels are used where they are the same to the last bit", False),
    }

    @classmethod
    def translate(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """``quantize_rounding`` and ``quantize_eigenvalue`` are keys of sections now."""
        values, said = dict(raw), []
        moved = (("quantize_rounding", "quantize_algo", "rounding"), ("quantize_eigenvalue", "eigenvalue", "enabled"))
        for key, section, name in moved:
            if key not in values:
                continue
            value, inside = values.pop(key), dict(values.get(section) or {})
            if value is None:
                continue
            if inside.setdefault(name, value) != value:
                raise ValueError(f"{key} = {value!r} and {section}.{name} = {inside[name]!r}; leave one of the two out")
            values[section] = inside
            said.append(f"{key} is {section}.{name} now")
        return values, said

    def contradictions(self, config: Config) -> Iterable[str]:
        return self.problems(getattr(config, ROOT))

    def problems(self, beside: CompressionConfig) -> Iterable[str]:
        """Sentences about what cannot be meant, beside ``compression_training``."""
        if not self.enabled:
            return
        if beside.weight_quantization.enabled:
            yield f"{MOQ}.enabled and {ROOT}.weight_quantization: both quantise weights; leave one of the two out"
        bits, given = self.quantize_bits, self.quantize_algo.q_type
        if bits.target_bits >= OFF:
            yield (
                f"{MOQ}.quantize_bits.target_bits = {bits.target_bits}: {OFF} bits and more are not rounded, so that "
                "nothing would come of it; give fewer"
            )
        try:
            check_period(bits.start_bits, bits.target_bits, self.quantize_schedule.quantize_period)
        except ValueError as error:
            yield f"{MOQ}: {error}".replace("quantization_period", "quantize_schedule.quantize_period").rstrip(".")
        if given is not None and "quantize_type" in self.model_fields_set and given != self.quantize_type:
            yield f"{MOQ}.quantize_type = {self.quantize_type} and {MOQ}.quantize_algo.q_type = {given}; leave one out"
        if self.kind == "asymmetric" and bits.target_bits < 3:
            yield (
                f"{MOQ}.quantize_bits.target_bits = {bits.target_bits} with asymmetric steps; ternary and binary "
                "weights are symmetric"
            )

    @property
    def kind(self) -> Kind:
        """Symmetric or not, by whichever key says it."""
        return self.quantize_algo.q_type or self.quantize_type

    def as_weight_quantization(self) -> WeightQuantizationSection:
        """The same in the words of ``compression_training.weight_quantization``, with one group of all modules."""
        bits, schedule = self.quantize_bits, self.quantize_schedule
        shared = {
            "enabled": True, "quantize_weight_in_forward": True, "schedule_offset": schedule.schedule_offset,
            "quantize_groups": self.quantize_groups, "quantization_type": self.kind,
            "rounding": self.quantize_algo.rounding, "quantize_verbose": self.quantize_verbose,
            "fp16_mixed_quantize": self.fp16_mixed_quantize,
        }  # fmt: skip
        params = {
            "start_bits": bits.start_bits, "target_bits": bits.target_bits,
            "quantization_period": schedule.quantize_period,
        }  # fmt: skip
        groups = {"all": {"params": params, "modules": ["*"]}}
        return WeightQuantizationSection.model_validate({"shared_parameters": shared, "different_groups": groups})
