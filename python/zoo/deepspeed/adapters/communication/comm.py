"""``deepspeed.comm``: ``torch.distributed`` with DeepSpeed's argument names, and a log of what went through it.

Every function returns what torch's does: None, or with ``async_op`` a handle. Those that ask for ranks raise
:class:`NotJoinedError` before a process group is joined. ``prof``, ``log_name`` and ``debug`` are of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from zoo.comm.launch import HALF_AN_HOUR, PORT
from zoo.deepspeed.adapters.communication.comm_messages import P2POp, batch_isend_irecv, irecv, isend, recv, send
from zoo.deepspeed.adapters.communication.comm_ranks import (
    NotJoinedError as NotJoinedError,
)  # fmt: skip
from zoo.deepspeed.adapters.communication.comm_ranks import (
    destroy_process_group,
    get_all_ranks_from_group,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
    initialize_mesh_device,
    is_available,
    is_initialized,
    joined,
    mpi_discovery,
    new_group,
)
from zoo.deepspeed.adapters.communication.comms_log import CommsLogger, CommsLoggerConfig, comms_logger, run_logged

if TYPE_CHECKING:
    from zoo.deepspeed.adapters.root.entry import init_distributed

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


def __getattr__(name: str) -> Any:
    if name == "init_distributed":  # with the engine behind it
        from zoo.deepspeed.adapters.root.entry import init_distributed

        return init_distributed
    raise AttributeError(
        f"deepspeed.comm has no {name!r} in zoo; docs/reference/deepspeed-names.md lists what is there."
    )


# -- of all ranks of a group ------------------------------------------------------------------------------------------


def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "all_reduce", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor`` becomes the sum, or what ``op`` says, of all ranks'."""
    return run_logged("all_reduce", tensor, group, lambda: dist.all_reduce(tensor, op, group, async_op), prof, log_name)


def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "all_reduce", debug: str = "",
) -> Any:  # fmt: skip
    """:func:`all_reduce`, complete when it returns."""
    return run_logged("inference_all_reduce", tensor, group, lambda: dist.all_reduce(tensor, op, group), prof, log_name)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
    prof: bool = False, log_name: str = "all_reduce", debug: str = "",
) -> Any:  # fmt: skip
    """:func:`all_reduce` of each."""

    def call() -> Any:
        return _together([dist.all_reduce(t, op, group, async_op=True) for t in tensors], async_op)

    return run_logged("all_reduce_coalesced", list(tensors), group, call, prof, log_name)


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False,
    prof: bool = False, log_name: str = "all_gather", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor_list[r]`` becomes rank r's ``tensor``."""
    return run_logged(
        "all_gather", tensor, group, lambda: dist.all_gather(tensor_list, tensor, group, async_op), prof, log_name
    )


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "all_gather_into_tensor", debug: str = "",
) -> Any:  # fmt: skip
    """``output_tensor``, N times as large, becomes the ranks' ``tensor`` one after the other."""

    def call() -> Any:
        return dist.all_gather_into_tensor(output_tensor, tensor, group, async_op)

    return run_logged("all_gather_into_tensor", tensor, group, call, prof, log_name)


def allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False, debug: str = ""
) -> Any:
    """:func:`all_gather_into_tensor`."""
    joined("allgather_fn")
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """:func:`all_gather_into_tensor` of each pair."""
    joined("all_gather_coalesced")
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together([dist.all_gather_into_tensor(o, i, group, async_op=True) for o, i in pairs], async_op)


def all_gather_object(
    object_list: list[Any], obj: Any, group: Any = None, prof: bool = False, log_name: str = "all_gather_object",
    debug: str = "",
) -> None:  # fmt: skip
    """``object_list[r]`` becomes rank r's ``obj``, pickled."""
    run_logged(
        "all_gather_object", None, group, lambda: dist.all_gather_object(object_list, obj, group), prof, log_name
    )


def reduce_scatter(
    output: torch.Tensor, input_list: list[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "reduce_scatter", debug: str = "",
) -> Any:  # fmt: skip
    """``output`` of rank r becomes the sum of all ranks' ``input_list[r]``."""

    def call() -> Any:
        return dist.reduce_scatter(output, input_list, op, group, async_op)

    return run_logged("reduce_scatter", input_list, group, call, prof, log_name)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "reduce_scatter_tensor", debug: str = "",
) -> Any:  # fmt: skip
    """``output_tensor`` of rank r becomes chunk r of the sum of all ranks' ``tensor``, N times as large."""

    def call() -> Any:
        return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)

    return run_logged("reduce_scatter_tensor", tensor, group, call, prof, log_name)


def reduce_scatter_fn(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None,
    async_op: bool = False, prof: bool = False, debug: str = "",
) -> Any:  # fmt: skip
    """:func:`reduce_scatter_tensor`."""
    joined("reduce_scatter_fn")
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof)


def all_to_all_single(
    output: torch.Tensor, tensor: torch.Tensor, output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "all_to_all_single", debug: str = "",
) -> Any:  # fmt: skip
    """Rank r gets piece r of every rank's ``tensor``, cut along dim 0."""

    def call() -> Any:
        return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)

    return run_logged("all_to_all_single", tensor, group, call, prof, log_name)


def all_to_all(
    output_tensor_list: list[torch.Tensor], input_tensor_list: list[torch.Tensor], group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "all_to_all", debug: str = "",
) -> Any:  # fmt: skip
    """Rank r gets ``input_tensor_list[r]`` of every rank."""

    def call() -> Any:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)

    return run_logged("all_to_all", input_tensor_list, group, call, prof, log_name)


def broadcast(
    tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False, prof: bool = False,
    log_name: str = "broadcast", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor`` becomes that of rank ``src`` of the job."""
    return run_logged("broadcast", tensor, group, lambda: dist.broadcast(tensor, src, group, async_op), prof, log_name)


def broadcast_object_list(
    object_list: list[Any], src: int, group: Any = None, device: Any = None, prof: bool = False,
    log_name: str = "broadcast_object_list", debug: str = "",
) -> None:  # fmt: skip
    """``object_list`` becomes that of rank ``src`` of the job, pickled."""

    def call() -> Any:
        return dist.broadcast_object_list(object_list, src, group, device)

    run_logged("broadcast_object_list", None, group, call, prof, log_name)


def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
    prof: bool = False, log_name: str = "reduce", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor`` of rank ``dst`` of the job becomes the sum of all; the others' is undefined."""
    return run_logged("reduce", tensor, group, lambda: dist.reduce(tensor, dst, op, group, async_op), prof, log_name)


def gather(
    tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, dst: int = 0, group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "gather", debug: str = "",
) -> Any:  # fmt: skip
    """``gather_list[r]`` of rank ``dst`` becomes rank r's ``tensor``; the others give no list."""
    return run_logged(
        "gather", tensor, group, lambda: dist.gather(tensor, gather_list, dst, group, async_op), prof, log_name
    )


def scatter(
    tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, src: int = 0, group: Any = None,
    async_op: bool = False, prof: bool = False, log_name: str = "scatter", debug: str = "",
) -> Any:  # fmt: skip
    """``tensor`` of rank r becomes ``scatter_list[r]`` of rank ``src``; the others give no list."""
    return run_logged(
        "scatter", tensor, group, lambda: dist.scatter(tensor, scatter_list, src, group, async_op), prof, log_name
    )


def barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, prof: bool = False, log_name: str = "barrier",
    debug: str = "",
) -> Any:  # fmt: skip
    """Wait until all ranks are here."""
    return run_logged("barrier", None, group, lambda: dist.barrier(group, async_op, device_ids), prof, log_name)


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, prof: bool = False,
    log_name: str = "monitored_barrier", debug: str = "",
) -> Any:  # fmt: skip
    """:func:`barrier` that names the ranks which have not come in time; over gloo."""

    def call() -> Any:
        return dist.monitored_barrier(group, timeout, wait_all_ranks)

    return run_logged("monitored_barrier", None, group, call, prof, log_name)


class _Together:
    """Several handles as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> bool:
        """Wait for all of them."""
        found = [bool(work.wait()) for work in self.works]
        return all(found)

    def is_completed(self) -> bool:
        """Whether all of them are."""
        return all(work.is_completed() for work in self.works)


def _together(works: list[Any], async_op: bool) -> _Together | None:
    """Of a rank outside of the group, which has no works, None as from torch."""
    handle = _Together([work for work in works if work is not None])
    if works and not handle.works:
        return None
    if async_op:
        return handle
    handle.wait()
    return None


# -- the log ----------------------------------------------------------------------------------------------------------


def configure(
    deepspeed_config: Any = None, enabled: bool | None = None, prof_all: bool | None = None,
    prof_ops: list[str] | None = None, verbose: bool | None = None, debug: bool | None = None,
) -> None:  # fmt: skip
    """What the log counts; ``deepspeed_config``: a dict with the section ``comms_logger``, or a
    :class:`DeepSpeedConfig`, or another object with ``comms_config``.

    Raises:
        ValueError: it is neither, or the section has a key that is not known.
    """
    if isinstance(deepspeed_config, Mapping):
        from zoo.config import ConfigError
        from zoo.deepspeed.adapters.configuration.plain_values import as_meant, said_in

        section = deepspeed_config.get("comms_logger")
        if section is not None and not (isinstance(section, Mapping) and all(isinstance(key, str) for key in section)):
            raise ConfigError(f"comms_logger: given {section!r} ({type(section).__name__}); it is an object.")
        if section is not None:  # what it does not say is as if nobody had said anything before
            absent = CommsLoggerConfig().model_dump()
            comms_logger.set(**{**absent, **said_in(as_meant({"comms_logger": section})["comms_logger"])})
    elif deepspeed_config is not None:
        if not hasattr(deepspeed_config, "comms_config"):
            raise ValueError(
                f"deepspeed.comm.configure() got {type(deepspeed_config).__name__}; give it a dict with the section "
                "comms_logger, or deepspeed.DeepSpeedConfig(...)."
            )
        if deepspeed_config.comms_config.comms_logger_enabled:
            comms_logger.configure(deepspeed_config.comms_config)
    comms_logger.set(enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print, on rank 0, what went through ``deepspeed.comm`` while the log was on; see :class:`CommsLogger`.

    ``show_straggler`` adds what ranks waited for the slowest, a collective. Its own barriers, before and after, are in
    the log under "log_summary_barrier".
    """
    barrier(log_name="log_summary_barrier")
    found = comms_logger.log_all(get_rank() == 0, show_straggler, return_dict)
    barrier(log_name="log_summary_barrier")
    return found


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
