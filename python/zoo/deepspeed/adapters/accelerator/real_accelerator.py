"""``deepspeed.accelerator``: the device that programs compute on, behind one set of methods.

CUDA where torch sees a GPU, else the CPU; the variable DS_ACCELERATOR ("cuda" or "cpu") chooses.
"""

from __future__ import annotations

import os

import torch

from zoo.deepspeed.adapters.accelerator.base import DeepSpeedAccelerator
from zoo.deepspeed.adapters.accelerator.cpu import CPU_Accelerator
from zoo.deepspeed.adapters.accelerator.cuda import CUDA_Accelerator

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]

_current: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process, the same object each time.

    Raises:
        ValueError: DS_ACCELERATOR names one that zoo does not have.
    """
    global _current
    if _current is None:
        name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in SUPPORTED_ACCELERATOR_LIST:
            raise ValueError(f"DS_ACCELERATOR={name!r}; allowed are {', '.join(SUPPORTED_ACCELERATOR_LIST)}.")
        _current = CUDA_Accelerator() if name == "cuda" else CPU_Accelerator()
    return _current


def set_accelerator(accel_obj: DeepSpeedAccelerator | None) -> None:
    """Make this the accelerator of the process; None: choose again when it is next asked for.

    Raises:
        AssertionError: it is no :class:`DeepSpeedAccelerator`.
    """
    global _current
    if accel_obj is not None and not isinstance(accel_obj, DeepSpeedAccelerator):
        raise AssertionError(
            f"set_accelerator() got a {type(accel_obj).__name__}; it takes an object of a subclass of "
            "DeepSpeedAccelerator."
        )
    _current = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether zoo has an accelerator of this kind."""
    return get_accelerator().device_name().split(":")[0] in SUPPORTED_ACCELERATOR_LIST
