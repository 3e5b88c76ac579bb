"""``deepspeed.git_version_info``: which versions and operations are here, found out when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.deepspeed.standin import VERSION

version = VERSION
git_hash = git_branch = "unknown"


def _two_numbers(given: Any) -> str:
    """ "2.15" of "2.15.0+cu132" or (2, 15, 0); "0.0" of None."""
    parts = [str(part) for part in given] if isinstance(given, tuple) else str(given or "0.0").split(".")
    return ".".join([*parts, "0"][:2])


def _torch_info() -> dict[str, Any]:
    # What torch was built for, also where no GPU is: programs compare versions of CUDA with what they need.
    cuda = torch.version.cuda
    on_gpu = torch.cuda.is_available()
    return {
        "version": _two_numbers(torch.__version__),
        "bf16_support": on_gpu and torch.cuda.is_bf16_supported(),
        "cuda_version": _two_numbers(cuda),
        "nccl_version": _two_numbers(torch.cuda.nccl.version() if cuda or torch.version.hip else None),  # type: ignore[no-untyped-call]
        "hip_version": _two_numbers(torch.version.hip),
    }


def _compatible_ops() -> dict[str, bool]:
    from zoo.deepspeed.adapters.utilities import op_builders

    found: dict[str, bool] = op_builders.__compatible_ops__
    return found


def _installed_ops() -> dict[str, bool]:
    """Whether an operation came compiled with its package; what did not is compiled when it is first used."""
    from zoo.deepspeed.adapters.utilities import op_builders

    return {builder.NAME: builder().is_compiled_ahead() for builder in op_builders.ALL}


def _accelerator_name() -> str:
    from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator

    return get_accelerator().device_name().split(":")[0]


_MADE: dict[str, Callable[[], Any]] = {
    "torch_info": _torch_info,
    "compatible_ops": _compatible_ops,
    "installed_ops": _installed_ops,
    "accelerator_name": _accelerator_name,
}


def __getattr__(name: str) -> Any:
    if name in _MADE:
        return _MADE[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
