"""``deepspeed.zero.Init``: joins the job and keeps parameters in DeepSpeed's dtype; the rest is ``zoo.zero.Init``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import zoo.deepspeed.adapters.zero.parameters  # noqa: F401 (gives parameters their attributes)
from zoo import zero
from zoo.config import read_section
from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator
from zoo.deepspeed.adapters.configuration.translation import read_document, translated

_READ = ("zero_optimization", "bf16", "bfloat16", "fp16")
"""Sections of a document that say something about how a model is built."""


class Init(zero.Init):
    """:class:`zoo.zero.Init` for programs of DeepSpeed.

    The job's ranks are joined first, if a launcher has started some and nobody has: ``enabled=False`` too.

    Args:
        config_dict_or_path, config: in each form that ``initialize`` takes. Not looked at where ``enabled`` is False.
        dtype: of parameters with floating point. None: bf16 or fp16, where the configuration enables one, fp32 where
            it enables none; without a configuration fp16, or bf16 on an accelerator that has no fp16.
        own: ``materialise``, ``device``, ``aio`` of :class:`zoo.zero.Init`.

    Raises:
        ValueError: as of :class:`zoo.zero.Init`, and both of bf16 and fp16.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None, mem_efficient_linear: bool = True,
        remote_device: str | None = None, pin_memory: bool | None = None, config_dict_or_path: Any = None,
        config: Any = None, enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None,
        zero_param_parallel_group: Any = None, zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False, sequence_data_parallel_group: Any = None,
        param_swapper: Any = None, **own: Any,
    ) -> None:  # fmt: skip
        from zoo.deepspeed.adapters.root.entry import init_distributed

        init_distributed()
        if enabled and not isinstance(config_dict_or_path, zero.ZeroConfig):
            if config_dict_or_path is not None and config is None:
                config_dict_or_path = _of_building(config_dict_or_path)
            elif config is not None and config_dict_or_path is None:
                config = _of_building(config)
            dtype = dtype if dtype is not None else _dtype(config if config is not None else config_dict_or_path)
        super().__init__(
            module=module, data_parallel_group=data_parallel_group, mem_efficient_linear=mem_efficient_linear,
            remote_device=remote_device, pin_memory=pin_memory, config_dict_or_path=config_dict_or_path,
            config=config, enabled=enabled, dtype=dtype, mpu=mpu,
            zero_param_parallel_group=zero_param_parallel_group, zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            sequence_data_parallel_group=sequence_data_parallel_group, param_swapper=param_swapper, **own,
        )  # fmt: skip


def _of_building(config: Any) -> Any:
    """The part of a document that is read while a model is built."""
    if isinstance(config, zero.ZeroConfig):
        return config
    found = translated({key: value for key, value in read_document(config).items() if key in _READ})
    return {key: value for key, value in found.items() if key in _READ}


def _dtype(document: Any) -> torch.dtype | None:
    """What DeepSpeed keeps parameters in; None: a configuration that does not say it."""
    if document is None:
        return torch.float16 if get_accelerator().is_fp16_supported() else torch.bfloat16
    if not isinstance(document, Mapping):
        return None
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if read_section(name, document).enabled:
            return dtype
    return torch.float32
