"""``deepspeed.runtime.tensor_parallel``: the section ``tensor_parallel`` as a class, and cutting a model by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters.communication import groups
from zoo.deepspeed.adapters.configuration.sections import like
from zoo.deepspeed.adapters.inference.config import DeepSpeedTPConfig as TPConfig
from zoo.deepspeed.adapters.tensor.layers import comm_of
from zoo.deepspeed.adapters.tensor.specs import AutoTPConfig, AutoTPPresets, merge_autotp_configs
from zoo.tensor.config import TensorParallelConfig
from zoo.tensor.huggingface import plan_of
from zoo.tensor.splitting import split

_Keys: Any = like(TensorParallelConfig)


class TPTrainingConfig(_Keys):  # type: ignore[misc]
    """The section ``tensor_parallel``."""

    dtype: torch.dtype = torch.float16
    tensor_parallel: TPConfig = Field(default_factory=TPConfig, alias="tp")
    injection_policy_tuple: tuple[Any, ...] | None = None

    def get_partition_config_object(self) -> AutoTPConfig | None:
        """The specs of ``partition_config``, then those of ``preset_model``; None without either."""
        found = AutoTPPresets.get_preset(self.preset_model) if self.preset_model else None
        if self.partition_config:
            own = AutoTPConfig.from_dict(self.partition_config)
            found = merge_autotp_configs(found, own) if found is not None and own.use_default_specs else own
        if found is not None:
            found.tp_size = self.autotp_size
        return found


def get_tensor_parallel_config(ds_config: Mapping[str, Any]) -> TPTrainingConfig:
    """The section of a document; defaults where it has none."""
    return TPTrainingConfig(**(ds_config.get("tensor_parallel") or {}))


class TpTrainingManager:
    """Cuts a model over the ranks that share layers (``groups.get_tensor_model_parallel_group()``), by the plan of its
    family. ``deepspeed.initialize`` does it by the section ``tensor_parallel``.

    Args:
        model: whole, the same on all ranks. tp_size: how many ranks. dtype: kept for the configuration.
    """

    def __init__(self, model: nn.Module, tp_size: int, dtype: torch.dtype) -> None:
        group = None if tp_size == 1 else groups.get_tensor_model_parallel_group()  # which a job without has not
        comm = comm_of(group)
        size = 1 if comm is None else comm.size
        if size != tp_size:
            raise ConfigError(
                f"TpTrainingManager(tp_size={tp_size}) where {size} ranks share layers: give that, or initialize "
                f'a document with {{"tensor_parallel": {{"autotp_size": {tp_size}}}}}.'
            )
        self.module, self.tp_config = model, TPConfig(tp_size=tp_size, tp_group=group)
        self.config = TPTrainingConfig(dtype=dtype, autotp_size=tp_size, tp={"tp_size": tp_size})
        if comm is not None:
            split(model, plan_of(model), comm)
