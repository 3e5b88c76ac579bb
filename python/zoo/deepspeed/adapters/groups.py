"""``deepspeed.utils.groups``: the process groups of the engine that was made last.

Along axes of the configuration's mesh ("data", "tensor", "expert", "sequence"), or as the ``mpu`` of ``initialize``
says. Before an engine, and without an mpu, all ranks are data-parallel where ``_get_data_parallel_group`` asks; the
documented getters raise an AssertionError then, as DeepSpeed's do.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as _dist

from zoo.deepspeed.adapters import communication as dist
from zoo.deepspeed.adapters.access import DeprecatedException

mpu: Any = None
"""The model-parallel unit that ``initialize`` was given, or that the program sets."""
mesh_device: Any = None
"""A DeviceMesh that the program sets, with axes "data_parallel" and "sequence_parallel"."""
expert_tensor_parallel_world_size = 1

_ENGINES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the group of all ranks, so that a job forgets its own
_said: dict[str, int] = {}


def follow(engine: Any, given: Any) -> None:
    """``initialize`` has made this engine of zoo, with this mpu."""
    global mpu
    if given is not None:
        mpu = given
    if _dist.is_initialized():
        _ENGINES[_dist.group.WORLD] = engine


def _engine() -> Any:
    return _ENGINES.get(_dist.group.WORLD) if _dist.is_initialized() else None


def _need_job(name: str) -> None:
    if not dist.is_initialized():
        raise dist.NotJoinedError(f"{name}() needs a process group: call deepspeed.init_distributed() first.")


def _along(axis: str) -> Any:
    """The group along an axis of the engine's mesh; None where it has none of that name."""
    mesh = getattr(_engine(), "mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh.get_group(axis) if mesh is not None and axis in names else None


def _asked(*names: str) -> Any:
    """What the mpu answers to the first of these questions that it knows; None without."""
    for name in names:
        if mpu is not None and hasattr(mpu, name):
            return getattr(mpu, name)()
    return None


def _documented(group: Any, what: str) -> Any:
    if group is None:
        raise AssertionError(
            f"the {what} group is not there: there is no engine yet, or nothing splits the job so. Name the axis in "
            'the configuration, {"mesh": {"axes": {...}}}, or give initialize an mpu.'
        )
    return group


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Refused, as by DeepSpeed.

    Raises:
        DeprecatedException: always.
    """
    raise DeprecatedException(
        "groups.initialize() is no longer there; give the number of expert-parallel ranks to the layer: MoE(ep_size=)."
    )


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def get_tensor_model_parallel_group() -> Any:
    """The ranks that share layers.

    Raises:
        AssertionError: nothing splits them.
    """
    asked = _asked("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
    return _documented(asked if asked is not None else _along("tensor"), "tensor-parallel")


get_model_parallel_group = get_tensor_model_parallel_group


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """What :func:`get_tensor_model_parallel_world_size` says from now on."""
    _said["size"] = world_size


def set_tensor_model_parallel_rank(rank: int) -> None:
    """What :func:`get_tensor_model_parallel_rank` says from now on."""
    _said["rank"] = rank


def get_tensor_model_parallel_world_size() -> int:
    """Ranks of :func:`get_tensor_model_parallel_group`."""
    return _said["size"] if "size" in _said else dist.get_world_size(get_tensor_model_parallel_group())


def get_tensor_model_parallel_rank() -> int:
    """This process's number in :func:`get_tensor_model_parallel_group`."""
    return _said["rank"] if "rank" in _said else dist.get_rank(get_tensor_model_parallel_group())


def get_tensor_model_parallel_src_rank() -> int:
    """The job's number of the first of those that share layers with this process: they are consecutive."""
    size = get_tensor_model_parallel_world_size()
    return dist.get_rank() // size * size


get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank


def _get_model_parallel_world_size() -> int:
    """1 without an mpu that says more."""
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):
        return 1
    return int(mpu.get_model_parallel_world_size())


# -- data parallelism -------------------------------------------------------------------------------------------------


def get_data_parallel_group() -> Any:
    """The ranks whose samples differ and whose gradients are averaged.

    Raises:
        AssertionError: there is no engine and no mpu.
    """
    asked = _asked("get_data_parallel_group")
    if asked is None and _engine() is not None:
        asked = _get_data_parallel_group()
    return _documented(asked, "data-parallel")


def get_data_parallel_world_size() -> int:
    """Ranks of :func:`get_data_parallel_group`."""
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """This process's number in :func:`get_data_parallel_group`."""
    return dist.get_rank(get_data_parallel_group())


def _get_data_parallel_group() -> Any:
    """As :func:`get_data_parallel_group`; all ranks where there is neither engine nor mpu."""
    _need_job("_get_data_parallel_group")
    if mesh_device is not None:
        return mesh_device.get_group(mesh_dim="data_parallel")
    asked = _asked("get_data_parallel_group")
    if asked is None and (engine := _engine()) is not None:
        asked = getattr(engine.comm, "group", None)
    return asked if asked is not None else dist.get_world_group()


def _get_data_parallel_group_ranks() -> list[int]:
    """The job's numbers of those ranks."""
    asked = _asked("get_data_parallel_group_ranks")
    return list(asked) if asked is not None else dist.get_all_ranks_from_group(_get_data_parallel_group())


def _get_data_parallel_world_size() -> int:
    asked = _asked("get_data_parallel_world_size") if mesh_device is None else None
    return int(asked) if asked is not None else dist.get_world_size(_get_data_parallel_group())


def _get_data_parallel_rank() -> int:
    return dist.get_rank(_get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    """The job's number of the first data-parallel rank."""
    return dist.get_global_rank(_get_sequence_data_parallel_group(), 0)


def _clone_world_group() -> Any:
    """The group of all ranks."""
    return dist.get_world_group()


# -- sequence parallelism ---------------------------------------------------------------------------------------------


def _get_sequence_parallel_group() -> Any:
    """The ranks that share a sequence.

    Raises:
        KeyError: none do.
    """
    found = _asked("get_sequence_parallel_group")
    if found is None and mesh_device is not None:
        found = mesh_device.get_group(mesh_dim="sequence_parallel")
    found = found if found is not None else _along("sequence")
    if found is None:
        raise KeyError('no ranks share a sequence: the mesh has no axis "sequence", and no mpu says so.')
    return found


def _get_sequence_parallel_world_size() -> int:
    _need_job("_get_sequence_parallel_world_size")
    asked = _asked("get_sequence_parallel_world_size")
    if asked is not None:
        return int(asked)
    try:
        return dist.get_world_size(_get_sequence_parallel_group())
    except KeyError:
        return 1


def _get_sequence_parallel_rank() -> int:
    asked = _asked("get_sequence_parallel_rank")
    if asked is not None:
        return int(asked)
    try:
        return dist.get_rank(_get_sequence_parallel_group())
    except KeyError:
        return 0


def _get_sequence_data_parallel_group() -> Any:
    """The ranks that gradients are averaged over."""
    asked = _asked("get_sequence_data_parallel_group")
    return asked if asked is not None else _get_data_parallel_group()


def _get_sequence_data_parallel_world_size() -> int:
    asked = _asked("get_sequence_data_parallel_world_size")
    return int(asked) if asked is not None else dist.get_world_size(_get_sequence_data_parallel_group())


def _get_sequence_data_parallel_rank() -> int:
    asked = _asked("get_sequence_data_parallel_rank")
    return int(asked) if asked is not None else dist.get_rank(_get_sequence_data_parallel_group())


# -- expert parallelism -----------------------------------------------------------------------------------------------


def _get_expert_parallel_group(group_name: str) -> Any:
    """The ranks that share experts; ``group_name`` is "ep_size_" and their number.

    Raises:
        AssertionError: the engine has no such group.
    """
    found = _along("expert")
    if found is None or group_name != f"ep_size_{dist.get_world_size(found)}":
        there = f"it has 'ep_size_{dist.get_world_size(found)}'" if found is not None else 'there is no axis "expert"'
        raise AssertionError(f"the engine's mesh has no expert-parallel group {group_name!r}; {there}.")
    return found


def _get_expert_parallel_world_size(group_name: str) -> int:
    return dist.get_world_size(_get_expert_parallel_group(group_name))


def _get_expert_parallel_rank(group_name: str) -> int:
    return dist.get_rank(_get_expert_parallel_group(group_name))


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    return dist.get_all_ranks_from_group(_get_expert_parallel_group(group_name))


def _get_max_expert_size() -> int | None:
    """Ranks that share experts; None where none do."""
    found = _along("expert")
    return dist.get_world_size(found) if found is not None else None


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    return expert_tensor_parallel_world_size
