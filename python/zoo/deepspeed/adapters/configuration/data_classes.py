"""Settings of parts that zoo does not have (yet): programs make and read them before anything is computed with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch

from zoo.deepspeed.adapters.configuration.sections import DeepSpeedConfigModel

# -- deepspeed.linear -------------------------------------------------------------------------------------------------


@dataclass
class LoRAConfig:
    """Of layers with a low-rank update of rank ``lora_r``, scaled by ``lora_alpha / lora_r``."""

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(
        default_factory=lambda: [*(f"{x}_proj" for x in "qkvo"), *(f"{x}_proj" for x in ("gate", "up", "down"))]
    )


@dataclass
class QuantizationConfig:
    """Of weights of ``q_bits`` bits, ``mantissa_bits`` of them of the mantissa, with a scale for each group."""

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8


# -- deepspeed.profiling, .compile, .runtime.tensor_parallel ----------------------------------------------------------


class DeepSpeedFlopsProfilerConfig:
    """The section ``flops_profiler`` of a document, as attributes."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        from zoo.deepspeed.adapters.configuration.plain_values import as_meant

        given = as_meant({"flops_profiler": param_dict.get("flops_profiler", {})})["flops_profiler"]
        self.enabled = given.get("enabled", False)
        self.recompute_fwd_factor = given.get("recompute_fwd_factor", 0.0)
        self.profile_step = given.get("profile_step", 1)
        self.module_depth = given.get("module_depth", -1)
        self.top_modules = given.get("top_modules", 1)
        self.detailed = given.get("detailed", True)
        self.output_file = given.get("output_file", None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class CompileConfig(DeepSpeedConfigModel):
    """The section ``compile``."""

    deepcompile: bool = False
    autoep_non_moe: bool = False
    free_activation: bool = False
    free_activation_threshold: int = 10 * 1024 * 1024
    offload_activation: bool = False
    offload_activation_pin_memory: bool = True
    offload_opt_states: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    debug_log: bool = False
    offload_parameters: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    keep_int_input_tensors: bool = True
    keep_all_input_tensors: bool = False
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = None


class AUTOTP_MODE(Enum):
    """What layers are split for."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"


class TPConfig(DeepSpeedConfigModel):
    """Who splits layers: a group, an mpu, or the size of groups of consecutive ranks."""

    tp_size: int = 1
    tp_grain_size: int = 1
    mpu: object = None
    tp_group: object = None


# -- deepspeed.runtime.rollout ----------------------------------------------------------------------------------------


@dataclass
class SamplingConfig:
    """How answers are drawn; ``top_k=-1``, or None for it or ``top_p``: from all tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


def _same_matrix(name: str, ids: torch.Tensor, mask: torch.Tensor) -> None:
    if ids.dim() != 2:
        raise ValueError(f"{name} must be 2-D, a row for each sequence, and has the shape {tuple(ids.shape)}.")
    if mask.shape != ids.shape:
        raise ValueError(f"the mask of {name}, {tuple(mask.shape)}, does not match its shape {tuple(ids.shape)}.")


@dataclass
class RolloutRequest:
    """Prompts (B, T), padded on the left, and which of their tokens are real.

    Raises:
        ValueError: no matrices of one shape.
    """

    prompt_ids: torch.Tensor
    prompt_attention_mask: torch.Tensor

    def __post_init__(self) -> None:
        _same_matrix("prompt_ids", self.prompt_ids, self.prompt_attention_mask)


@dataclass
class RolloutBatch:
    """Prompts with answers (B, T), which tokens are real (B, T), and where each answer begins (B,).

    Raises:
        ValueError: other shapes.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_start_idx: torch.Tensor

    def __post_init__(self) -> None:
        _same_matrix("input_ids", self.input_ids, self.attention_mask)
        if self.response_start_idx.shape != (len(self.input_ids),):
            shape = tuple(self.response_start_idx.shape)
            raise ValueError(f"response_start_idx must be 1-D of length {len(self.input_ids)}, and is {shape}.")

    @property
    def batch_size(self) -> int:
        """B."""
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        """T."""
        return int(self.input_ids.shape[1])


@dataclass
class RolloutConfig:
    """Which engine draws answers."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class HybridEngineRolloutConfig:
    """Of the engine that trains and generates."""

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


class RolloutEngine(ABC):
    """What draws answers for reinforcement learning: ``HybridEngineRollout``, or a program's own."""

    name = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answers to prompts."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Take the weights that training has now."""

    def shutdown(self) -> None:  # noqa: B027 - an engine need hold nothing
        """Free what it holds."""


# -- deepspeed.autotuning.utils ---------------------------------------------------------------------------------------


def get_val_by_key(d: Mapping[str, Any], k: str) -> Any:
    """The first value of a key in a document or in the sections beneath it; None where there is none."""
    if k in d:
        return d[k]
    for value in d.values():
        if isinstance(value, Mapping):
            found = get_val_by_key(value, k)
            if found is not None:
                return found
    return None


def set_val_by_key(d: dict[str, Any], k: str, vv: Any) -> None:
    """Set the key wherever it is, in the document and in every section beneath."""
    if k in d:
        d[k] = vv
    for value in d.values():
        if isinstance(value, dict):
            set_val_by_key(value, k, vv)
