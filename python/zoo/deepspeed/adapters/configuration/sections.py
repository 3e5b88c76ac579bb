"""Sections of a configuration as the classes that programs read and make: ``DeepSpeedZeroConfig`` and others.

They hold what a document says, with DeepSpeed's defaults; what zoo does about each key is on the page of the
configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Union, get_args

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_serializer,
    field_validator,
    model_validator,
)

from zoo.config import ConfigError, Section
from zoo.config.core import Bf16, Fp16
from zoo.config.section import Documented, documented_default, is_own
from zoo.shard.config import ZeroConfig
from zoo.shard.offload.config import OffloadOptimizerConfig, OffloadParamConfig

INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT = "init_scale", "scale_window", "delayed_shift"
CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "consecutive_hysteresis", "min_scale"


class DeepSpeedConfigModel(BaseModel):
    """A section: unknown keys are errors, also when a value is set later; "auto" counts as not given.

    Args:
        strict: "auto" is a value like others.
    """

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**(data if strict else {key: value for key, value in data.items() if value != "auto"}))

    model_config = ConfigDict(
        validate_default=True, validate_assignment=True, use_enum_values=True, populate_by_name=True, extra="forbid",
        arbitrary_types_allowed=True, protected_namespaces=(),
    )  # fmt: skip

    @field_serializer("dtype", check_fields=False)
    def serialize_torch_dtype(self, dtype: torch.dtype) -> str:
        """A dtype by its name."""
        return str(dtype)


def like(section: type[Section]) -> Any:
    """A base class with the keys of a section of zoo that DeepSpeed has too, and DeepSpeed's defaults.

    Keys that zoo carries out are the section's fields, all others are in its table of fates; those of former times
    (translated ones) are left to the class.
    """
    keys: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if is_own(field):
            continue
        default = documented_default(field)
        kind: Any = field.annotation
        if default is not None and type(None) in get_args(kind):
            kind = Union[tuple(part for part in get_args(kind) if part is not type(None))]  # noqa: UP007
        bounds = [item for item in field.metadata if not isinstance(item, Documented)]
        for bound in bounds:
            kind = Annotated[kind, bound]
        keys[name] = (kind, Field(default, alias=field.alias))
    for name, fate in section.fates.items():
        if fate.what != "translated" and name not in keys:
            alias = fate.aliases[0] if fate.aliases else None
            keys[name] = (Any if fate.default is None else type(fate.default), Field(fate.default, alias=alias))
    return create_model(f"_{section.__name__}Keys", __base__=DeepSpeedConfigModel, __module__=__name__, **keys)


class ZeroStageEnum(int, Enum):
    """Stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 - another name of it


class OffloadDeviceEnum(str, Enum):
    """Where something is."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of states that can be elsewhere."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig(like(OffloadParamConfig)):  # type: ignore[misc]
    """``zero_optimization.offload_param``."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none


class DeepSpeedZeroOffloadOptimizerConfig(like(OffloadOptimizerConfig)):  # type: ignore[misc]
    """``zero_optimization.offload_optimizer``."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes go on beside the update."""
        return bool(self.pipeline_read or self.pipeline_write)


DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{family}.modeling_{family}.{name}SparseMoeBlock"
    for family, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
"""Modules whose parts are gathered together, because a rank may leave some of them out."""
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """``zero_optimization.leaf_module``: by class, by name, by the end of the name; a string is a list of one."""

    classes: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    names: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAMES))
    name_suffixes: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES))

    @model_validator(mode="before")
    @classmethod
    def _lists_without_repeats(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            raise ValueError(
                f"leaf_module is a {type(values).__name__}; it is an object of classes, names, name_suffixes."
            )
        lists = {key: [value] if isinstance(value, str) else value for key, value in values.items()}
        for key, value in lists.items():
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"leaf_module.{key} is a {type(value).__name__}; it is a list of text.")
        return {key: list(dict.fromkeys(map(str, value))) for key, value in lists.items()}


class DeepSpeedZeroConfig(like(ZeroConfig)):  # type: ignore[misc]
    """``zero_optimization``, whose keys of stage 3 may begin with "stage3\\_".

    What is not given has DeepSpeed's default here; what zoo does then is what the engine's ``zero_*()`` say.
    """

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    overlap_comm: bool | None = None
    """None: True at stage 3."""
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="before")
    @classmethod
    def _former_keys(cls, values: Any) -> Any:
        """``cpu_offload`` and its like, of former times."""
        if not isinstance(values, Mapping):
            return values  # which is refused as what it is
        found = dict(values)
        pinned = found.pop("cpu_offload_use_pin_memory", None)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if old in found and new in found:
                raise ValueError(f"{old} and {new} say the same thing in two ways; give {new}.")
            if found.pop(old, None):
                found[new] = {"device": "cpu", **({} if pinned is None else {"pin_memory": pinned})}
        if "stage3_gather_fp16_weights_on_model_save" in found:
            found["gather_16bit_weights_on_model_save"] = found.pop("stage3_gather_fp16_weights_on_model_save")
        return found

    @model_validator(mode="after")
    def _stages(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            # Past validate_assignment, which would come here again.
            self.__dict__["overlap_comm"] = self.stage == ZeroStageEnum.weights
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError("compute_grad_norm=false is supported only with ZeRO Stage 1 or 2")
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1.0 and self.stage != 3:
            raise ValueError("offload_optimizer.ratio below 1 is for ZeRO Stage 3.")
        return self


class DeepSpeedFP16Config(like(Fp16)):  # type: ignore[misc]
    """``fp16``. What only a dynamic scale has need be possible only where one is enabled."""

    loss_scale: float = Field(0.0, ge=0, allow_inf_nan=False)
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: int = 1

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _number(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise ValueError(f"fp16.{info.field_name} must be a number, and is {value!r}, a {type(value).__name__}.")
        return value

    @model_validator(mode="after")
    def _of_a_dynamic_scale(self) -> DeepSpeedFP16Config:
        for name in ("loss_scale_window", "min_loss_scale"):
            value = getattr(self, name)
            if self.enabled and self.loss_scale == 0 and value <= 0:
                raise ValueError(f"fp16.{name} must be above 0 where the loss scale is dynamic, and is {value}.")
        return self

    def initial_dynamic_scale(self) -> int:
        """The first loss scale."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """How the loss scale moves."""
        return {
            INITIAL_LOSS_SCALE: 2**self.initial_scale_power, SCALE_WINDOW: self.loss_scale_window,
            DELAYED_SHIFT: self.hysteresis, CONSECUTIVE_HYSTERESIS: self.consecutive_hysteresis,
            MIN_LOSS_SCALE: self.min_loss_scale,
        }  # fmt: skip


class DeepSpeedBF16Config(like(Bf16)):  # type: ignore[misc]
    """``bf16``."""

    check_grad_overflow: bool = True


def _shared(section: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys of zoo alone."""
    fields = section.model_fields
    return {key: value for key, value in given.items() if key not in fields or not is_own(fields[key])}


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The section of a document; true and false are stages 1 and 0."""
    section = param_dict.get("zero_optimization", {})
    if isinstance(section, bool):
        section = {"stage": int(section)}
    return DeepSpeedZeroConfig(**_shared(ZeroConfig, section))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section of a document."""
    return DeepSpeedFP16Config(**_shared(Fp16, param_dict.get("fp16", {})))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section of a document, under either of its names."""
    return DeepSpeedBF16Config(**_shared(Bf16, param_dict.get("bf16", param_dict.get("bfloat16", {}))))


# -- reading one key --------------------------------------------------------------------------------------------------


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """``param_dict[param_name]``, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """What a field is if it is not given.

    Raises:
        AssertionError: there is no such field, or it has to be given.
    """
    field = config.model_fields.get(field_name)
    if field is None:
        raise AssertionError(f"'{field_name}' is not a field in {config}; there are {', '.join(config.model_fields)}.")
    if field.is_required():
        raise AssertionError(f"'{field_name}' has to be given; it has no default.")
    return field.get_default(call_default_factory=True)


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of pairs, for ``json.load(..., object_pairs_hook=...)``.

    Raises:
        ValueError: a key is there twice.
    """
    pairs = list(ordered_pairs)
    keys = [key for key, _ in pairs]
    if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"given twice: {', '.join(twice)}. Keep one of them.")
    return dict(pairs)
