"""The process group of the simulator: turns the methods that torch calls into ``Call`` objects for the scheduler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zoo.sim._guards import internal
from zoo.sim.calls import Call
from zoo.sim.errors import DivergenceError, Stop
from zoo.sim.matching import GroupState
from zoo.sim.order import Entry
from zoo.sim.trace import Event
from zoo.sim.work import SimWork
from zoo.sim.world import Place, place

__all__ = ["BACKEND", "SimGroup", "register"]

BACKEND = "zoo_sim"
Tensors = Sequence[torch.Tensor]


def register() -> None:
    """Make the backend known to torch, once."""
    if BACKEND.upper() not in internal(dist.Backend, "_plugins"):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> SimGroup:
    del backend_options
    where = place()
    if where is None:
        raise ValueError(
            f"backend {BACKEND!r} exists only inside of zoo.sim.run; call zoo.sim.run(world_size, fn), which gives "
            "each rank its default group, or use a backend such as 'gloo'"
        )
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return SimGroup(where, str(options.group_id), ranks, options.group_rank, options.timeout, options.store)


def _join(where: Place, name: str, ranks: tuple[int, ...]) -> GroupState:
    """The shared state of the group: the n-th creation of a name on one rank is the n-th creation on all others."""
    counts: dict[str, int] = where.world.__dict__.setdefault("zoo_sim_created", {})
    key = (name, counts.get(name, 0))
    counts[name] = key[1] + 1
    state: GroupState | None = where.scheduler.groups.get(key)
    if state is None:
        state = where.scheduler.groups[key] = GroupState(where.scheduler, name, ranks)
        for dead in where.scheduler.ranks:
            if dead.dead:
                state.lose(dead.index)
    elif state.ranks != ranks:
        error = DivergenceError(
            f"rank {where.rank.index} created the process group number {name} of ranks {list(ranks)}, where another "
            f"rank created it of ranks {list(state.ranks)}; all ranks must create all groups in the same order",
            (where.rank.index,),
        )
        where.scheduler.abort(error)
        raise Stop
    return state


class _Options:
    """What torch and zoo.comm ask a backend for its timeout."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout


class SimGroup(dist.ProcessGroup):
    """One rank's end of a simulated process group."""

    supports_splitting = True

    def __init__(
        self, where: Place, name: str, ranks: tuple[int, ...], group_rank: int, timeout: timedelta, store: Any
    ) -> None:
        super().__init__(group_rank, len(ranks))
        self._where, self._store = where, store
        self.options = _Options(timeout)
        self.zoo_transport = where.scheduler.mode.transport  # what zoo.comm asks
        self.supports_coalescing = where.scheduler.mode.semantics == "nccl"
        self._entry: Entry | None = None
        self._scheduler = where.scheduler
        self._me = where.rank
        self._state = _join(where, name, ranks)
        self._name = name
        self._desc = "undefined"
        self._index = group_rank
        self._batch: list[SimWork] | None = None

    # -- what torch asks of any group -------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return len(self._state.ranks)

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:  # the name that C++ looks for
        return BACKEND

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _get_backend(self, device: Any) -> Any:
        del device
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: sequences are counted from the first call."""

    def _get_sequence_number_for_group(self) -> int:
        return self._state.issued[self._index]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        # torch would attach a recorder that needs a group written in C++; it leaves out groups without devices.
        if sys._getframe(1).f_code.co_name == "_maybe_attach_flight_recorder":
            return []
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def get_group_store(self) -> Any:
        return self._store

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SimGroup | None:
        del opts, device_types
        if self._index not in ranks:
            return None
        name = str(group_name)
        members = tuple(self._state.ranks[r] for r in ranks)
        store = internal(dist, "PrefixStore")(f"{name}/", self._store)
        made = SimGroup(
            self._where, name, members, list(ranks).index(self._index), timeout or self.options._timeout, store
        )
        made._desc = group_desc or "undefined"
        return made

    def shutdown(self) -> None:
        """Nothing to free."""

    def abort(self) -> None:
        """What this rank has in flight here is given up: at the end nobody asks who was to answer."""
        self._state.given_up = True

    def __repr__(self) -> str:
        return f"SimGroup(name={self._name!r}, ranks={list(self._state.ranks)}, rank={self._index})"

    # -- issuing ----------------------------------------------------------------------------------------------------

    def _issue(self, call: Call, opts: Any = None) -> SimWork:
        scheduler, me = self._scheduler, self._me
        scheduler.check(me)
        call.delay = scheduler.count_call(me)
        self._record(call)
        if scheduler.programs is not None:
            scheduler.programs.pause(me.index)
            scheduler.programs.started(call)
        self._state.issue(call, self._entry)
        work = SimWork(scheduler, me, [call], call.outputs, self._timeout_s())
        if self._batch is not None:
            work.open_batch = True
            self._batch.append(work)
        elif getattr(opts, "asyncOp", True):  # else wait() follows at once, and is a scheduling point itself
            scheduler.yield_(me)
        return work

    def _timeout_s(self) -> float | None:
        """Of a wait that has no timeout of its own."""
        return None if self._scheduler.mode.group_timeout_s is None else self.options._timeout.total_seconds()

    def _record(self, call: Call) -> None:
        if self._scheduler.trace is None:
            return
        peer = call.root if call.root is not None else call.peer
        ranks = self._state.ranks
        self._scheduler.record(
            Event(
                step=self._scheduler.step,
                rank=self._me.index,
                op=call.op,
                group=ranks,
                shape=call.shape(),
                dtype=call.dtype(),
                num_bytes=call.num_bytes(),
                peer=None if peer is None else ranks[peer],
            )
        )

    def _call(self, op: str, inputs: Tensors, outputs: Tensors, payload: Tensors, **more: Any) -> Call:
        if any(tensor.is_meta for tensor in inputs):
            raise NotImplementedError(f"{op} got a tensor of the meta device, which has nothing that could be sent.")
        return Call(op, self._state, self._index, list(inputs), list(outputs), list(payload), **more)

    def _same(self, op: str, tensors: Tensors, outputs: Tensors | None = None, **more: Any) -> Call:
        """A collective for which all ranks give the same shapes and dtypes."""
        kind = more.get("reduce_op")
        root = more.get("root")
        name = None if kind is None else str(getattr(kind, "op", kind))
        agree = (tuple((tuple(t.shape), t.dtype) for t in tensors), name, root)
        return self._call(op, tensors, tensors if outputs is None else outputs, tensors, agree=agree, **more)

    def _sized(self, op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self.size():
            raise ValueError(
                f"{op} on {self.size()} ranks got a whole tensor of {tuple(whole.shape)} {whole.dtype} and a part of "
                f"{tuple(part.shape)} {part.dtype}; the whole must have {self.size()} times the elements of the part "
                "and the same dtype"
            )

    def _counted(self, op: str, tensors: Tensors) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"{op} got a list of {len(tensors)} tensors on a group of {self.size()} ranks; give one for each rank"
            )

    # -- reductions and broadcast -----------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SimWork:
        del timeout
        call = self._same("all_reduce", _listed(tensors), reduce_op=_reduce_op(opts))
        return self._issue(call, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SimWork:
        return self._issue(self._same("all_reduce_coalesced", tensors, reduce_op=_reduce_op(opts)), opts)

    def reduce(self, tensors: Any, opts: Any = None) -> SimWork:  # type: ignore[override]
        call = self._same("reduce", _listed(tensors), reduce_op=_reduce_op(opts), root=opts.rootRank)
        return self._issue(call, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SimWork:
        del timeout
        root = opts if isinstance(opts, int) else opts.rootRank
        return self._issue(self._same("broadcast", _listed(tensors), root=root), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:  # type: ignore[override]
        self._counted("reduce_scatter", inputs[0])
        mine = inputs[0][self._index]
        if outputs[0].numel() != mine.numel() or outputs[0].dtype != mine.dtype:
            raise ValueError(
                f"reduce_scatter on rank {self._me.index} got an output of {tuple(outputs[0].shape)} "
                f"{outputs[0].dtype} for its part of {tuple(mine.shape)} {mine.dtype}; they must have the same size"
            )
        return self._issue(self._same("reduce_scatter", inputs[0], outputs, reduce_op=_reduce_op(opts)), opts)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> SimWork:
        self._sized("reduce_scatter_tensor", whole, output)
        call = self._same("reduce_scatter_tensor", [whole], [output], reduce_op=_reduce_op(opts))
        return self._issue(call, opts)

    _reduce_scatter_base: Any = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        for whole, part in zip(inputs, outputs, strict=True):
            self._sized("reduce_scatter_tensor_coalesced", whole, part)
        call = self._same("reduce_scatter_tensor_coalesced", inputs, outputs, reduce_op=_reduce_op(opts))
        return self._issue(call, opts)

    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced

    # -- gathers and scatters ---------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        self._counted("all_gather", outputs[0])
        call = self._call("all_gather", inputs, outputs[0], inputs, agree=(inputs[0].dtype,))
        return self._issue(call, opts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> SimWork:
        self._counted("all_gather_coalesced", output_lists)
        outputs = [one[index] for index in range(len(inputs)) for one in output_lists]
        agree = (len(inputs), inputs[0].dtype)
        return self._issue(self._call("all_gather_coalesced", inputs, outputs, inputs, agree=agree), opts)

    def all_gather_single(self, output: torch.Tensor, part: torch.Tensor, opts: Any = None) -> SimWork:
        self._sized("all_gather_into_tensor", output, part)
        return self._issue(self._same("all_gather_into_tensor", [part], [output]), opts)

    _allgather_base: Any = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        for whole, part in zip(outputs, inputs, strict=True):
            self._sized("all_gather_into_tensor_coalesced", whole, part)
        return self._issue(self._same("all_gather_into_tensor_coalesced", inputs, outputs), opts)

    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:  # type: ignore[override]
        targets = outputs[0] if outputs and self._index == opts.rootRank else []
        if self._index == opts.rootRank:
            self._counted("gather", targets)
        agree = (inputs[0].dtype, opts.rootRank)
        return self._issue(self._call("gather", inputs, targets, inputs, agree=agree, root=opts.rootRank), opts)

    def gather_single(self, output: torch.Tensor, part: torch.Tensor, opts: Any = None) -> SimWork:
        if self._index == opts.rootRank:
            self._sized("gather_into_tensor", output, part)
        return self._issue(self._same("gather_into_tensor", [part], [output], root=opts.rootRank), opts)

    gather_into_tensor: Any = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:  # type: ignore[override]
        sources = inputs[0] if inputs and self._index == opts.rootRank else []
        if self._index == opts.rootRank:
            self._counted("scatter", sources)
        agree = (outputs[0].dtype, opts.rootRank)
        return self._issue(self._call("scatter", sources, outputs, outputs, agree=agree, root=opts.rootRank), opts)

    # -- all to all -------------------------------------------------------------------------------------------------

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        self._counted("all_to_all", outputs)
        self._counted("all_to_all", inputs)
        return self._issue(self._call("all_to_all", inputs, outputs, inputs, agree=(inputs[0].dtype,)), opts)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> SimWork:
        call = self._call("all_to_all_single", [given], [output], [given], agree=(given.dtype, tuple(given.shape[1:])))
        call.in_splits = self._splits("input", given, input_splits)
        call.out_splits = self._splits("output", output, output_splits)
        return self._issue(call, opts)

    alltoall_base: Any = all_to_all_single

    def _splits(self, side: str, tensor: torch.Tensor, splits: Any) -> list[int]:
        rows, size = tensor.shape[0], self.size()
        if not splits:
            if rows % size:
                raise ValueError(
                    f"all_to_all_single got an {side} of {rows} rows on {size} ranks and no splits; give a number of "
                    f"rows that {size} divides, or {side}_split_sizes"
                )
            return [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(
                f"all_to_all_single got {side}_split_sizes {list(splits)} for {rows} rows on {size} ranks; give {size} "
                f"sizes that sum to {rows}"
            )
        return [int(split) for split in splits]

    # -- one to one, barrier, batches -------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> SimWork:
        return self._issue(self._call("send", tensors, tensors, tensors, peer=dst, tag=tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> SimWork:
        return self._issue(self._call("recv", [], tensors, tensors, peer=src, tag=tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimWork:
        if not self._state.tagged:
            raise ValueError("a receive from any rank does not exist under nccl; name the rank that sends")
        return self._issue(self._call("recv", [], tensors, tensors, peer=None, tag=tag))

    recvAnysource = recv_anysource  # the name that C++ looks for

    def barrier(self, opts: Any = None, timeout: Any = None) -> SimWork:  # type: ignore[override]
        del timeout
        return self._issue(self._call("barrier", [], [], []), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that says who never came, on all ranks that did. ``wait_all_ranks``: they are always all named."""
        del wait_all_ranks
        work = self._issue(self._call("monitored_barrier", [], [], []))
        work.wait(timeout or self.options._timeout)

    def _start_coalescing(self, device: Any = None) -> None:
        del device
        if self._batch is not None:
            raise ValueError("coalescing was started twice on one group; end the first batch before the next")
        self._batch = []
        self._entry = Entry(open=True)

    def _end_coalescing(self, device: Any = None) -> SimWork:
        del device
        batch, self._batch = self._batch or [], None
        if self._entry is not None:
            self._entry.open, self._entry = False, None
        self._state.advance()
        for work in batch:
            work.open_batch = False
        calls = [call for work in batch for call in work._calls]
        outputs = [tensor for one in batch for tensor in one._outputs]
        work = SimWork(self._scheduler, self._me, calls, outputs, self._timeout_s())
        if calls:
            self._scheduler.yield_(self._me)
        return work

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduce_op(opts: Any) -> Any:
    """The reduce op of an options object, or the op itself, or SUM."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)
