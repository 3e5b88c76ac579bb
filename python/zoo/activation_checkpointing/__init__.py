"""Activation checkpointing: of a function only the arguments are kept for backward, and it is computed again there.

* :class:`ActivationCheckpointing`: what a researcher uses directly; :mod:`.storages` says where arguments wait.
* :func:`configure`, :func:`checkpoint`, :func:`reset`, …: the documented functions on one such object of the process.
* :func:`plan`: which units to recompute under a budget of memory.

Imported when they are asked for, because every configuration may look at the section.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.activation_checkpointing.api import (
        CheckpointFunction,
        checkpoint,
        configure,
        current,
        get_cuda_rng_tracker,
        is_configured,
        model_parallel_cuda_manual_seed,
        model_parallel_reconfigure_tp_seed,
        non_reentrant_checkpoint,
        partition_activations_in_checkpoint,
        reset,
        set_num_layers,
    )
    from zoo.activation_checkpointing.config import ActivationCheckpointingConfig
    from zoo.activation_checkpointing.planning import Plan, UnitCosts, choose, measure, plan
    from zoo.activation_checkpointing.recomputing import ActivationCheckpointing
    from zoo.activation_checkpointing.rng import CudaRNGStatesTracker

__all__ = [
    "ActivationCheckpointing",
    "ActivationCheckpointingConfig",
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "Plan",
    "UnitCosts",
    "checkpoint",
    "choose",
    "configure",
    "current",
    "get_cuda_rng_tracker",
    "is_configured",
    "measure",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "plan",
    "reset",
    "set_num_layers",
]

_WHERE = {
    "ActivationCheckpointing": "recomputing", "ActivationCheckpointingConfig": "config", "CudaRNGStatesTracker": "rng",
    **dict.fromkeys(("Plan", "UnitCosts", "choose", "measure", "plan"), "planning"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE.get(name, 'api')}"), name)
