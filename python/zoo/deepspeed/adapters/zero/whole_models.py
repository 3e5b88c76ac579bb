"""What asks whether parameters are split, and what builds or shows models whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.deepspeed.adapters.zero.zero_init import Init
from zoo.shard import GatheredParameters


class MiCS_Init(Init):
    """``deepspeed.zero.Init`` with the arguments that DeepSpeed's has in this place.

    It splits parameters over all ranks; ``initialize`` brings them to the groups that ``mics_shard_size`` says.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None,
        sequence_data_parallel_group: Any = None, mem_efficient_linear: bool = True,
        remote_device: str | None = None, pin_memory: bool = False,
        config_dict_or_path: dict[str, Any] | str | Path | None = None,
        config: dict[str, Any] | str | Path | None = None, enabled: bool = True, dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            module=module, data_parallel_group=data_parallel_group, mem_efficient_linear=mem_efficient_linear,
            remote_device=remote_device, pin_memory=pin_memory, config_dict_or_path=config_dict_or_path,
            config=config, enabled=enabled, dtype=dtype, mpu=mpu,
            sequence_data_parallel_group=sequence_data_parallel_group,
        )  # fmt: skip


def is_zero_param(parameter: Any) -> bool:
    """Whether it is a parameter of stage 3, which has ``ds_id``."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


@contextlib.contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the parameters of an engine or model are whole, and its forwards gather nothing. Collective."""
    with GatheredParameters(list(model.parameters())):
        yield model


def apply_to_tensors_only(
    function: Callable[[torch.Tensor], Any], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:  # fmt: skip
    """``value`` with ``function`` of each tensor in it: in tuples, lists and dicts, which are changed in place.

    Args:
        warning_msg_fn: not called: what is no tensor stays as it is.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = apply_to_tensors_only(function, value[key])
        return value
    if isinstance(value, (tuple, list)):
        found = [apply_to_tensors_only(function, one) for one in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value
