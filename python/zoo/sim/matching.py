"""Which calls belong together: collectives by their place in the group's sequence, sends and receives by their tags."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zoo.sim._guards import quiet
from zoo.sim.calls import Call
from zoo.sim.errors import DivergenceError, PeerLostError, Stop, WaitTimeoutError
from zoo.sim.movers import MOVERS
from zoo.sim.order import Entry, Orders
from zoo.sim.roles import Absent
from zoo.sim.scheduler import Scheduler, ranks_text

__all__ = ["GroupState"]


class CallMatch:
    """The calls of one collective in group-rank order, or one send and its receive."""

    def __init__(self, scheduler: Scheduler, calls: list[Call], everyone: list[Any]) -> None:
        self.scheduler = scheduler
        self.calls = calls
        self.everyone = everyone  # with members that do not run
        self.not_before = 0

    def complete(self) -> None:
        """Move the data, in whichever thread the scheduler runs, and mark the calls done."""
        error: BaseException | None = None
        try:
            check_pairs(self.everyone)
            move(self.everyone)
        except DivergenceError as found:
            self.scheduler.abort(found)
            return
        except Exception as found:
            error = found
        for call in self.calls:
            call.finish(error)
        self.calls[0].group.advance()


def move(calls: list[Any]) -> None:
    """Run the mover of these calls, unseen by autograd and by the modes of the current thread."""
    on_cuda = any(tensor.is_cuda for call in calls for tensor in (*call.inputs, *call.outputs))
    with torch.no_grad(), quiet():
        if on_cuda:  # the data may come from any stream of any rank's thread
            torch.cuda.synchronize()
        MOVERS[calls[0].op](calls)
        if on_cuda:
            torch.cuda.synchronize()


class GroupState:
    """What the members of one process group share: the sequence of its collectives and its mail."""

    def __init__(self, scheduler: Scheduler, name: str, ranks: tuple[int, ...]) -> None:
        self.scheduler = scheduler
        self.name = name
        self.ranks = ranks
        self.places = scheduler.roles.places(ranks)  # of each member, that of the one which runs in its place
        self.num_running = sum(place == at for at, place in enumerate(self.places))
        self.members = tuple(sorted(ranks))
        self.issued = [0] * len(ranks)
        self.slots: dict[int, list[Call | None]] = {}
        self.sends: list[Call] = []
        self.recvs: list[Call] = []
        self.lost: set[int] = set()
        self.broken: set[int] = set()  # group ranks whose wait was over: a real connection is of no use then
        self.given_up = False  # some member aborted it, with what it had in flight
        self.tagged = scheduler.mode.semantics == "gloo"
        self.orders = None if self.tagged else Orders(len(ranks))
        scheduler.on_death.append(self.lose)

    # -- the order of what one rank issues --------------------------------------------------------------------------

    def issue(self, call: Call, batch: Entry | None = None) -> None:
        """Take a call of a member, alone or as a part of a batch."""
        if self.orders is not None:
            self.orders.add(call, batch)
        if call.group_rank in self.broken:
            call.finish(
                WaitTimeoutError(
                    f"rank {call.rank} called {call.describe()} after an operation on this group timed out"
                )
            )
        elif call.op == "send":
            self.send(call)
        elif call.op == "recv":
            self.recv(call)
        else:
            self.collective(call)
        self.advance()

    def advance(self) -> None:
        """Let go what has its turn."""
        if self.orders is not None:
            for match in self.orders.turn():
                self.scheduler.make_ready(match, max(call.delay for call in match.calls))

    def _complete(self, calls: list[Call], everyone: list[Any]) -> None:
        if self.scheduler.programs is not None:
            self.scheduler.programs.matched(calls)
        match = CallMatch(self.scheduler, calls, everyone)
        if self.orders is None:
            self.scheduler.make_ready(match, max(call.delay for call in calls))
        else:
            self.orders.formed(match)

    def time_out(self, call: Call, timeout_s: float) -> None:
        """Fail ``call``, whose rank has waited long enough, and all that this rank issues on this group from now on."""
        absent, where = self.absent(call), self.missing(call)
        self.broken.add(call.group_rank)
        error = WaitTimeoutError(
            f"rank {call.rank} waited {timeout_s:g} s (of simulated time) in {call.describe()}; waiting for {where}",
            absent,
        )
        # Whatever this rank has under way here goes with it; a monitored barrier tells all who came to it.
        for place, slot in list(self.slots.items()):
            if call in slot and call.op == "monitored_barrier":
                self._fail([other for other in slot if other is not None], error)
                slot = [None]
            elif slot[call.group_rank] is not None:
                self._fail([slot[call.group_rank]], error)
                slot[call.group_rank] = None
            if not any(slot):
                del self.slots[place]
        for waiting in (self.sends, self.recvs):
            mine = [other for other in waiting if other.group_rank == call.group_rank]
            waiting[:] = [other for other in waiting if other not in mine]
            self._fail(mine, error)
        self._fail([call], error)
        self.advance()

    def _fail(self, calls: Iterable[Call | None], error: Exception) -> None:
        for call in calls:
            if call is not None and not call.done:
                if self.orders is not None:
                    self.orders.drop(call)
                call.finish(error)

    # -- collectives ------------------------------------------------------------------------------------------------

    def collective(self, call: Call) -> None:
        """Take the next place in the sequence for this rank's call; it is ready when all members have come."""
        place = self.issued[call.group_rank]
        self.issued[call.group_rank] += 1
        if self.lost:
            call.finish(self._lost_error(call))
            return
        slot = self.slots.setdefault(place, [None] * len(self.ranks))
        slot[call.group_rank] = call
        calls = [other for other in slot if other is not None]
        if len(calls) < self.num_running:
            return
        # Only now: with all calls there the report can say who is the odd one out.
        error = _divergence(calls)
        if error is not None:
            self.scheduler.abort(error)
            raise Stop
        del self.slots[place]
        if self.num_running == len(self.ranks):
            self._complete(calls, calls)
        else:
            absent = {call.group_rank: Absent(call) for call in calls}
            self._complete(
                calls, [slot[at] if at == other else absent[other] for at, other in enumerate(self.places)]
            )  # fmt: skip

    # -- send and receive -------------------------------------------------------------------------------------------

    def send(self, call: Call) -> None:
        """Match with the oldest fitting receive, or wait for one (a send is a rendezvous: it keeps no copy)."""
        self._check_peer(call)
        if self.ranks[call.peer or 0] in self.lost:
            call.finish(self._lost_error(call))
            return
        for recv in self.recvs:
            if self._fit(call, recv):
                self.recvs.remove(recv)
                self._pair(call, recv)
                return
        self.sends.append(call)

    def recv(self, call: Call) -> None:
        """Match with a waiting send; from anyone: the choice among senders is the scheduler's."""
        self._check_peer(call)
        fitting: dict[int, Call] = {}
        for send in self.sends:
            if self._fit(send, call):
                fitting.setdefault(send.group_rank, send)  # of one sender the oldest, always
        if fitting:
            senders = sorted(fitting)
            send = fitting[senders[int(self.scheduler.random.random() * len(senders)) if len(senders) > 1 else 0]]
            self.sends.remove(send)
            self._pair(send, call)
        elif self._hopeless(call):
            call.finish(self._lost_error(call))
        else:
            self.recvs.append(call)

    def _pair(self, send: Call, recv: Call) -> None:
        recv.source = send.group_rank
        self._complete([send, recv], [send, recv])

    def _check_peer(self, call: Call) -> None:
        if call.peer is not None and self.places[call.peer] != call.peer:
            raise ValueError(
                f"rank {call.rank} called {call.describe()}, and rank {self.ranks[call.peer]} does not run: rank "
                f"{self.ranks[self.places[call.peer]]} has its role. Run all ranks, or choose roles whose first ranks "
                "send to one another."
            )

    def _fit(self, send: Call, recv: Call) -> bool:
        """Tags count under gloo alone; without them messages of a pair match in their order."""
        fits = send.peer == recv.group_rank and recv.peer in (None, send.group_rank)
        return fits and (send.tag == recv.tag or not self.tagged)

    def _hopeless(self, recv: Call) -> bool:
        if recv.peer is not None:
            return self.ranks[recv.peer] in self.lost
        others = {rank for rank in self.ranks if rank != recv.rank}
        return bool(others) and others <= self.lost

    # -- death of a member ------------------------------------------------------------------------------------------

    def lose(self, rank: int) -> None:
        """Member ``rank`` has died: fail whatever still needs it."""
        if rank not in self.ranks:
            return
        self.lost.add(rank)
        for slot in self.slots.values():
            for call in slot:
                if call is not None:
                    call.finish(self._lost_error(call))
        self.slots.clear()
        for send in [s for s in self.sends if self.ranks[s.peer or 0] == rank or s.rank == rank]:
            self.sends.remove(send)
            send.finish(self._lost_error(send))
        for recv in [r for r in self.recvs if r.rank == rank or self._hopeless(r)]:
            self.recvs.remove(recv)
            recv.finish(self._lost_error(recv))
        self.advance()

    def _lost_error(self, call: Call) -> PeerLostError:
        dead = tuple(sorted(self.lost))
        return PeerLostError(f"{ranks_text(dead)} died; rank {call.rank} needs it for {call.describe()}", dead)

    # -- reports ----------------------------------------------------------------------------------------------------

    def missing(self, call: Call) -> str:
        """Who has to act before ``call`` can complete."""
        first = None if self.orders is None else self.orders.in_the_way(call)
        if first is not None:
            return (
                f"rank {first.rank} to complete what it issued before on this group: {first.describe()} "
                "(under nccl the operations of a rank on one communicator complete in the order of their issue; "
                "messages that cross have to be issued as one batch)"
            )
        if call.op in ("send", "recv"):
            verb = "receive it" if call.op == "send" else "send"
            who = f"rank {self.ranks[call.peer]}" if call.peer is not None else "any rank"
            return f"{who} to {verb}"
        for slot in self.slots.values():
            if call in slot:
                return ranks_text(self._absent(slot))
        return "its completion"

    def absent(self, call: Call) -> tuple[int, ...]:
        """The global ranks that have not come to what ``call`` needs, as far as it names them."""
        if call.op in ("send", "recv"):
            return () if call.peer is None else (self.ranks[call.peer],)
        for slot in self.slots.values():
            if call in slot:
                return tuple(self._absent(slot))
        return ()

    def _absent(self, slot: list[Call | None]) -> list[int]:
        """The ranks that run and have not come."""
        return [
            rank for at, (rank, there) in enumerate(zip(self.ranks, slot, strict=True))
            if there is None and self.places[at] == at
        ]  # fmt: skip

    def divergence(self) -> DivergenceError | None:
        """Among collectives that not all members have come to: one on which those who came disagree already."""
        for _, slot in sorted(self.slots.items()):
            error = _divergence([call for call in slot if call is not None])
            if error is not None:
                return error
        return None

    def unmatched(self) -> DivergenceError | None:
        """At the end of a run: a call that some member made and another never did."""
        if self.given_up:
            return None
        error = self.divergence()
        if error is not None:
            return error
        for slot in self.slots.values():
            calls = [call for call in slot if call is not None]
            absent = self._absent(slot)
            return DivergenceError(
                f"{ranks_text(call.rank for call in calls)} called {calls[0].describe()}, but {ranks_text(absent)} "
                "returned without making that call",
                tuple(sorted(absent)),
            )
        for call in (*self.sends, *self.recvs):
            return DivergenceError(
                f"rank {call.rank} called {call.describe()}, and no other side came before all ranks had returned",
                (call.rank,),
            )
        return None


def _divergence(calls: list[Call]) -> DivergenceError | None:
    """None if the calls agree; else an error that tells the odd ones first and the majority last."""
    kinds: dict[tuple[object, ...], list[Call]] = {}
    for call in calls:
        kinds.setdefault((call.op, call.agree), []).append(call)
    if len(kinds) == 1:
        return None
    parts = sorted(kinds.values(), key=lambda same: (len(same), -same[0].rank))
    told = [f"{ranks_text(call.rank for call in same)} called {same[0].describe()}" for same in parts]
    return DivergenceError(
        f"{', '.join(told[:-1])} where {told[-1]} "
        f"(the same place in the sequence of the group of {ranks_text(calls[0].group.ranks)})",
        tuple(sorted(call.rank for same in parts[:-1] for call in same)),
    )


# -- sizes that may differ between ranks, but must fit pairwise -----------------------------------------------------


def check_pairs(calls: list[Any]) -> None:
    """Where ranks may give different sizes: what one gives must be what the other expects, or both are named."""
    check = _PAIR_CHECKS.get(calls[0].op)
    if check is not None:
        check(calls)


def _running(calls: list[Any]) -> list[Any]:
    return [call for call in calls if not call.absent]


def _demand(given: int, expected: int, giver: Call, taker: Call, unit: str = "elements") -> None:
    if given != expected:
        raise DivergenceError(
            f"rank {giver.rank} gives {given} {unit} to rank {taker.rank}, which expects {expected}: "
            f"rank {giver.rank} called {giver.describe()}, rank {taker.rank} called {taker.describe()}",
            tuple(sorted({giver.rank, taker.rank})),
        )


def _check_all_gather(calls: list[Any]) -> None:
    for taker in _running(calls):
        for index, giver in enumerate(calls):
            for item, tensor in enumerate(giver.inputs):
                _demand(tensor.numel(), taker.outputs[item * len(calls) + index].numel(), giver, taker)


def _check_all_to_all(calls: list[Any]) -> None:
    for taker in _running(calls):
        target = taker.group_rank
        for source, giver in enumerate(calls):
            _demand(giver.inputs[target].numel(), taker.outputs[source].numel(), giver, taker)


def _check_all_to_all_single(calls: list[Any]) -> None:
    for taker in _running(calls):
        target = taker.group_rank
        for source, giver in enumerate(calls):
            _demand((giver.in_splits or [])[target], (taker.out_splits or [])[source], giver, taker, "rows")


def _check_gather(calls: list[Any]) -> None:
    root = calls[calls[0].root or 0]
    for giver, target in zip(calls, root.outputs, strict=True) if not root.absent else ():
        _demand(giver.inputs[0].numel(), target.numel(), giver, root)


def _check_scatter(calls: list[Any]) -> None:
    root = calls[calls[0].root or 0]
    if root.absent:
        raise ValueError(f"{root.describe()}: the root does not run; choose roles whose first ranks are the roots.")
    for taker, tensor in zip(calls, root.inputs, strict=True):
        if not taker.absent:
            _demand(tensor.numel(), taker.outputs[0].numel(), root, taker)


def _check_p2p(calls: list[Call]) -> None:
    send, recv = calls
    _demand(send.inputs[0].numel(), recv.outputs[0].numel(), send, recv)
    if send.dtype() != recv.dtype():
        raise DivergenceError(
            f"rank {send.rank} called {send.describe()}, and rank {recv.rank} called {recv.describe()}: "
            "the dtypes differ",
            tuple(sorted({send.rank, recv.rank})),
        )


_PAIR_CHECKS: dict[str, Callable[[list[Any]], None]] = {
    "all_gather": _check_all_gather,
    "all_gather_coalesced": _check_all_gather,
    "all_to_all": _check_all_to_all,
    "all_to_all_single": _check_all_to_all_single,
    "gather": _check_gather,
    "scatter": _check_scatter,
    "send": _check_p2p,
}
