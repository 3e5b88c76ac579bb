"""The communicator: collectives on one process group, counted and, on request, checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zoo.comm.buffers import check_contiguous, check_pair, check_rows, check_splits, flat_pair, sendable
from zoo.comm.check import check_allowed, verify, verify_splits
from zoo.comm.failures import raise_explained, report
from zoo.comm.groups import check_partition, make_groups, of_mesh
from zoo.comm.handles import DONE, Handle, Pending, dropped_of, finish
from zoo.comm.launch import leave_at_exit
from zoo.comm.log import CommsLog, OpStats, bytes_of_rows
from zoo.comm.messages import Message, Recv, Send, check_messages, count_messages, post, post_checked, tags_of
from zoo.comm.nodes import LOCAL, NODE, Nodes, node_of_each, ranks_of
from zoo.comm.objects import all_gather_object, broadcast_object
from zoo.comm.transport import REDUCE_OPS, choose_transport


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

    All buffers are contiguous; what is not is refused. Chunk r of a full buffer (N*n,) belongs to group rank r.
    """

    nodes: tuple[int, ...] | None
    num_local: int | None
    _owns: bool

    @property
    def is_dry(self) -> bool:
        """Whether its collectives are only counted, for a plan."""
        return self.backend == "dry"

    def __init__(
        self, group: Any = None, *, log: CommsLog | None = None, check: bool = False, nodes: Nodes = None
    ) -> None:
        if hasattr(group, "get_group") and hasattr(group, "mesh"):
            members = ranks_of(group)
            if members is not None:
                nodes = [i // group.shape[1] for i in range(len(members))] if nodes is None else nodes
                self._along(group, (NODE, LOCAL), log, check, nodes)
                return
            if group.ndim != 1:
                raise ValueError(
                    f"Communicator got a DeviceMesh with {group.ndim} dimensions {group.mesh_dim_names}; it works on "
                    "one axis: pass mesh['axis_name'] or mesh.get_group('axis_name'), or a mesh of the axes "
                    "('node', 'local')."
                )
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("Communicator got a process group that this rank is not a member of.")
        self.group = group
        self.log = log if log is not None else CommsLog()
        self.check = check
        self._begin(owns=False)
        if group is None and not dist.is_initialized():
            self.rank, self.size, self.backend, self._ranks = 0, 1, "local", [0]
        else:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self.backend = str(dist.get_backend(group))
            self._ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            leave_at_exit()
        self.know_nodes(nodes)
        self._transport = choose_transport(group, self.backend) if self.size > 1 else None

    def know_nodes(self, nodes: Nodes) -> None:
        """Which ranks share a node; see the argument of the class."""
        self.nodes = node_of_each(nodes, self._ranks)
        self.num_local = None if self.nodes is None else self.nodes.count(self.nodes[self.rank])

    @property
    def ranks(self) -> Sequence[int]:
        """Of each rank of the group: its global rank."""
        return tuple(self._ranks)

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, backend={self.backend!r})"

    @classmethod
    def alone(cls) -> Communicator:
        """This process only, whatever group the job has joined: nothing that is done with it waits for other ranks."""
        found = cls.__new__(cls)
        found._own(None, [dist.get_rank() if dist.is_initialized() else 0], CommsLog(), False)
        return found

    @classmethod
    def of_axes(
        cls, mesh: Any, axes: Sequence[str], *, log: CommsLog | None = None, check: bool = False, nodes: Nodes = None
    ) -> Communicator:
        """The ranks along some axes of a DeviceMesh, flattened in the order of the mesh. Collective over the mesh.

        With axes (a, b) of the sizes (A, B), in the mesh's order, the rank at (i, j) is number i·B + j of its group.
        The group belongs to the communicator, which :meth:`close` destroys; the axes have it made anew each time.

        Args:
            mesh: a DeviceMesh with names, of all ranks or of some.
            axes: some of its names, in any order.
            log, check, nodes: as in the class.

        Raises:
            ValueError: names that the mesh does not have.
        """
        found = cls.__new__(cls)
        found._along(mesh, axes, log, check, nodes)
        return found

    def _along(self, mesh: Any, axes: Sequence[str], log: CommsLog | None, check: bool, nodes: Nodes) -> None:
        groups = of_mesh(mesh, axes)
        mine = next((ranks for ranks in groups if dist.get_rank() in ranks), None)
        if mine is None:
            raise ValueError(f"of_axes got a mesh of the ranks {mesh.mesh.tolist()} on rank {dist.get_rank()}.")
        whole = 1 < len(mine) == dist.get_world_size() and mine == sorted(mine)
        group = dist.group.WORLD if whole else make_groups(groups, "-".join(axes), None)
        self._own(group, mine, log if log is not None else CommsLog(), check)
        self._owns = self._owns and not whole
        self.know_nodes(nodes)

    def _own(self, group: Any, ranks: Sequence[int], log: CommsLog, check: bool) -> None:
        """Begin as the communicator of these global ranks over a group that this one destroys; None for one rank."""
        self.group, self._ranks, self.log, self.check = group, list(ranks), log, check
        self.rank, self.size = self._ranks.index(dist.get_rank()) if len(ranks) > 1 else 0, len(self._ranks)
        self.backend = "local" if group is None else str(dist.get_backend(group))
        self._begin(owns=group is not None)
        self._transport = None if group is None else choose_transport(group, self.backend)

    def _begin(self, *, owns: bool) -> None:
        self._sequence, self._owns, self._closed, self._dropped = 0, owns, False, dropped_of(self.group)
        self._shares = False  # memory
        self._parts: dict[Any, Communicator] = {}
        self.nodes, self.num_local = None, None

    def partition(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
        """This rank's communicator among disjoint groups of the ranks of this one. Collective over this group.

        It counts in the same log. Asking again for the same groups under the same name gives the same communicator;
        other names give groups of their own. Other ranks of the job do not take part, and later groups of theirs and of
        this rank keep their names.

        Args:
            groups: ranks of this group; each of them is in one group, and every rank gives all the groups. The order in
                a group is that of the new communicator.
            name: of the groups, the same on all ranks.

        Raises:
            ValueError: ``groups`` is not that, or the communicator is closed.
        """
        self._check_open()
        lists = check_partition(groups, self.size)
        self._forget_closed()
        key = name, tuple(map(tuple, lists))
        if key not in self._parts:
            if self.check:
                self.agree(f"partition {name!r}", str(lists))
            self._parts[key] = self._part(lists, name)
        return self._parts[key]

    def duplicate(self, name: str) -> Communicator:
        """A communicator of the same ranks over a process group of its own, which counts in the same log. Collective.

        What is in flight on one never waits for, or pairs with, what is in flight on the other. Asking again for the
        same name gives the same communicator.
        """
        self._check_open()
        self._forget_closed()
        if name not in self._parts:
            self._parts[name] = self._part([list(range(self.size))], name, share=False)
        return self._parts[name]

    def _forget_closed(self) -> None:
        self._parts = {key: part for key, part in self._parts.items() if not part._closed}

    def _part(self, lists: list[list[int]], name: str, *, share: bool = True) -> Communicator:
        mine = next(ranks for ranks in lists if self.rank in ranks)
        if share and mine == list(range(self.size)):
            return self
        group = None
        if self.size > 1:
            group = make_groups([[self._ranks[r] for r in ranks] for ranks in lists], name, self.group)
        found = Communicator.__new__(Communicator)
        found._own(group, [self._ranks[r] for r in mine], self.log, self.check)
        if self.nodes is not None:
            found.know_nodes([self.nodes[r] for r in mine])
        return found

    def share_memory(self) -> bool:
        """From now on let all-gathers, reduce-scatters and all-reduces of CPU tensors go through memory of the ranks.

        Collective over the group. It is done where messages go directly between the ranks (gloo) and every rank can
        open the memory of every other; elsewhere nothing changes. Results, the log, and what happens when ranks fail
        are the same either way. It takes the most that was ever in flight, and goes with :meth:`close` or with this
        object.

        Returns:
            whether it is so, the same on all ranks.
        """
        self._check_open()
        if self.size == 1:
            return False
        from zoo.comm.shared import share  # with what it is made of, which GPUs and single processes do without

        self._transport, self._shares = share(self._transport)
        return self._shares

    def close(self) -> None:
        """Destroy the process groups that this communicator made, and its own if it was made by another.

        Every rank of a group closes it; nothing may be in flight. Afterwards the communicator refuses to be used,
        unless its group was given: then it has only lost its parts. Closing again does nothing.
        """
        parts, self._parts = self._parts, {}
        if self._shares:
            from zoo.comm.shared import unshare

            self._transport, self._shares = unshare(self._transport), False
        for part in parts.values():
            if part is not self:
                part.close()
        if self._owns and not self._closed:
            self._closed = True
            if dist.is_initialized():  # else it went away with the default group
                dist.destroy_process_group(self.group)

    def abandon(self) -> None:
        """Close it with operations in flight that nobody will complete, because other ranks have failed.

        Only for a communicator that was made by another one.
        """
        if self._owns and not self._closed and self.group is not None and dist.is_initialized():
            with contextlib.suppress(Exception):  # not every backend can
                self.group.abort()
        self.close()

    def _check_open(self) -> None:
        check_allowed(self)
        if self._closed:
            raise ValueError(f"{self!r} was closed; make another one, or close it after its last use.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        # A group cannot be copied: a copied model talks over the group, and into the log, of the original.
        return self

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Handle:
        """``full[r*n:(r+1)*n] = shard of rank r``, for every r. In place when ``shard`` is this rank's chunk.

        Args:
            full: (N*n,) output.
            shard: (n,) input of the same dtype; must not change until the handle completes.
            label: what this is, for the check: ranks that gather different things of one size are told apart by it.

        Raises:
            ValueError: sizes, dtypes or devices that do not fit, or a tensor that is not contiguous.
        """
        full, shard = flat_pair("all_gather", full, shard, self.size, "shard")
        if self._transport is None:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return DONE
        self._agree("all_gather", full, label)
        transport = self._transport
        return self._issue("all_gather", full, lambda: transport.all_gather(full, shard, label))

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, label: str = "") -> Handle:
        """``out = scale * sum_r full_r[rank*n:(rank+1)*n]``, added in rank order on gloo and simulated ranks.

        Args:
            full: (N*n,) input, which must not change until the handle completes.
            out: (n,) output; may be this rank's chunk of ``full``.
            scale: a factor applied after the sum (1/N makes it a mean).
            label: see :meth:`all_gather`; so are errors.
        """
        full, out = flat_pair("reduce_scatter", full, out, self.size, "out", scale)
        if self._transport is None:
            if full.data_ptr() != out.data_ptr():
                out.copy_(full)
            if scale != 1.0:
                out.mul_(scale)
            return DONE
        self._agree("reduce_scatter", full, label)
        transport = self._transport
        return self._issue("reduce_scatter", full, lambda: transport.reduce_scatter(full, out, scale, label))

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """(num_bytes,) uint8 memory that a :meth:`reduce_scatter` sends without a copy; None where there is none.

        Fill it, reduce it as ``full``, and drop it: peers may read it as long as it lives, so nothing else is written
        to it after that.
        """
        return self._transport.room(num_bytes) if self._transport is not None else None

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
        check_pair("all_to_all", out, given, ("out", "given"), apart=True)
        if self.size == 1:
            out.copy_(given)
            return DONE
        self._agree("all_to_all", given, label)
        start = partial(dist.all_to_all_single, sendable(out), sendable(given), group=self.group, async_op=True)
        return self._issue("all_to_all", given, lambda: Pending([start()]))

    def all_to_all_uneven(
        self, out: torch.Tensor, given: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], *,
        label: str = "",
    ) -> Handle:  # fmt: skip
        """As :meth:`all_to_all` with chunks of any sizes: ``in_splits[r]`` rows of ``given`` go to rank r.

        Args:
            out: (sum of out_splits, …) output, contiguous, no part of ``given``; the rows of rank 0 come first.
            given: (sum of in_splits, …) input of the same dtype and row size; must not change until the handle
                completes.
            out_splits: (N,) rows that come from each rank: what that rank has in its ``in_splits`` for this one.
            in_splits: (N,) rows that go to each rank.
            label: see :meth:`all_gather`.

        Raises:
            ValueError: splits that do not add up; with the check also: splits of two ranks that do not fit, on all.
        """
        check_splits("all_to_all_uneven", self.size, ("out", out, out_splits), ("in", given, in_splits))
        check_pair("all_to_all_uneven", out, given, ("out", "given"), apart=True)
        check_rows("all_to_all_uneven", out, given)
        if self.size == 1:
            out.copy_(given)
            return DONE
        self._agree("all_to_all_uneven", given[:0], label)
        if self.check:
            verify_splits(self.all_gather_object((list(out_splits), list(in_splits))))
        group, rows = self.group, (list(out_splits), list(in_splits))
        return self._issue(
            "all_to_all",
            given,
            lambda: Pending([dist.all_to_all_single(sendable(out), sendable(given), *rows, group, True)]),
            self.log.sent("all_to_all", *bytes_of_rows(given, in_splits, self.rank, self.nodes)),
        )

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Handle:
        """``tensor = op over ranks`` in place, the same bits on all ranks; ``op`` is "sum", "max" or "min". Until the
        handle completes the tensor must neither change nor be in another operation."""
        if op not in REDUCE_OPS:
            raise ValueError(f"all_reduce got op={op!r}; allowed are 'sum', 'max' and 'min'.")
        check_contiguous("all_reduce", tensor)
        if self._transport is None:
            return DONE
        self._agree(f"all_reduce[{op}]", tensor)
        return self._issue("all_reduce", tensor, partial(self._transport.all_reduce, tensor, op))

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Handle:
        """Every rank's ``tensor`` becomes that of group rank ``src``, in place."""
        if not 0 <= src < self.size:
            raise ValueError(f"broadcast got src={src}; the group has ranks 0 to {self.size - 1}.")
        check_contiguous("broadcast", tensor)
        if self.size == 1:
            return DONE
        self._agree(f"broadcast[src={src}]", tensor)
        root = src if self.group is None else dist.get_global_rank(self.group, src)
        group = self.group
        return self._issue(
            "broadcast", tensor, lambda: Pending([dist.broadcast(sendable(tensor), root, group=group, async_op=True)])
        )

    def send(self, tensor: torch.Tensor, dst: int, *, label: str = "") -> Handle:
        """``tensor`` goes to group rank ``dst``; it must not change until the handle completes. See :meth:`batch`."""
        return self.batch([Send(tensor, dst, label)])

    def recv(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Handle:
        """``tensor`` becomes what group rank ``src`` sends. See :meth:`batch`."""
        return self.batch([Recv(tensor, src, label)])

    def batch(self, messages: Sequence[Message]) -> Handle:
        """Issue sends and receives together, as one operation; the handle is for all of them.

        Messages of a pair of ranks in one direction match in the order of their issue. On nccl all operations on one
        communicator run in one order on each rank: two ranks that send to each other before they receive have to batch
        it, and messages that must not wait for collectives have to go over a communicator of their own
        (:meth:`duplicate`).

        Args:
            messages: :class:`Send` and :class:`Recv` of contiguous tensors, to and from other ranks of the group.

        Raises:
            ValueError: a rank or tensor that cannot be meant.
            CollectiveMismatchError: from ``wait`` on both ends, with the check, if they differ in size, dtype or label.
        """
        self._check_open()
        check_messages(messages, self.rank, self.size)
        if not messages:
            return DONE
        row = count_messages(messages, self.log, self.rank, self.nodes)
        group = self.group if self.group is not None else dist.group.WORLD

        def start() -> Pending:
            # One message of a kind: a failure can be laid to its peer. In a batch nobody knows.
            peers = [self._ranks[messages[0].peer]] if len({m.peer for m in messages}) == 1 else None
            works = post_checked(messages, group, self.rank) if self.check else post(messages, group, tags_of(messages))
            return Pending(works, None, peers, dropped=self._dropped)

        return self._issue("batch", messages[0].tensor, start, row)

    def barrier(self) -> None:
        """Return when all ranks of the group have come here."""
        if self.size > 1:
            self._agree("barrier", torch.empty(0, device=self.device))
            group = self.group
            row = self.log.sent("barrier", 0, 0, 0, 0)
            self._issue(
                "barrier", torch.empty(0), lambda: Pending([dist.barrier(group=group, async_op=True)]), row
            ).wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        """The ``value`` of every rank, in rank order. It is pickled: never a thing whose content comes from a file.

        Raises:
            RankFailedError: some other rank's cannot be pickled; that rank raises what pickle says.
        """
        return all_gather_object(self, value)

    def broadcast_object(self, value: Any = None, src: int = 0) -> Any:
        """The ``value`` of group rank ``src``; what other ranks give is not looked at. Pickled, as above."""
        return broadcast_object(self, value, src)

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks of the job that this one leaves with ``error``. Waits for nobody.

        A rank whose wait fails or times out, on any communicator, then raises a :class:`~zoo.comm.RankFailedError` that
        names this rank and what it said. To be called where an exception leaves a rank's program: no other rank hears
        of it before its own wait ends.
        """
        report(error)

    @property
    def device(self) -> torch.device:
        """Of what the communicator itself sends."""
        on_gpu = self.backend == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def agree(self, what: str, value: str, device: torch.device | None = None) -> None:
        """Raise :class:`~zoo.comm.CollectiveMismatchError` on all ranks unless all pass the same ``value``."""
        if self.size > 1:
            try:
                verify(self.group, f"{what} {value}", device or self.device)
            except RuntimeError as error:
                raise_explained(error)

    def _agree(self, op: str, tensor: torch.Tensor, label: str = "") -> None:
        self._check_open()
        if self.check:
            self._sequence += 1
            dtype = str(tensor.dtype).removeprefix("torch.")
            what = f"{op} of {tensor.numel()} {dtype}{' (' + label + ')' if label else ''}"
            try:
                verify(self.group, f"{what} as its collective number {self._sequence}", tensor.device)
            except RuntimeError as error:
                raise_explained(error)

    def _issue(self, op: str, tensor: torch.Tensor, start: Callable[[], Pending], row: OpStats | None = None) -> Handle:
        """Start an operation, count it (where it has no row yet) and time it."""
        if row is None:
            row = self.log.issued(op, tensor.numel() * tensor.element_size(), self.size, self.num_local)
        if self._dropped:
            finish(self._dropped)
        try:
            return start().timed(row, tensor.is_cuda)
        except Exception as error:  # a backend may know already that a peer is gone
            raise_explained(error)
