"""What Megatron's programs read of ``deepspeed.checkpointing`` beside its functions."""

from __future__ import annotations

from typing import Any

import torch

from zoo.activation_checkpointing import CudaRNGStatesTracker, get_cuda_rng_tracker
from zoo.activation_checkpointing.rng import MODEL_PARALLEL, set_state
from zoo.comm import local_device

_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL


class _SharedTracker(CudaRNGStatesTracker):
    """Whatever ``get_cuda_rng_tracker()`` gives where it is asked: a constant that programs import once."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name == "__class__" else getattr(get_cuda_rng_tracker(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(get_cuda_rng_tracker(), name, value)


_CUDA_RNG_STATE_TRACKER = _SharedTracker()


def _set_cuda_rng_state(new_state: torch.Tensor, device: int | str | torch.device = -1) -> None:
    """The default generator of a device goes on from ``new_state``, (n,) uint8; -1: of the GPU in use, without one of
    the CPU."""
    if isinstance(device, int):
        here = local_device()
        device = here if device < 0 or here.type == "cpu" else torch.device("cuda", device)
    set_state(new_state, torch.device(device))


def detach_variable(inputs: Any, device: torch.device | str | None = None) -> tuple[Any, ...]:
    """The same values with graphs of their own: tensors are detached, on ``device`` where it is given, and need a
    gradient where they did.

    Raises:
        ValueError: it is no tuple.
    """
    if not isinstance(inputs, tuple):
        raise ValueError(f"detach_variable() got a {type(inputs).__name__}; it takes a tuple of arguments.")
    return tuple(
        (x if device is None else x.to(device)).detach().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor)
        else x
        for x in inputs
    )


def extract_tensors(all_objects: Any) -> tuple[Any, Any, Any]:
    """(tensors, others, for each object whether it is a tensor), each a tuple where a tuple was given, else a list."""
    kind = tuple if isinstance(all_objects, tuple) else list
    flags = [isinstance(x, torch.Tensor) for x in all_objects]
    tensors = [x for x, flag in zip(all_objects, flags, strict=True) if flag]
    others = [x for x, flag in zip(all_objects, flags, strict=True) if not flag]
    return kind(tensors), kind(others), kind(flags)


def merge_tensors(tensor_objects: Any, non_tensor_objects: Any, tensor_flags: Any) -> tuple[Any, ...]:
    """The objects in their order again; see :func:`extract_tensors`."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors if flag else others) for flag in tensor_flags)
