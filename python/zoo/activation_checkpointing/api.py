"""The documented functions, on what ``configure`` has set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zoo.activation_checkpointing import state
from zoo.activation_checkpointing.config import ActivationCheckpointingConfig
from zoo.activation_checkpointing.recomputing import ActivationCheckpointing
from zoo.activation_checkpointing.rng import OFFSET, CudaRNGStatesTracker, seed_device, seed_model_parallel
from zoo.comm import Communicator
from zoo.config import Config, read_section

__all__ = [
    "CheckpointFunction",
    "checkpoint",
    "configure",
    "current",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_NAME = "activation_checkpointing"
_PLAIN = ActivationCheckpointing()  # made here, because a compiler that follows checkpoint() could not make it


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how :func:`checkpoint` works from now on. Calls that wait for their backward end as they began.

    Called on the main thread it holds for the process, on another thread for that thread.

    Args:
        mpu_: an object with ``get_tensor_model_parallel_rank/group/world_size``, or the same with
            ``slice_parallel`` or ``model_parallel``, of which the first there is counts; None without tensor
            parallelism.
        deepspeed_config: a path, a mapping or a loaded configuration, of whose section ``activation_checkpointing``
            this begins; or such a section.
        partition_activations, contiguous_checkpointing, num_checkpoints, checkpoint_in_cpu, synchronize, profile: in
            the place of ``partition_activations``, ``contiguous_memory_optimization``, ``number_checkpoints``,
            ``cpu_checkpointing``, ``synchronize_checkpoint_boundary`` and ``profile`` there; None leaves them.

    Raises:
        ValueError: settings that contradict each other, or an mpu without these methods.
        zoo.config.ConfigError: what is wrong in the section.
    """
    section, aio = _section(deepspeed_config)
    given = {
        "partition_activations": partition_activations, "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints, "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize, "profile": profile,
    }  # fmt: skip
    changed = {key: value for key, value in given.items() if value is not None}
    config = _with_places(_section_of({**section.model_dump(), **changed}))
    group = tensor_group(mpu_)
    made = ActivationCheckpointing(config, group, aio=aio)
    state.own().configure(made, group.rank if group is not None else 0)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch ``partition_activations`` over the ranks that :func:`configure` knows; the rest stays as it is."""
    _change(partition_activations=bool(partition_activation))


def set_num_layers(nlayers: int | None) -> None:
    """Change ``number_checkpoints``, the places of contiguous buffers; the rest stays as it is.

    Raises:
        ValueError: contiguous buffers need a number of at least 1.
    """
    _change(number_checkpoints=nlayers)


def _change(**values: Any) -> None:
    own, before = state.own(), current()
    config = _with_places(_section_of({**before.config.model_dump(), **values}))
    own.configure(ActivationCheckpointing(config, before.group, aio=before.aio), own.rank)


def _section_of(values: Mapping[str, Any]) -> ActivationCheckpointingConfig:
    """The section of these values; what is wrong with one is said as of a configuration."""
    found: ActivationCheckpointingConfig = read_section(_NAME, {_NAME: dict(values)})
    return found


def _with_places(config: ActivationCheckpointingConfig) -> ActivationCheckpointingConfig:
    """The same one; who calls :func:`configure` is there to say a number."""
    if config.contiguous_memory_optimization and config.number_checkpoints is None:
        raise ValueError(
            "activation_checkpointing.contiguous_memory_optimization needs activation_checkpointing.number_checkpoints "
            "(num_checkpoints=): how many checkpointed calls wait for their backward at the same time."
        )
    return config


def tensor_group(mpu: Any) -> Communicator | None:
    """The tensor-parallel ranks that an mpu names; None without one, or for one rank.

    Raises:
        ValueError: it has none of the methods.
    """
    if mpu is None:
        return None
    for name in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        group, size = (getattr(mpu, f"get_{name}_{what}", None) for what in ("group", "world_size"))
        if group is not None and size is not None:
            return Communicator(group()) if int(size()) > 1 else None
    raise ValueError(
        f"configure got an mpu {type(mpu).__name__} without get_tensor_model_parallel_group and _world_size (or "
        "get_slice_parallel_*, get_model_parallel_*); give an object with them, or None."
    )


def _section(source: Any) -> tuple[ActivationCheckpointingConfig, Any]:
    """The section of whatever was given, and how files are read."""
    if source is None:
        return ActivationCheckpointingConfig(), None
    if isinstance(source, ActivationCheckpointingConfig):
        return source, None
    if isinstance(source, Config):
        return getattr(source, _NAME, None) or ActivationCheckpointingConfig(), source.aio
    if isinstance(source, str | Path | Mapping):
        return read_section(_NAME, source), read_section("aio", source)
    raise ValueError(
        f"deepspeed_config is a {type(source).__name__}; it is a path, a mapping, a loaded configuration or the "
        f"section {_NAME}."
    )


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return state.current().checkpointing is not None


def current() -> ActivationCheckpointing:
    """What :func:`checkpoint` goes through: that of :func:`configure`, else one that moves no arguments."""
    configured = state.current().checkpointing
    return _PLAIN if configured is None else configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which only the arguments are kept for backward; see
    :meth:`ActivationCheckpointing.checkpoint`."""
    return current().checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """:func:`checkpoint`, not re-entrant whatever the configuration says."""
    return current().non_reentrant(function, *args, **kwargs)


def reset() -> None:
    """Give contiguous buffers and other free memory back; see :meth:`ActivationCheckpointing.reset`.

    Places of contiguous buffers are free again when the graph that has them dies, so that evaluation without gradients
    needs no call of this.
    """
    current().reset()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker that model code and checkpoints of this process share."""
    return state.current().tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator with ``seed``, and the tracker's "model-parallel-rng" with ``seed + 2718 + rank``.

    The default state is for dropout of activations that tensor-parallel ranks have in common: give data-parallel ranks
    other seeds if they are to drop other things. "model-parallel-rng" differs between tensor-parallel ranks, and is the
    same on data-parallel ranks of the same seed. Of the GPU in use, and of the CPU in a process that has none
    (``get_cuda_rng_tracker().device = "cpu"`` before this to say so). To be called after :func:`configure`, whose mpu
    knows the rank; do not seed the generator again after it.
    """
    own = state.own()
    seed_model_parallel(own.tracker, seed, own.rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's "model-parallel-rng" again, with ``seed + 2718 + rank``; the default generator stays.

    Raises:
        ValueError: there is no such state: :func:`model_parallel_cuda_manual_seed` makes it.
    """
    own = state.own()
    with own.tracker.fork():
        seed_device(seed + OFFSET + own.rank, own.tracker.device)


class CheckpointFunction:
    """The re-entrant form as an autograd function: ``CheckpointFunction.apply(function, all_outputs, *args)``.

    ``all_outputs``, a list, gets what the function returned, one by one, and the result is that of the function.
    """

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Call it; see :meth:`ActivationCheckpointing.reentrant`."""
        found = current().reentrant(run_function, *args)
        all_outputs += list(found) if isinstance(found, tuple | list) else [found]
        return found
