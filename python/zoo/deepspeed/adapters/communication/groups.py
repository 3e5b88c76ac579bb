"""``deepspeed.utils.groups``: the process groups of the engine that was made last.

Along axes of the configuration's mesh ("data", "tensor", "expert", "sequence"), or as the ``mpu`` of ``initialize``
says. Before an engine, and without an mpu, all ranks are data-parallel where ``_get_data_parallel_group`` asks; the
documented getters raise an AssertionError then, as DeepSpeed's do.
"""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as _dist

from zoo.config.mesh import data_axes
from zoo.deepspeed.adapters.communication import comm as dist

mesh_device: Any = None
"""A DeviceMesh that the program sets, with axes "data_parallel" and "sequence_parallel"."""
expert_tensor_parallel_world_size = 1

# By the group of all ranks, so that a job forgets its own.
_ENGINES: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
_CUT: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The mesh of the last engine whose model was cut by the section ``tensor_parallel``, which may be gone: programs make
layers for its ranks then."""
_ALONE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""For layers with ep_size=1: this rank by itself."""
_MESHES: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()
"""Of layers of experts that run without an engine."""
_said: dict[str, int] = {}


def __getattr__(name: str) -> Any:
    if name == "mpu":  # the program has set none
        return getattr(getattr(_engine(), "module", None), "_grid", None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _mpu() -> Any:
    """``groups.mpu``, the model-parallel unit: what ``initialize`` was given or the program sets here, or else the
    grid of a pipeline."""
    said = globals().get("mpu")
    return said if said is not None else __getattr__("mpu")


def follow(engine: Any, given: Any, *, by_mesh: bool = False) -> None:
    """``initialize`` has made this engine of zoo, with this mpu; ``by_mesh``: the section ``tensor_parallel`` says
    which ranks share layers, and so the engine's mesh, whatever an mpu says."""
    if given is not None or by_mesh:
        globals()["mpu"] = None if by_mesh else given
    if _dist.is_initialized():
        _ENGINES[_dist.group.WORLD] = ref(engine)
        if by_mesh:
            _CUT[_dist.group.WORLD] = engine.mesh


def _engine() -> Any:
    """The engine that was made last, unless it is gone or destroyed."""
    found = _ENGINES.get(_dist.group.WORLD) if _dist.is_initialized() else None
    engine = None if found is None else found()
    return None if engine is None or engine.sharded.closed else engine


def _need_job(name: str) -> None:
    if not dist.is_initialized():
        raise dist.NotJoinedError(f"{name}() needs a process group: call deepspeed.init_distributed() first.")


def _along(axis: str) -> Any:
    """The group along an axis of the engine's mesh; None where it has none of that name."""
    engine = _engine()
    mesh = getattr(engine, "mesh", None)
    if engine is None and axis == "tensor" and _dist.is_initialized():
        mesh = _CUT.get(_dist.group.WORLD)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh.get_group(axis) if mesh is not None and axis in names else None


def _asked(*names: str) -> Any:
    """What the mpu answers to the first of these questions that it knows; None without."""
    unit = _mpu()
    for name in names:
        if hasattr(unit, name):
            return getattr(unit, name)()
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
    from zoo.deepspeed.adapters.zero.access import DeprecatedException

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
    unit = _mpu()
    if unit is None or hasattr(unit, "initialize_sequence_parallel"):
        return 1
    return int(unit.get_model_parallel_world_size())


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
        asked = _alone() if engine.comm.size == 1 < dist.get_world_size() else getattr(engine.comm, "group", None)
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


def _expert_meshes() -> dict[int, Any]:
    """Meshes with an axis "expert", by its size: the engine's, and those of layers that run without one."""
    found = dict(_MESHES.get(_dist.group.WORLD, {})) if _dist.is_initialized() else {}
    mesh: Any = getattr(_engine(), "mesh", None)
    if "expert" in (getattr(mesh, "mesh_dim_names", None) or ()):
        found[mesh["expert"].size()] = mesh
    return found


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """The groups of ranks that share experts, by name: "ep_size_" and their number."""
    found = {f"ep_size_{size}": mesh.get_group("expert") for size, mesh in sorted(_expert_meshes().items())}
    layers = [] if _engine() is None else [m for m in _engine().module.modules() if hasattr(m, "expert_group_name")]
    if any(layer.ep_size == 1 for layer in layers):
        found = {"ep_size_1": _alone(), **found}
    return found


def _alone() -> Any:
    """This rank by itself; no other rank takes part in making the group."""
    world = _dist.group.WORLD
    if world not in _ALONE:
        _ALONE[world] = _dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _ALONE[world]


def _get_expert_parallel_group(group_name: str) -> Any:
    """The ranks that share experts.

    Raises:
        AssertionError: no layer has such a group.
    """
    found = _get_expert_parallel_group_dict()
    if group_name not in found:
        there = f"there are {list(found)}" if found else "no layer shares experts"
        raise AssertionError(f"there is no expert-parallel group {group_name!r}; {there}.")
    return found[group_name]


def _get_expert_parallel_world_size(group_name: str) -> int:
    return dist.get_world_size(_get_expert_parallel_group(group_name))


def _get_expert_parallel_rank(group_name: str) -> int:
    return dist.get_rank(_get_expert_parallel_group(group_name))


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    return dist.get_all_ranks_from_group(_get_expert_parallel_group(group_name))


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """The job's number of the first of those that share experts with this process."""
    return dist.get_global_rank(_get_expert_parallel_group(group_name), 0)


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """The ranks that have the same experts; their gradients are added up over these.

    Raises:
        AssertionError: see :func:`_get_expert_parallel_group`. NotImplementedError: they lie along several axes.
    """
    _get_expert_parallel_group(group_name)
    mesh = _expert_meshes().get(int(group_name.removeprefix("ep_size_")))
    if mesh is None:  # each rank has all of them
        return _get_data_parallel_group()
    axes = [axis for axis in data_axes(mesh.mesh_dim_names) if axis != "expert"]
    if len(axes) != 1:
        raise NotImplementedError(
            f"the ranks with the same experts lie along the axes {axes} of the mesh {mesh.mesh_dim_names}, for which "
            "there is no one group. Ask for the group of each axis: engine.engine.mesh.get_group(axis)."
        )
    return mesh.get_group(axes[0])


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    return dist.get_all_ranks_from_group(_get_expert_data_parallel_group(group_name))


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """By the names of the groups that share experts."""
    return {name: _get_expert_data_parallel_group(name) for name in _get_expert_parallel_group_dict()}


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return dist.get_world_size(_get_expert_data_parallel_group(group_name))


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return dist.get_rank(_get_expert_data_parallel_group(group_name))


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """The job's number of the first rank that has the same experts."""
    return dist.get_global_rank(_get_expert_data_parallel_group(group_name), 0)


def refuse_other_order() -> NoReturn:
    """What ``use_data_before_expert_parallel_`` asks for."""
    raise ValueError(
        "use_data_before_expert_parallel_=True: consecutive ranks share the experts. Leave it out, or name the axes in "
        "another order in the configuration's section mesh."
    )


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:  # fmt: skip
    """Groups of so many consecutive ranks that share experts, for layers that run without an engine; see
    :meth:`zoo.deepspeed.moe.layer.MoE.set_deepspeed_parallelism`. A collective of the job.

    Raises:
        AssertionError: the number of ranks is no multiple of it. ValueError: another order of ranks is asked for.
    """
    _need_job("_create_expert_and_data_parallel")
    size = dist.get_world_size()
    if use_data_before_expert_parallel_:
        refuse_other_order()
    if expert_parallel_size_ < 1 or size % expert_parallel_size_:
        raise AssertionError(f"{size} ranks cannot form groups of {expert_parallel_size_} that share experts.")
    if expert_parallel_size_ in (1, *_expert_meshes()):
        return
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if str(_dist.get_backend()) == "nccl" else "cpu"
    _MESHES.setdefault(_dist.group.WORLD, {})[expert_parallel_size_] = init_device_mesh(
        kind, (size // expert_parallel_size_, expert_parallel_size_), mesh_dim_names=("data", "expert")
    )


def _get_expert_parallel_ranks(
    world_size: int, tensor_parallel_size_: int, expert_parallel_size_: int, pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:  # fmt: skip
    """Ranks that share the experts, and ranks that hold the same ones, as DeepSpeed counts them: no job is needed.

    Stages of a pipeline are the outermost dimension of ranks, tensor parallel the innermost; of the ranks between them
    consecutive ones share experts, or (``use_data_before_expert_parallel_``) consecutive ones hold the same.

    Raises:
        AssertionError: a size does not divide the ranks that it divides up.
    """
    left = world_size
    for name, size in (
        ("pipeline_parallel_size_", pipeline_parallel_size_), ("tensor_parallel_size_", tensor_parallel_size_),
        ("expert_parallel_size_", expert_parallel_size_),
    ):  # fmt: skip
        if size < 1 or left % size != 0:
            raise AssertionError(f"{left} ranks are not divisible by {name}={size}; give a divisor of {left}.")
        left //= size
    inner, outer = (left, expert_parallel_size_) if use_data_before_expert_parallel_ else (expert_parallel_size_, left)
    ranks = torch.arange(world_size).view(pipeline_parallel_size_, outer, inner, tensor_parallel_size_)
    along = ranks.permute(0, 3, 1, 2).reshape(-1, inner).tolist()
    across = ranks.permute(0, 3, 2, 1).reshape(-1, outer).tolist()
    return (across, along) if use_data_before_expert_parallel_ else (along, across)


def _get_max_expert_size() -> int | None:
    """The most ranks that share experts; None where there are none."""
    return max((dist.get_world_size(group) for group in _get_expert_parallel_group_dict().values()), default=None)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    """Ranks that share each expert: those that share layers, where the engine's experts are layers of that kind."""
    layers = [] if _engine() is None else _engine().module.modules()
    if any(getattr(layer, "enable_expert_tensor_parallelism", False) for layer in layers):
        return get_tensor_model_parallel_world_size()
    return expert_tensor_parallel_world_size
