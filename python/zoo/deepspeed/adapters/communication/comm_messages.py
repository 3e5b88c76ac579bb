"""``deepspeed.comm``'s messages between two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zoo.deepspeed.adapters.communication.comms_log import run_logged


def send(
    tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "send",
    debug: str = "",
) -> None:  # fmt: skip
    """To rank ``dst`` of the job."""
    run_logged("send", tensor, group, lambda: dist.send(tensor, dst, group, tag), prof, log_name)


def recv(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, prof: bool = False,
    log_name: str = "recv", debug: str = "",
) -> int:  # fmt: skip
    """From rank ``src`` of the job, or from any; the sender's rank."""
    found: int = run_logged("recv", tensor, group, lambda: dist.recv(tensor, src, group, tag), prof, log_name)
    return found


def isend(
    tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "isend",
    debug: str = "",
) -> Any:  # fmt: skip
    """To rank ``dst`` of the job; a handle. The log has the time that it takes to begin: nobody waits here."""
    return run_logged("isend", tensor, group, lambda: dist.isend(tensor, dst, group, tag), prof, log_name, waits=False)


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, prof: bool = False,
    log_name: str = "irecv", debug: str = "",
) -> Any:  # fmt: skip
    """From rank ``src`` of the job, or from any; a handle. In the log as :func:`isend`."""
    return run_logged("irecv", tensor, group, lambda: dist.irecv(tensor, src, group, tag), prof, log_name, waits=False)


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
    """Begin several messages as one operation; their handles. In the log as :func:`isend`, with all their bytes."""

    def torchs(one: Any) -> Any:
        if isinstance(one, dist.P2POp):
            return one
        op = dist.isend if one.op in (isend, dist.isend) else dist.irecv
        return dist.P2POp(op, one.tensor, one.peer, one.group, one.tag)

    def call() -> Any:
        return dist.batch_isend_irecv([torchs(one) for one in p2p_op_list])

    tensors, group = [one.tensor for one in p2p_op_list], p2p_op_list[0].group if p2p_op_list else None
    found: list[Any] = run_logged("batch_isend_irecv", tensors, group, call, prof, log_name, waits=False)
    return found
