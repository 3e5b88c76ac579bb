"""``DeepSpeedConfig``: what a configuration says, as attributes; and functions that read one key of it."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from zoo.config import Config, ConfigError
from zoo.config.batch import BATCH_KEYS, solve
from zoo.deepspeed.adapters.communication.comms_log import DeepSpeedCommsConfig
from zoo.deepspeed.adapters.configuration import keys
from zoo.deepspeed.adapters.configuration.plain_values import value_as_meant
from zoo.deepspeed.adapters.configuration.sections import (
    ZeroStageEnum,
    get_bfloat16_config,
    get_float16_config,
    get_scalar_param,
    get_zero_config,
)
from zoo.deepspeed.adapters.configuration.translation import find_document, gradient_allreduce_op, read_document

_log = logging.getLogger("zoo.deepspeed")

_OF_PARTS_TO_COME = {
    "flops_profiler": "flops_profiler_config", "autotuning": "autotuning_config", "hybrid_engine": "hybrid_engine",
    "compile": "compile_config", "tensor_parallel": "tensor_parallel_config",
    "expert_parallel": "expert_parallel_config",
}  # fmt: skip
"""Section → attribute."""
_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32, "torch.float32": torch.float32,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16, "torch.float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "bfp16": torch.bfloat16, "torch.bfloat16": torch.bfloat16,
}  # fmt: skip


def _reader(key: str) -> Callable[[Mapping[str, Any]], Any]:
    default = keys.CONSTANTS[f"{key.upper()}_DEFAULT"]

    kind = type(default) if isinstance(default, bool) else None

    def get(param_dict: Mapping[str, Any]) -> Any:
        return value_as_meant(kind, get_scalar_param(param_dict, key, default))

    get.__name__ = get.__qualname__ = f"get_{key}"
    get.__doc__ = f"``{key}`` of a document, {default!r} if it is not there."
    return get


get_train_batch_size = _reader("train_batch_size")
get_train_micro_batch_size_per_gpu = _reader("train_micro_batch_size_per_gpu")
get_gradient_accumulation_steps = _reader("gradient_accumulation_steps")
get_steps_per_print = _reader("steps_per_print")
get_dump_state = _reader("dump_state")
get_disable_allgather = _reader("disable_allgather")
get_prescale_gradients = _reader("prescale_gradients")
get_gradient_predivide_factor = _reader("gradient_predivide_factor")
get_gradient_clipping = _reader("gradient_clipping")
get_wall_clock_breakdown = _reader("wall_clock_breakdown")
get_memory_breakdown = _reader("memory_breakdown")
get_dataloader_drop_last = _reader("dataloader_drop_last")
get_log_level = _reader("log_level")
get_zero_allow_untested_optimizer = _reader("zero_allow_untested_optimizer")
get_zero_force_ds_cpu_optimizer = _reader("zero_force_ds_cpu_optimizer")


def get_communication_data_type(
    param_dict: Mapping[str, Any], comm_type: str = "communication_data_type", comm_data_type_default: Any = None
) -> torch.dtype | None:
    """The dtype in which something travels, None if it is not said.

    Raises:
        ValueError: another name than "fp32", "fp16" and "bf16".
    """
    name = get_scalar_param(param_dict, comm_type, comm_data_type_default)
    if name is None:
        return None
    if str(name).lower() not in _DTYPES:
        raise ValueError(f"{comm_type} = {name!r}; allowed are 'fp32', 'fp16' and 'bf16'.")
    return _DTYPES[str(name).lower()]


def _of_component(section: str, key: str) -> Callable[[Mapping[str, Any]], Any]:
    def get(param_dict: Mapping[str, Any]) -> Any:
        found = param_dict.get(section) or {}
        return found.get(key) if "type" in found else None

    get.__name__ = get.__qualname__ = f"get_{section}_{'name' if key == 'type' else key}"
    get.__doc__ = f"``{section}.{key}`` of a document, None if there is none."
    return get


get_optimizer_name = _of_component("optimizer", "type")
get_optimizer_params = _of_component("optimizer", "params")
get_scheduler_name = _of_component("scheduler", "type")
get_scheduler_params = _of_component("scheduler", "params")


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """``optimizer.params.max_grad_norm``, None if it is not there."""
    return (get_optimizer_params(param_dict) or {}).get("max_grad_norm")


def get_checkpoint_params(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``checkpoint``."""
    return dict(param_dict.get("checkpoint", {}))


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> str:
    """ "WARN", "IGNORE" or "FAIL".

    Raises:
        ConfigError: something else.
    """
    found = str(checkpoint_params.get("tag_validation", "WARN"))
    if found.upper() not in keys.CONSTANTS["CHECKPOINT_TAG_VALIDATION_MODES"]:
        raise ConfigError(f"checkpoint.tag_validation = {found!r}; allowed are 'Warn', 'Ignore' and 'Fail'.")
    return found.upper()


def get_data_types_params(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``data_types``."""
    return dict(param_dict.get("data_types", {}))


def get_pipeline_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``pipeline``."""
    defaults = {
        "stages": "auto", "partition": "best", "seed_layers": False, "activation_checkpoint_interval": 0,
        "pipe_partitioned": True, "grad_partitioned": True,
    }  # fmt: skip
    return {**defaults, **param_dict.get("pipeline", {})}


class DeepSpeedConfig:
    """What a configuration says.

    Args:
        config: a dict, the path of a file, or base64 of JSON.
        mpu: an object with ``get_data_parallel_world_size()``.
        mesh_device: a DeviceMesh with the axis "data_parallel".

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: solved for ``world_size``.
        zero_config, zero_optimization_stage, zero_enabled, float16_config, bfloat16_config, monitor_config,
        comms_config: sections.
        optimizer_name, optimizer_params, scheduler_name, scheduler_params: None if there is none.
        others: keys of the document under their own names.

    Raises:
        ValueError: (zoo.config.ConfigError and pydantic's among them) it cannot be read, or says what cannot be.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = document = find_document(None, config)
        self.global_rank, self.world_size = _place(document, mpu, mesh_device)
        self._read_keys(document)
        self._read_sections(document)
        given = {key: document[key] for key in BATCH_KEYS if document.get(key) not in (None, "auto")}
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value % 1:
                raise ConfigError(f"{key} = {value!r}; it is a whole number, 1 or more.")
            given[key] = int(value)
        if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(given):
            raise ConfigError("give train_batch_size or train_micro_batch_size_per_gpu.")
        solved = solve(given, dict.fromkeys(given, "the document"), self.world_size)
        for key, value in {**given, **solved}.items():
            setattr(self, key, value)

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    def _read_keys(self, document: Mapping[str, Any]) -> None:
        for key in (
            "steps_per_print", "dump_state", "disable_allgather", "prescale_gradients", "gradient_predivide_factor",
            "gradient_clipping", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last", "log_level",
            "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        ):  # fmt: skip
            setattr(self, key, globals()[f"get_{key}"](document))
        self.communication_data_type = get_communication_data_type(document)
        self.gradient_allreduce_op = gradient_allreduce_op(document)
        self.seq_parallel_communication_data_type = get_communication_data_type(
            document, "seq_parallel_communication_data_type", "fp32"
        )
        self.managed_gradient_accumulation = document.get("managed_gradient_accumulation", True)
        self.disable_python_gc = document.get("disable_python_gc", False)
        self.use_data_before_expert_parallel_ = document.get("use_data_before_expert_parallelism", False)
        name = get_optimizer_name(document)
        known = isinstance(name, str) and name.lower() in keys.OPTIMIZERS["DEEPSPEED_OPTIMIZERS"]
        self.optimizer_name = name.lower() if known else name
        self.optimizer_params = get_optimizer_params(document)
        self.optimizer_legacy_fusion = bool((document.get("optimizer") or {}).get("legacy_fusion", False))
        self.scheduler_name, self.scheduler_params = get_scheduler_name(document), get_scheduler_params(document)
        types = get_data_types_params(document)
        self.grad_accum_dtype, self.param_dtype = types.get("grad_accum_dtype"), types.get("param_dtype")
        self.buffer_dtype, self.keep_in_fp32_modules = (
            types.get("buffer_dtype"),
            types.get("keep_in_fp32_modules", "auto"),
        )
        checkpoint = self.checkpoint_config = get_checkpoint_params(document)
        self.checkpoint_parallel_write_pipeline = (checkpoint.get("parallel_write") or {}).get("pipeline_stage", False)
        mode = get_checkpoint_tag_validation_mode(checkpoint)
        self.checkpoint_tag_validation_enabled = mode != keys.ValidationMode.IGNORE
        self.checkpoint_tag_validation_fail = mode == keys.ValidationMode.FAIL
        self.load_universal_checkpoint = bool(checkpoint.get("load_universal", False))
        self.use_node_local_storage = bool(checkpoint.get("use_node_local_storage", False))

    def _read_sections(self, document: Mapping[str, Any]) -> None:
        from zoo.deepspeed.adapters.utilities.monitors import get_monitor_config

        self.zero_config = get_zero_config(document)
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > ZeroStageEnum.disabled
        self.float16_config, self.bfloat16_config = get_float16_config(document), get_bfloat16_config(document)
        if self.float16_config.enabled and self.bfloat16_config.enabled:
            raise ConfigError("fp16.enabled and bf16.enabled are both true; a model trains in one of the two.")
        autocast = document.get("torch_autocast", {})
        self.torch_autocast_enabled = bool(autocast.get("enabled", False))
        self.torch_autocast_dtype = get_communication_data_type(autocast, "dtype")
        self.torch_autocast_lower_precision_safe_modules = autocast.get("lower_precision_safe_modules")
        self.monitor_config = get_monitor_config(document)
        for key, name in _OF_PARTS_TO_COME.items():
            setattr(self, name, _settings(key, document))
        throughput = (document.get("timers") or {}).get("throughput") or {}
        self.timers_config = SimpleNamespace(**{"enabled": True, "synchronized": True, **throughput})
        self.data_efficiency_config = dict(document.get("data_efficiency") or {})
        self.data_efficiency_enabled = bool(self.data_efficiency_config.get("enabled", False))
        activation = document.get("activation_checkpointing", {})
        names = {
            "partition_activations": False, "contiguous_memory_optimization": False, "cpu_checkpointing": False,
            "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False,
        }  # fmt: skip
        self.activation_checkpointing_config = SimpleNamespace(
            **{name: activation.get(name, default) for name, default in names.items()}
        )
        self.pipeline = get_pipeline_config(document)
        self.aio_config = dict(document.get("aio", {}))
        self.comms_config = DeepSpeedCommsConfig(document)

    def print_user_config(self) -> None:
        """Log the document."""
        _log.info("  json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4, default=str))

    def print(self, name: str) -> None:
        """Log every attribute, and the document."""
        _log.info("%s:", name)
        for attribute, value in sorted(vars(self).items()):
            if attribute != "_param_dict":
                _log.info("  %s %s", attribute.ljust(38, "."), value)
        self.print_user_config()


def _settings(key: str, document: Mapping[str, Any]) -> SimpleNamespace:
    """What a section says that DeepSpeed has and whose keys are few here, with the documented defaults."""
    from zoo.config.fates import fates_of

    given = document.get(key) or {}
    return SimpleNamespace(**{**_defaults_of_section(key, fates_of(Config)), **given})


def _defaults_of_section(key: str, known: Mapping[str, Any]) -> dict[str, Any]:
    if key in known:
        return {name: copy.deepcopy(fate.default) for name, fate in known[key].keys.items()}
    from zoo import registry
    from zoo.config.section import is_own

    section = registry.get("config_section", key)
    fields = {
        name: field.get_default(call_default_factory=True)
        for name, field in section.model_fields.items()
        if not is_own(field)
    }
    others = {name: copy.deepcopy(fate.default) for name, fate in section.fates.items()}
    if key == "flops_profiler":
        del others["step"]  # programs write it; DeepSpeed does not read it
    return {**fields, **others}


def _place(document: Mapping[str, Any], mpu: Any, mesh: Any) -> tuple[int, int]:
    """(rank, data-parallel ranks)."""
    if not dist.is_initialized():
        return 0, 1
    rank, size = dist.get_rank(), dist.get_world_size()
    if mpu is not None:
        if hasattr(mpu, "get_data_parallel_world_size"):
            return rank, int(mpu.get_data_parallel_world_size())
        return rank, size // int(mpu.get_sequence_parallel_world_size())
    if mesh is not None:
        return rank, int(mesh["data_parallel"].size())
    axes = document.get("mesh")
    if isinstance(axes, Mapping):
        from zoo.config.mesh import Mesh

        return rank, Mesh.model_validate(axes).batch_ranks(size)
    return rank, size // int(document.get("sequence_parallel_size", 1))


class DeepSpeedConfigWriter:
    """A document that is read, changed and written.

    Attributes:
        data: it.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = {} if data is None else data

    def add_config(self, key: str, value: Any) -> None:
        """Set a key of the root."""
        self.data[key] = copy.deepcopy(value)

    def load_config(self, filename: str) -> None:
        """Take the document of a file of JSON."""
        if not Path(filename).is_file():
            raise FileNotFoundError(f"load_config({str(filename)!r}): there is no such file.")
        self.data = read_document(filename)

    def write_config(self, filename: str) -> None:
        """Write it as JSON."""
        Path(filename).write_text(json.dumps(self.data), encoding="utf-8")
