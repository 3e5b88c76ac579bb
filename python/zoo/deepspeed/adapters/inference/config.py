"""``deepspeed.inference.config``: what ``init_inference`` is given.

Unknown keys are errors that name the nearest ones. Keys of former times are put where they are now. What becomes of
each value is in :mod:`.fates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator, model_validator

from zoo.deepspeed.adapters.configuration.sections import DeepSpeedConfigModel, DeepSpeedZeroConfig
from zoo.deepspeed.adapters.utilities.logs import warning_once
from zoo.registry.errors import near


class DtypeEnum(Enum):
    """Types of weights, and the names that they go by: ``DtypeEnum("half") is DtypeEnum.fp16``."""

    fp16 = torch.float16, "torch.float16", "fp16", "float16", "half"
    fp32 = torch.float32, "torch.float32", "fp32", "float32", "float"
    bf16 = torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16", "bfloat"
    int8 = torch.int8, "torch.int8", "int8"

    def __new__(cls, *values: Any) -> DtypeEnum:
        made = object.__new__(cls)
        made._value_ = values[0]
        for value in values[1:]:
            cls._value2member_map_[value] = made
        return made


class MoETypeEnum(str, Enum):
    """Whether experts are beside a dense layer."""

    residual = "residual"
    standard = "standard"


class QuantTypeEnum(str, Enum):
    """Whether zero is in the middle of a group."""

    asym = "asymmetric"
    sym = "symmetric"


class Settings(DeepSpeedConfigModel):
    """A section of it: a key under two names has one value, and one that nobody knows is told with those like it."""

    former: ClassVar[frozenset[str]] = frozenset()
    """Keys that are taken and are no fields."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        found = by_field(cls, values)
        known = [*cls.model_fields, *(f.alias for f in cls.model_fields.values() if f.alias), *cls.former]
        for key in found:
            if key not in known:
                like = near(str(key), known)
                raise ValueError(
                    f"{key!r} is no key of {cls.__name__}; "
                    + (f"near it: {', '.join(like)}." if like else f"its keys are {', '.join(cls.model_fields)}.")
                )
        return found


def by_field(section: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """With the names of fields in the place of their other names.

    Raises:
        ValueError: one is there under both, with two values.
    """
    found = dict(values)
    for name, field in section.model_fields.items():
        if field.alias and field.alias in found:
            value = found.pop(field.alias)
            if name in found and found[name] != value:
                raise ValueError(f"{name} is {found[name]!r}, and {field.alias}, another name of it, is {value!r}.")
            found[name] = value
    return found


class DeepSpeedMoEConfig(Settings):
    """Experts of a model that generates."""

    enabled: bool = True
    ep_size: int = Field(1, ge=1)
    moe_experts: list[int] = Field([1], alias="num_experts")
    type: MoETypeEnum = MoETypeEnum.standard
    ep_mp_group: object = None
    ep_group: object = Field(None, alias="expert_group")

    @field_validator("moe_experts", mode="before")
    @classmethod
    def _each(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value


class DeepSpeedTPConfig(Settings):
    """Who splits the layers of a model that generates."""

    enabled: bool = True
    tp_size: int = Field(1, ge=1)
    tp_grain_size: int = Field(64, ge=1)
    mpu: object = None
    tp_group: object = None


class BaseQuantConfig(Settings):
    """Bits and groups."""

    enabled: bool = True
    num_bits: int = 8
    q_type: QuantTypeEnum = QuantTypeEnum.sym
    q_groups: int = Field(1, ge=1)


class WeightQuantConfig(BaseQuantConfig):
    """Of weights."""

    quantized_initialization: dict[str, Any] = Field(default_factory=dict)
    post_init_quant: dict[str, Any] = Field(default_factory=dict)


class ActivationQuantConfig(BaseQuantConfig):
    """Of activations."""


class QKVQuantConfig(Settings):
    """Of the layers that make queries, keys and values."""

    enabled: bool = True


class InferenceQuantizationConfig(Settings):
    """``quant``: sections, a number of groups, or (mlp_extra_grouping, number of groups). In
    ``deepspeed.inference.config`` its name is ``QuantizationConfig``.

    Attributes:
        mlp_extra_grouping: matrices of perceptrons have twice the groups; the first member of the tuple.
    """

    enabled: bool = True
    activation: ActivationQuantConfig = ActivationQuantConfig()
    weight: WeightQuantConfig = WeightQuantConfig()
    qkv: QKVQuantConfig = QKVQuantConfig()
    mlp_extra_grouping: bool = False

    @model_validator(mode="before")
    @classmethod
    def _groups(cls, values: Any) -> Any:
        if isinstance(values, bool):
            return {"enabled": values}
        if isinstance(values, int):
            return {"weight": {"q_groups": values}}
        if isinstance(values, (tuple, list)):
            if len(values) != 2 or not isinstance(values[0], bool) or type(values[1]) is not int:
                raise ValueError(f"quant={values!r}: a tuple is (mlp_extra_grouping, groups), as (True, 8).")
            return {"mlp_extra_grouping": values[0], "weight": {"q_groups": values[1]}}
        return values


class InferenceCheckpointConfig(Settings):
    """Where weights are read from and written to."""

    checkpoint_dir: str | None = None
    save_mp_checkpoint_path: str | None = None
    base_dir: str | None = None


_MOVED = {
    "mp_size": ("tensor_parallel", "tp_size"), "mpu": ("tensor_parallel", "mpu"), "ep_size": ("moe", "ep_size"),
    "ep_group": ("moe", "ep_group"), "expert_group": ("moe", "ep_group"), "ep_mp_group": ("moe", "ep_mp_group"),
    "expert_mp_group": ("moe", "ep_mp_group"), "moe_experts": ("moe", "moe_experts"), "moe_type": ("moe", "type"),
}  # fmt: skip
"""Keys of former times → where they are now."""
_NONE = object()


class DeepSpeedInferenceConfig(Settings):
    """What ``init_inference`` is given. Keys of former times (``mp_size``, ``ep_size``, ...) are put where they are
    now, with a warning."""

    former: ClassVar[frozenset[str]] = frozenset({*_MOVED, "replace_method"})

    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")
    dtype: torch.dtype = torch.float16
    tensor_parallel: DeepSpeedTPConfig = Field(DeepSpeedTPConfig(), alias="tp")
    enable_cuda_graph: bool = False
    use_triton: bool = False
    triton_autotune: bool = False
    zero: DeepSpeedZeroConfig = Field(default_factory=DeepSpeedZeroConfig)
    triangular_masking: bool = Field(True, alias="tm")
    moe: DeepSpeedMoEConfig = DeepSpeedMoEConfig()
    keep_module_on_host: bool = False
    quant: InferenceQuantizationConfig = InferenceQuantizationConfig()
    checkpoint: str | dict[str, Any] | None = None
    base_dir: str = ""
    set_empty_params: bool = False
    save_mp_checkpoint_path: str | None = None
    checkpoint_config: InferenceCheckpointConfig = Field(InferenceCheckpointConfig(), alias="ckpt_config")
    return_tuple: bool = True
    training_mp_size: int = Field(1, ge=1)
    injection_policy: dict[Any, Any] | None = Field(None, alias="injection_dict")
    injection_policy_tuple: tuple[Any, ...] | None = None
    config: dict[str, Any] | None = Field(None, alias="args")
    max_out_tokens: int = Field(1024, alias="max_tokens", gt=0)
    min_out_tokens: int = Field(1, alias="min_tokens", ge=0)
    transposed_mode: bool = False

    @model_validator(mode="before")
    @classmethod
    def _former_keys(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        found = by_field(cls, values)
        if found.pop("replace_method", "auto") not in ("auto", None):
            warning_once("replace_method says nothing any more; leave it out.")
        if isinstance(found.get("moe"), bool):
            found["moe"] = DeepSpeedMoEConfig(enabled=found["moe"])
        for old, (section, new) in _MOVED.items():
            if old not in found:
                continue
            before = found.get(section) or {}
            if isinstance(before, Mapping):
                before = by_field(cls.model_fields[section].annotation, before)  # type: ignore[arg-type]
            else:
                before = {name: getattr(before, name) for name in before.model_fields_set}
            value = found.pop(old)
            if before.get(new, _NONE) not in (_NONE, value):
                raise ValueError(f"{old} is {value!r}, and {section}.{new}, its name now, is {before[new]!r}.")
            warning_once(f"{old} is {section}.{new} now.")
            found[section] = {**before, new: value}
        return found

    @field_validator("dtype", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        try:
            return DtypeEnum(value).value
        except ValueError:
            raise ValueError(f"{value!r}; it is fp32, bf16, fp16 or int8, by name or as torch has it.") from None
