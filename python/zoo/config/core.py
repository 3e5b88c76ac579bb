"""The sections that belong to nobody else, and `Config`, the root that holds all sections.

Names and defaults are those of a ds_config document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator

from zoo.config import later
from zoo.config.choice import ComponentChoice
from zoo.config.fates import Fate, refused, unnecessary
from zoo.config.mesh import Mesh
from zoo.config.section import OWN, Section
from zoo.config.tree import Tree

__all__ = [
    "Bf16",
    "Comm",
    "Config",
    "DataTypes",
    "Fp16",
    "Optimizer",
    "Scheduler",
    "TorchAutocast",
    "make_config",
]


_MASTERS = "updates are made on float32 copies of the parameters"


class Optimizer(ComponentChoice):
    """Which optimizer, such as "AdamW", and its options."""

    kind: ClassVar[str] = "optimizer"
    runtime: ClassVar[tuple[str, ...]] = ("params", "parts", "peers")


class Scheduler(ComponentChoice):
    """Which learning-rate schedule, such as "WarmupLR", and its options."""

    kind: ClassVar[str] = "lr_schedule"
    runtime: ClassVar[tuple[str, ...]] = ("optimizer",)
    options: ClassVar[Mapping[str, Fate]] = {
        "last_batch_iteration": refused("a schedule begins with the run, or where the checkpoint ended", -1),
    }


class Fp16(Section):
    """Training in float16 with a loss scale, fixed or dynamic."""

    enabled: bool = False
    loss_scale: float = Field(default=0.0, ge=0)
    """Fixed loss scale; 0 means dynamic."""
    initial_scale_power: int = Field(default=16, ge=0, le=126)
    """A dynamic scale starts at 2 to this power."""
    loss_scale_window: int = Field(default=1000, gt=0)
    """Steps without overflow after which a dynamic scale doubles."""
    hysteresis: int = Field(default=2, ge=1)
    """Overflows to sit out before a dynamic scale halves."""
    consecutive_hysteresis: bool = False
    """Whether a step without overflow starts the count of overflows anew."""
    min_loss_scale: float = Field(default=1.0, gt=0)
    """A dynamic scale never falls below this."""
    auto_cast: bool = False
    """Whether floating-point tensors among the model's arguments are cast to float16."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "fp16_master_weights_and_grads": refused(_MASTERS, False),
    }

    def contradictions(self, config: Config) -> Iterable[str]:
        if self.enabled and config.bf16.enabled:
            yield "fp16.enabled and bf16.enabled are both true; a model trains in one of the two, disable the other"
        if self.loss_scale == 0 and self.min_loss_scale > 2.0**self.initial_scale_power:
            yield (
                f"fp16.min_loss_scale = {self.min_loss_scale:g} is above the first scale, "
                f"2**fp16.initial_scale_power = {2.0**self.initial_scale_power:g}; lower the one or raise the other"
            )


class Bf16(Section):
    """Training in bfloat16 with float32 master weights."""

    enabled: bool = False
    auto_cast: Annotated[bool, OWN] = False
    """Whether floating-point tensors among the model's arguments are cast to bfloat16."""

    check_grad_overflow: bool = True
    """A step whose gradients have a norm that is not finite is skipped and counted. False: it is made, and parameters
    become NaN where the gradients say so."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "immediate_grad_update": unnecessary(
            "gradients are added up as soon as they are there", False, nothing=(True,)
        ),
        "bf16_master_weights_and_grads": refused(_MASTERS, False),
        "bf16_optimizer_states": refused("states are float32 under 16-bit parameters", False),
    }


class TorchAutocast(Section):
    """The model's forward runs under ``torch.autocast``; parameters and gradients stay in float32."""

    enabled: bool = False
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """What operations compute in that autocast takes for safe."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "lower_precision_safe_modules": refused(
            "torch says what autocast casts, and communication_data_type in what type gradients travel", None, list,
            nothing=([], [f"torch.nn.{name}" for name in ("Linear", "Conv1d", "Conv2d", "Conv3d")]),
        ),
    }  # fmt: skip

    def contradictions(self, config: Config) -> Iterable[str]:
        if self.enabled and (config.bf16.enabled or config.fp16.enabled):
            yield (
                "torch_autocast.enabled, and bf16.enabled or fp16.enabled: with parameters in 16 bits nothing is cast; "
                "disable one of the two"
            )


class DataTypes(Section):
    """Types of gradients and buffers."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """Type in which a rank keeps gradients and adds up those of the micro-batches of a step; null for the type of the
    parameters."""
    param_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """Type of parameters in the forward. fp16.enabled and bf16.enabled say it; here it can only be said again."""
    buffer_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """Type that floating-point buffers of the model are cast to; null: they keep theirs, but for the running statistics
    of BatchNorm, which have the type of its weights."""
    keep_in_fp32_modules: Literal["auto"] | list[str] = "auto"
    """Names of buffers that are float32 under fp16 and bf16, whatever buffer_dtype says: parts of their full names, "*"
    for any characters. "auto": what the model itself lists, as those of transformers do."""

    def contradictions(self, config: Config) -> Iterable[str]:
        enabled = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
        if self.param_dtype not in (None, enabled):
            yield (
                f"data_types.param_dtype is {self.param_dtype!r}, and fp16.enabled and bf16.enabled say {enabled}; "
                "leave param_dtype out"
            )


class Comm(Section):
    """How collectives are run."""

    check: bool = False
    """Whether ranks compare what they are about to do before each collective, so that a divergence names its ranks."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds after which a collective that nobody joins is an error."""


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


def _batch_field() -> Any:
    # The value is always set before validation (zoo.config.batch); the default only keeps the key optional.
    return Field(default=1, gt=0, json_schema_extra=_without_default)


class Config(Section):
    """A whole configuration. Sections of other packages are attributes too: ``config.zero_optimization.stage``."""

    train_batch_size: int = _batch_field()
    """Samples in one optimizer step, over all ranks."""
    train_micro_batch_size_per_gpu: int = _batch_field()
    """Samples in one forward and backward pass of one rank."""
    gradient_accumulation_steps: int = _batch_field()
    """Passes of each rank in one optimizer step."""
    steps_per_print: int | None = Field(default=10, gt=0)
    """Optimizer steps between progress lines; null for none."""
    gradient_clipping: float = Field(default=0.0, ge=0)
    """Largest allowed norm of all gradients; 0 for no clipping."""
    wall_clock_breakdown: bool = False
    """Whether the seconds of forward, backward and update are measured: metrics "time/..." of each step."""
    seed: int = Field(default=1234, ge=0)
    """Seed of every random number that zoo draws."""
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    fp16: Fp16 = Field(default_factory=Fp16)
    bf16: Bf16 = Field(default_factory=Bf16, alias="bfloat16")
    torch_autocast: TorchAutocast = Field(default_factory=TorchAutocast)
    data_types: DataTypes = Field(default_factory=DataTypes)
    comm: Comm = Field(default_factory=Comm)
    mesh: Mesh = Field(default_factory=Mesh)

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _tree: Tree = PrivateAttr()
    _unused: dict[str, Any] = PrivateAttr(default_factory=dict)
    _world_size: int = PrivateAttr(default=1)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    fates: ClassVar[Mapping[str, Fate]] = {**later.KEYS, **later.SECTIONS}

    def __getattr__(self, name: str) -> Any:
        # A section that the document does not have is made of defaults when somebody asks for it.
        if name.startswith("_"):
            return super().__getattr__(name)  # type: ignore[misc]
        if name not in self._unused:
            self._unused[name] = self._tree.unused(name)
        return self._unused[name]

    @classmethod
    def translate(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        notes: list[str] = []
        for root in cls.__bases__[1:]:  # classes with keys of the root, see Tree.root
            if issubclass(root, Section):
                raw, more = root.translate(raw)
                notes += more
        return raw, notes

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, value: Any) -> Any:
        # Other tools switch the progress line off by writing infinity.
        return None if isinstance(value, float) and math.isinf(value) and value > 0 else value

    def contradictions(self, config: Config) -> Iterable[str]:
        for root in self._tree.roots:
            yield from root.contradictions(self, config)

    @property
    def world_size(self) -> int:
        """Ranks for which the batch sizes were solved: those of the job."""
        return self._world_size

    @property
    def batch_ranks(self) -> int:
        """Into how many parts the ranks cut a batch: all of them, or those along some axes of the mesh."""
        return self.mesh.batch_ranks(self._world_size)

    def asks_for(self, name: str) -> bool:
        """Whether the document gives something for a section and does not switch it off."""
        given = any(path == name or path.startswith(f"{name}.") for path in self._sources)
        section = getattr(self, name, None) if given else None
        return section is not None and bool(getattr(section, "enabled", True))

    @property
    def package_sections(self) -> Mapping[str, type[Section]]:
        """Sections of packages that the document has, by name; not those of the application."""
        return {name: section for name, (section, demanded) in self._tree.sections.items() if not demanded}

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every key of the root and its value; those that the document does not have too."""
        whole = self._tree.whole().root
        yield from ((name, getattr(self, name)) for name in whole.model_fields)

    def source(self, path: str) -> str:
        """Where the value at a dotted path came from: a file, a dict, an override, "derived …" or "default"."""
        return self._sources.get(path, "default")

    def explain(self, *, given: bool = False) -> str:
        """Every value with where it came from, one a line; then what was translated, one sentence a line.

        Args:
            given: leave out what has its default value because nobody gave another.
        """
        from zoo.config.explain import explain

        return "\n".join([explain(self.items(), self._sources, given=given), *self._notes])

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about keys of the document that were translated, each beginning with its path."""
        return self._notes

    def to_dict(self) -> dict[str, Any]:
        """All values by their own names, ready for JSON."""
        values = self.model_dump(mode="json")
        for name, value in self.items():
            if name not in values:
                values[name] = value.model_dump(mode="json") if isinstance(value, Section) else value
        return values

    def __eq__(self, other: object) -> bool:
        """Same sections and same values, wherever they came from."""
        if not isinstance(other, Config):
            return NotImplemented
        return self.__dict__ == other.__dict__ or dict(self.items()) == dict(other.items())

    def __reduce__(self) -> tuple[Callable[..., Config], tuple[Any, ...]]:
        # The class is made for the sections at hand, so pickle has to make it again.
        return make_config, (self._tree, self._given, self._sources, self._world_size, self._notes)


def make_config(
    tree: Tree,
    given: dict[str, Any],
    sources: dict[str, str],
    world_size: int,
    notes: tuple[str, ...] = (),
) -> Config:
    """Validate given values and remember where they came from; raises pydantic's ValidationError."""
    config: Config = tree.root.model_validate(given)
    config._tree, config._given, config._sources, config._world_size = tree, given, sources, world_size
    config._notes = notes
    return config
