"""The communicator: collectives on one process group, counted and, on request, checked."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zoo.comm.check import verify
from zoo.comm.log import CommsLog, OpStats
from zoo.comm.nodes import Nodes, node_of_each, ranks_of
from zoo.comm.transport import DONE, Handle, choose_transport


class _Timed:
    """A handle that adds its span to a row of the log when it completes."""

    __slots__ = ("_inner", "_row", "_start")

    def __init__(self, inner: Handle, row: OpStats) -> None:
        self._inner, self._row = inner, row
        self._start = time.perf_counter()

    def wait(self) -> None:
        self._inner.wait()
        if self._start:
            self._row.time_s += time.perf_counter() - self._start
            self._start = 0.0


class Communicator:
    """Collectives on one process group.

    Args:
        group: a ``ProcessGroup``, a one-dimensional ``DeviceMesh``, one of the axes ("node", "local"), whose ranks
            are then taken together, or None for the default group. Without an initialised default group, None means
            a world of one rank, in which every collective is local.
        log: where operations are counted; a fresh :class:`CommsLog` if not given.
        nodes: which ranks share a node, so that the log can tell bytes that leave it: ranks of a node, a
            :class:`~zoo.layout.Mesh` with an axis "node", or the node of each rank. By default what the DeviceMesh or
            torchrun (LOCAL_WORLD_SIZE) says.
        check: agree on a fingerprint before every collective (one extra small collective each); the error names the
            ranks that differ.

    Attributes:
        rank, size: this process's rank in the group, and the number of ranks.
        backend: name of the group's backend, "local" for a world of one without a group.
        nodes: the node of each rank, None if unknown.
        num_local: how many ranks of the group are on this rank's node, itself among them; None if unknown.

    All buffers are flat and contiguous. Chunk r of a full buffer (N*n,) belongs to group rank r.
    """

    def __init__(
        self, group: Any = None, *, log: CommsLog | None = None, check: bool = False, nodes: Nodes = None
    ) -> None:
        if hasattr(group, "get_group") and hasattr(group, "mesh"):
            members = ranks_of(group)
            if members is not None:
                nodes = [i // group.shape[1] for i in range(len(members))] if nodes is None else nodes
                group = None if members == list(range(dist.get_world_size())) else _new_group(members, None)
            elif group.ndim != 1:
                raise ValueError(
                    f"Communicator got a DeviceMesh with {group.ndim} dimensions {group.mesh_dim_names}; it works on "
                    "one axis: pass mesh['axis_name'] or mesh.get_group('axis_name'), or a mesh of the axes "
                    "('node', 'local')."
                )
            else:
                group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("Communicator got a process group that this rank is not a member of.")
        self.group = group
        self.log = log if log is not None else CommsLog()
        self.check = check
        self._sequence = 0
        if group is None and not dist.is_initialized():
            self.rank, self.size, self.backend, self._ranks = 0, 1, "local", [0]
        else:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self.backend = str(dist.get_backend(group))
            self._ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.know_nodes(nodes)
        self._transport = choose_transport(group, self.backend) if self.size > 1 else None

    def know_nodes(self, nodes: Nodes) -> None:
        """Which ranks share a node; see the argument of the class."""
        self.nodes = node_of_each(nodes, self._ranks)
        self.num_local = None if self.nodes is None else self.nodes.count(self.nodes[self.rank])

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, backend={self.backend!r})"

    def subgroup(self, members: Sequence[int]) -> Communicator:
        """The communicator of some ranks of this group, which counts in the same log. Collective over ``members``.

        Args:
            members: ranks of this group in ascending order, this rank among them.

        Raises:
            ValueError: ``members`` is not that.
        """
        members = list(members)
        if self.rank not in members or members != sorted({m for m in members if 0 <= m < self.size}):
            raise ValueError(
                f"subgroup got the ranks {members} on rank {self.rank} of {self.size}; it takes ranks of the group in "
                "ascending order, the calling one among them."
            )
        if len(members) == self.size:
            return self
        found = Communicator.__new__(Communicator)
        found.log, found.check, found._sequence, found._transport = self.log, self.check, 0, None
        found._ranks = [self._ranks[m] for m in members]
        found.rank, found.size, found.backend = members.index(self.rank), len(members), "local"
        found.nodes = found.num_local = None
        if self.nodes is not None:
            found.know_nodes([self.nodes[m] for m in members])
        found.group = None
        if found.size > 1:
            found.group, found.backend = _new_group(found._ranks, self.group), self.backend
            found._transport = choose_transport(found.group, found.backend)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        # A group cannot be copied: a copied model talks over the group, and into the log, of the original.
        return self

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Handle:
        """``full[r*n:(r+1)*n] = shard of rank r``, for every r. In place when ``shard`` is this rank's chunk.

        Args:
            full: (N*n,) output.
            shard: (n,) input of the same dtype; must not change until the handle completes.
            label: what this is, for the check: ranks that gather different things of one size are told apart by it.
        """
        if self._transport is None:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return DONE
        self._agree("all_gather", full, label)
        return self._timed("all_gather", full, self._transport.all_gather(full, shard))

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, label: str = "") -> Handle:
        """``out = scale * sum_r full_r[rank*n:(rank+1)*n]``, added in rank order on gloo and simulated ranks.

        Args:
            full: (N*n,) input, which must not change until the handle completes.
            out: (n,) output; may be this rank's chunk of ``full``.
            scale: a factor applied after the sum (1/N makes it a mean).
            label: see :meth:`all_gather`.
        """
        if self._transport is None:
            if full.data_ptr() != out.data_ptr():
                out.copy_(full)
            if scale != 1.0:
                out.mul_(scale)
            return DONE
        self._agree("reduce_scatter", full, label)
        return self._timed("reduce_scatter", full, self._transport.reduce_scatter(full, out, scale))

    def all_to_all(self, out: torch.Tensor, given: torch.Tensor, *, label: str = "") -> Handle:
        """``out[r*n:(r+1)*n] = given of rank r [rank*n:(rank+1)*n]``, for every r: chunk r goes to rank r.

        Args:
            out: (N*n,) output, no part of ``given``.
            given: (N*n,) input of the same dtype; must not change until the handle completes.
            label: see :meth:`all_gather`.

        Raises:
            ValueError: the two differ in size, or N does not divide it.
        """
        if out.numel() != given.numel() or given.numel() % self.size:
            raise ValueError(
                f"all_to_all got {given.numel()} elements to send and room for {out.numel()} on {self.size} ranks; it "
                f"takes two buffers of one size that {self.size} divides."
            )
        if self.size == 1:
            out.copy_(given)
            return DONE
        self._agree("all_to_all", given, label)
        work = dist.all_to_all_single(out, given, group=self.group, async_op=True)
        return self._timed("all_to_all", given, work)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Handle:
        """``tensor = op over ranks`` in place; ``op`` is "sum", "max" or "min"."""
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op)
        if reduce_op is None:
            raise ValueError(f"all_reduce got op={op!r}; allowed are 'sum', 'max' and 'min'.")
        if self.size == 1:
            return DONE
        self._agree(f"all_reduce[{op}]", tensor)
        work = dist.all_reduce(tensor, reduce_op, group=self.group, async_op=True)
        return self._timed("all_reduce", tensor, work)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Handle:
        """Every rank's ``tensor`` becomes that of group rank ``src``, in place."""
        if not 0 <= src < self.size:
            raise ValueError(f"broadcast got src={src}; the group has ranks 0 to {self.size - 1}.")
        if self.size == 1:
            return DONE
        self._agree(f"broadcast[src={src}]", tensor)
        root = src if self.group is None else dist.get_global_rank(self.group, src)
        work = dist.broadcast(tensor, root, group=self.group, async_op=True)
        return self._timed("broadcast", tensor, work)

    def agree(self, what: str, value: str, device: torch.device | None = None) -> None:
        """Raise :class:`~zoo.comm.CollectiveMismatchError` on all ranks unless all pass the same ``value``."""
        if self.size > 1:
            verify(self.group, f"{what} {value}", device or torch.device("cpu"))

    def _agree(self, op: str, tensor: torch.Tensor, label: str = "") -> None:
        if self.check:
            self._sequence += 1
            dtype = str(tensor.dtype).removeprefix("torch.")
            what = f"{op} of {tensor.numel()} {dtype}{' (' + label + ')' if label else ''}"
            verify(self.group, f"{what} as its collective number {self._sequence}", tensor.device)

    def _timed(self, op: str, tensor: torch.Tensor, handle: Any) -> Handle:
        row = self.log.issued(op, tensor.numel() * tensor.element_size(), self.size, self.num_local)
        return _Timed(handle, row)


def _new_group(ranks: list[int], parent: Any) -> Any:
    # Only its members take part, whatever groups other ranks make meanwhile. Timeouts are not inherited by themselves.
    parent = parent if parent is not None else dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend(parent) == "nccl" else "cpu")
    timeout = getattr(getattr(parent._get_backend(device), "options", None), "_timeout", None)
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)


def init_distributed(*, backend: str | None = None, timeout_s: float = 300.0) -> tuple[int, int]:
    """Join the process group that torchrun's environment describes, if there is one and it is not joined yet.

    Args:
        backend: "nccl", "gloo", …; by default nccl when CUDA is available, else gloo.
        timeout_s: after this long without an answer from a peer an operation fails instead of waiting on.

    Returns:
        (rank, world size); (0, 1) when no launcher set RANK and WORLD_SIZE.
    """
    if timeout_s <= 0:
        raise ValueError(f"init_distributed got timeout_s={timeout_s}; it must be a positive number of seconds.")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return 0, 1
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()
