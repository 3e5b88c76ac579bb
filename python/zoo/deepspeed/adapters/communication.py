"""``deepspeed.comm``: ``torch.distributed`` with DeepSpeed's argument names, and a log of what went through it.

Every function returns what torch's does: None, or with ``async_op`` a handle. Those that ask for ranks raise
:class:`NotJoinedError` before a process group is joined. ``prof``, ``log_name`` and ``debug`` are of the log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from zoo.comm import speak_as_torchrun
from zoo.comm.launch import HALF_AN_HOUR, PORT
from zoo.deepspeed.adapters.comms_log import CommsLogger, bytes_of
from zoo.deepspeed.adapters.hugging_face import tell_accelerate

if TYPE_CHECKING:
    from zoo.deepspeed.adapters.entry import init_distributed

__path__: list[str] = []  # ``deepspeed.comm.comm`` is this module too
__all__ = [
    "CommsLogger", "P2POp", "ProcessGroup", "ReduceOp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "comms_logger", "configure",
    "default_pg_timeout", "destroy_process_group", "gather", "get_all_ranks_from_group", "get_comm_operation_count",
    "get_global_rank", "get_local_rank", "get_logged_comm_ops", "get_rank", "get_world_group", "get_world_size",
    "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "has_comm_data",
    "has_reduce_scatter_tensor", "inference_all_reduce", "init_distributed", "initialize_mesh_device", "irecv",
    "is_available", "is_initialized", "isend", "log_summary", "monitored_barrier", "mpi_discovery", "new_group",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor", "reset_log", "scatter", "send",
]  # fmt: skip

NCCL_BACKEND, GLOO_BACKEND, MPI_BACKEND = "nccl", "gloo", "mpi"
TORCH_DISTRIBUTED_DEFAULT_PORT = PORT
default_pg_timeout: timedelta = HALF_AN_HOUR
comms_logger = CommsLogger()


class NotJoinedError(AssertionError, ValueError):
    """There is no process group yet; DeepSpeed raises an AssertionError, torch a ValueError."""


def __getattr__(name: str) -> Any:
    if name == "init_distributed":  # with the engine behind it
        from zoo.deepspeed.adapters.entry import init_distributed

        return init_distributed
    raise AttributeError(f"deepspeed.comm has no {name!r} in zoo; docs/migration.md lists what is there.")


def _joined(name: str) -> None:
    if not is_initialized():
        raise NotJoinedError(
            f"{name}() needs a process group: call deepspeed.init_distributed() first, in a script that a launcher "
            "started, or with rank= and world_size=."
        )


def _run(name: str, tensor: Any, group: Any, call: Callable[[], Any], prof: bool, log_name: str) -> Any:
    """The call; timed and counted where the log is on, which waits for it."""
    if not comms_logger.wants(name, prof):
        return call()
    device = tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    handle = call()
    if hasattr(handle, "wait"):
        handle.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    latency_ms = (time.perf_counter() - begin) * 1e3
    comms_logger.count(name, log_name, latency_ms, bytes_of(tensor), dist.get_world_size(group))
    return handle


# -- of all ranks of a group ------------------------------------------------------------------------------------------


def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "all_reduce", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor`` becomes the sum, or what ``op`` says, of all ranks'."""
    return _run("all_reduce", tensor, group, lambda: dist.all_reduce(tensor, op, group, async_op), prof, log_name)


def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "all_reduce", debug: str = "",
) -> Any:  # fmt: skip
    """:func:`all_reduce`, complete when it returns."""
    return _run("inference_all_reduce", tensor, group, lambda: dist.all_reduce(tensor, op, group), prof, log_name)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
    prof: bool = False, log_name: str = "all_reduce", debug: str = "",
) -> Any:  # fmt: skip
    """:func:`all_reduce` of each."""

    def call() -> Any:
        return _together([dist.all_reduce(t, op, group, async_op=True) for t in tensors], async_op)

    return _run("all_reduce_coalesced", list(tensors), group, call, prof, log_name)


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False,
    prof: bool = False, log_name: str = "all_gather", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor_list[r]`` becomes rank r's ``tensor``."""
    return _run(
        "all_gather", tensor, group, lambda: dist.all_gather(tensor_list, tensor, group, async_op), prof, log_name
    )


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "all_gather_into_tensor", debug: str = "",
) -> Any:  # fmt: skip
    """``output_tensor``, N times as large, becomes the ranks' ``tensor`` one after the other."""

    def call() -> Any:
        return dist.all_gather_into_tensor(output_tensor, tensor, group, async_op)

    return _run("all_gather_into_tensor", tensor, group, call, prof, log_name)


def allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False, debug: str = ""
) -> Any:
    """:func:`all_gather_into_tensor`."""
    _joined("allgather_fn")
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """:func:`all_gather_into_tensor` of each pair."""
    _joined("all_gather_coalesced")
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together([dist.all_gather_into_tensor(o, i, group, async_op=True) for o, i in pairs], async_op)


def all_gather_object(
    object_list: list[Any], obj: Any, group: Any = None, prof: bool = False, log_name: str = "all_gather_object",
    debug: str = "",
) -> None:  # fmt: skip
    """``object_list[r]`` becomes rank r's ``obj``, pickled."""
    _run("all_gather_object", None, group, lambda: dist.all_gather_object(object_list, obj, group), prof, log_name)


def reduce_scatter(
    output: torch.Tensor, input_list: list[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "reduce_scatter", debug: str = "",
) -> Any:  # fmt: skip
    """``output`` of rank r becomes the sum of all ranks' ``input_list[r]``."""

    def call() -> Any:
        return dist.reduce_scatter(output, input_list, op, group, async_op)

    return _run("reduce_scatter", input_list, group, call, prof, log_name)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "reduce_scatter_tensor", debug: str = "",
) -> Any:  # fmt: skip
    """``output_tensor`` of rank r becomes chunk r of the sum of all ranks' ``tensor``, N times as large."""

    def call() -> Any:
        return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)

    return _run("reduce_scatter_tensor", tensor, group, call, prof, log_name)


def reduce_scatter_fn(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None,
    async_op: bool = False, prof: bool = False, debug: str = "",
) -> Any:  # fmt: skip
    """:func:`reduce_scatter_tensor`."""
    _joined("reduce_scatter_fn")
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof)


def all_to_all_single(
    output: torch.Tensor, tensor: torch.Tensor, output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "all_to_all_single", debug: str = "",
) -> Any:  # fmt: skip
    """Rank r gets piece r of every rank's ``tensor``, cut along dim 0."""

    def call() -> Any:
        return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)

    return _run("all_to_all_single", tensor, group, call, prof, log_name)


def all_to_all(
    output_tensor_list: list[torch.Tensor], input_tensor_list: list[torch.Tensor], group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "all_to_all", debug: str = "",
) -> Any:  # fmt: skip
    """Rank r gets ``input_tensor_list[r]`` of every rank."""

    def call() -> Any:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)

    return _run("all_to_all", input_tensor_list, group, call, prof, log_name)


def broadcast(
    tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "broadcast", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor`` becomes that of rank ``src`` of the job."""
    return _run("broadcast", tensor, group, lambda: dist.broadcast(tensor, src, group, async_op), prof, log_name)


def broadcast_object_list(
    object_list: list[Any], src: int, group: Any = None, device: Any = None, prof: bool = False,
    log_name: str = "broadcast_object_list", debug: str = "",
) -> None:  # fmt: skip
    """``object_list`` becomes that of rank ``src`` of the job, pickled."""

    def call() -> Any:
        return dist.broadcast_object_list(object_list, src, group, device)

    _run("broadcast_object_list", None, group, call, prof, log_name)


def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
    prof: bool = False, log_name: str = "reduce", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor`` of rank ``dst`` of the job becomes the sum of all; the others' is undefined."""
    return _run("reduce", tensor, group, lambda: dist.reduce(tensor, dst, op, group, async_op), prof, log_name)


def gather(
    tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, dst: int = 0, group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "gather", debug: str = "",
) -> Any:  # fmt: skip
    """``gather_list[r]`` of rank ``dst`` becomes rank r's ``tensor``; the others give no list."""
    return _run("gather", tensor, group, lambda: dist.gather(tensor, gather_list, dst, group, async_op), prof, log_name)


def scatter(
    tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, src: int = 0, group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "scatter", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor`` of rank r becomes ``scatter_list[r]`` of rank ``src``; the others give no list."""
    return _run(
        "scatter", tensor, group, lambda: dist.scatter(tensor, scatter_list, src, group, async_op), prof, log_name
    )


def barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, prof: bool = False, log_name: str = "barrier",
    debug: str = "",
) -> Any:  # fmt: skip
    """Wait until all ranks are here."""
    return _run("barrier", None, group, lambda: dist.barrier(group, async_op, device_ids), prof, log_name)


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, prof: bool = False,
    log_name: str = "monitored_barrier", debug: str = "",
) -> Any:  # fmt: skip
    """:func:`barrier` that names the ranks which have not come in time; over gloo."""

    def call() -> Any:
        return dist.monitored_barrier(group, timeout, wait_all_ranks)

    return _run("monitored_barrier", None, group, call, prof, log_name)


class _Together:
    """Several handles as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> bool:
        """Wait for all of them."""
        return all(bool(work.wait()) for work in self.works)

    def is_completed(self) -> bool:
        """Whether all of them are."""
        return all(work.is_completed() for work in self.works)


def _together(works: list[Any], async_op: bool) -> _Together | None:
    handle = _Together(works)
    if async_op:
        return handle
    handle.wait()
    return None


# -- of two ranks -----------------------------------------------------------------------------------------------------


def send(
    tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "send",
    debug: str = "",
) -> None:  # fmt: skip
    """To rank ``dst`` of the job."""
    _run("send", tensor, group, lambda: dist.send(tensor, dst, group, tag), prof, log_name)


def recv(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, prof: bool = False,
    log_name: str = "recv", debug: str = "",
) -> int:  # fmt: skip
    """From rank ``src`` of the job, or from any; the sender's rank."""
    found: int = _run("recv", tensor, group, lambda: dist.recv(tensor, src, group, tag), prof, log_name)
    return found


def isend(
    tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "isend",
    debug: str = "",
) -> Any:  # fmt: skip
    """To rank ``dst`` of the job; a handle. Not in the log: nobody waits here."""
    return dist.isend(tensor, dst, group, tag)


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, prof: bool = False,
    log_name: str = "irecv", debug: str = "",
) -> Any:  # fmt: skip
    """From rank ``src`` of the job, or from any; a handle. Not in the log."""
    return dist.irecv(tensor, src, group, tag)


class P2POp:
    """One message of :func:`batch_isend_irecv`.

    Raises:
        AssertionError: ``op`` is neither :func:`isend` nor :func:`irecv`.
    """

    def __init__(self, op: Any, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
        if op not in (isend, irecv, dist.isend, dist.irecv):
            raise AssertionError(f"P2POp got the op {op!r}; it takes deepspeed.comm.isend or deepspeed.comm.irecv.")
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag


def batch_isend_irecv(
    p2p_op_list: list[Any], prof: bool = False, log_name: str = "batch_isend_irecv", debug: str = ""
) -> list[Any]:
    """Begin several messages as one operation; their handles."""

    def torchs(one: Any) -> Any:
        if isinstance(one, dist.P2POp):
            return one
        op = dist.isend if one.op in (isend, dist.isend) else dist.irecv
        return dist.P2POp(op, one.tensor, one.peer, one.group, one.tag)

    found: list[Any] = dist.batch_isend_irecv([torchs(one) for one in p2p_op_list])
    return found


# -- ranks and groups -------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether this torch can communicate."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether a process group is joined, by whomever."""
    joined = dist.is_available() and dist.is_initialized()
    if joined:
        tell_accelerate()
    return joined


def get_rank(group: Any = None) -> int:
    """This process's number in the group; -1 outside of it."""
    _joined("get_rank")
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Ranks of the group; -1 outside of it."""
    _joined("get_world_size")
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """This process's number on its node, as the launcher says (LOCAL_RANK); 0 without."""
    _joined("get_local_rank")
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The number in the job of the rank that has ``group_rank`` in the group."""
    _joined("get_global_rank")
    return dist.get_global_rank(group or get_world_group(), group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The numbers in the job of a group's ranks, in its order."""
    _joined("get_all_ranks_from_group")
    return list(dist.get_process_group_ranks(group or get_world_group()))


def get_world_group() -> Any:
    """The group of all ranks."""
    _joined("get_world_group")
    return dist.group.WORLD


def new_group(ranks: Any = None, **options: Any) -> Any:
    """A group of these ranks; all ranks of the job call it, with the same list. ``options`` are torch's."""
    _joined("new_group")
    return dist.new_group(None if ranks is None else list(ranks), **options)


def destroy_process_group(group: Any = None) -> None:
    """Leave the group, or all of them."""
    dist.destroy_process_group(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """A ``DeviceMesh`` with named axes over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    _joined("initialize_mesh_device")
    kind = "cuda" if dist.get_backend() == NCCL_BACKEND else "cpu"
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def mpi_discovery(distributed_port: int = PORT, verbose: bool = True) -> None:
    """Set the variables that torchrun would from those of SLURM or MPI; see :func:`zoo.comm.speak_as_torchrun`."""
    speak_as_torchrun(distributed_port)


def has_all_gather_into_tensor() -> bool:
    """True: every torch that zoo runs with has it."""
    _joined("has_all_gather_into_tensor")
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: every torch that zoo runs with has it."""
    _joined("has_reduce_scatter_tensor")
    return True


def has_all_reduce_coalesced() -> bool:
    """True: it is here."""
    _joined("has_all_reduce_coalesced")
    return True


def has_coalescing_manager() -> bool:
    """Whether torch has its (private) manager of operations that are issued as one."""
    _joined("has_coalescing_manager")
    return hasattr(dist.distributed_c10d, "_coalescing_manager")


# -- the log ----------------------------------------------------------------------------------------------------------


def configure(
    deepspeed_config: Any = None, enabled: bool | None = None, prof_all: bool | None = None,
    prof_ops: list[str] | None = None, verbose: bool | None = None, debug: bool | None = None,
) -> None:  # fmt: skip
    """What the log counts; ``deepspeed_config``: a dict, or an object with ``comms_config``, with the section
    ``comms_logger``."""
    section = deepspeed_config.get("comms_logger") if isinstance(deepspeed_config, dict) else None
    comms_logger.set(**(section or {}))
    comms_logger.set(enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print, on rank 0, what went through ``deepspeed.comm`` while the log was on; see :class:`CommsLogger`.

    ``show_straggler`` adds what ranks waited for the slowest, a collective.
    """
    barrier()
    return comms_logger.log_all(get_rank() == 0, show_straggler, return_dict)


def reset_log() -> None:
    """Forget what was counted."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Whether anything was counted."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """Operations counted."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """Names of the operations counted."""
    return comms_logger.get_operation_names()
