"""The baton: ranks are threads, exactly one runs, and a seeded choice at each communication point says which.

Vocabulary. A *call* is one operation issued by one rank. A *match* is the set of calls that make one collective, or one
send and its receive; it is *ready* when all of them are there, and *completing* it moves the data. At a scheduling
point the candidates are all runnable ranks and all ready matches; ``random.Random(seed)`` picks one of them, again and
again until it picks a rank, which then gets the baton.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zoo.sim.errors import DeadlockError, Died, Stop
from zoo.sim.faults import FaultPlan
from zoo.sim.rng import RngStates
from zoo.sim.trace import Event

if TYPE_CHECKING:
    from zoo.sim.programs import Programs
    from zoo.sim.roles import Roles

__all__ = ["Match", "Mode", "Rank", "Scheduler", "Waitable", "ranks_text"]

_MAX_IDLE_POLLS = 2000  # is_completed() calls in a row, with nothing else happening, before it counts as a deadlock


class Waitable(Protocol):
    """What a rank can be blocked on; the scheduler reads ``done``, the deadlock report calls ``waiting_for``."""

    @property
    def done(self) -> bool:
        """Whether the rank can go on."""
        ...

    def waiting_for(self) -> str:
        """One line: the operation, its payload and place, and who has to act."""
        ...


class Match(Protocol):
    """A communication whose participants are all there; ``not_before`` is the first step at which it may complete."""

    not_before: int

    def complete(self) -> None:
        """Move the data and mark all calls done, with an error where it failed. Must not raise."""
        ...


@dataclass(frozen=True)
class Mode:
    """What a run imitates: see the arguments of ``run``."""

    semantics: str = "gloo"
    transport: str = "native"
    group_timeout_s: float | None = None

    def check(self) -> Mode:
        """Itself.

        Raises:
            ValueError: a value that is not allowed.
        """
        for name, allowed in (("semantics", ("gloo", "nccl")), ("transport", ("native", "pairwise", "shared"))):
            if getattr(self, name) not in allowed:
                names = f"{', '.join(map(repr, allowed[:-1]))} and {allowed[-1]!r}"
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {names}")
        if self.semantics == "nccl" and self.transport != "native":
            raise ValueError(
                f'transport="{self.transport}" goes with semantics="gloo": its single messages would wait for each '
                'other under "nccl", where collectives are always the backend\'s own; give transport="native"'
            )
        if self.group_timeout_s is not None and not self.group_timeout_s > 0:
            raise ValueError(f"group_timeout_s is {self.group_timeout_s!r}; give a number of seconds above 0, or None")
        return self


class Rank:
    """One simulated rank: its thread, its baton lock, its random number generators, what it waits for."""

    def __init__(self, index: int, rng: RngStates) -> None:
        self.index = index
        self.lock = threading.Lock()
        self.lock.acquire()
        self.thread: threading.Thread | None = None
        self.rng = rng
        self.waiting: Waitable | None = None
        self.polling: Waitable | None = None
        self.deadline: float | None = None
        self.timed_out = False
        self.finished = False
        self.dead = False
        self.num_calls = 0
        self.result: Any = None
        self.undelivered: list[Callable[[], bool]] = []

    def deliver(self) -> None:
        """Hand results to futures. Only in the rank's own thread: callbacks of a future are this rank's code."""
        if self.undelivered:
            pending, self.undelivered = self.undelivered, []
            pending = [hand_over for hand_over in pending if not hand_over()]
            self.undelivered = pending + self.undelivered


class Scheduler:
    """Holds the baton and everything that the ranks of one run share."""

    def __init__(
        self, roles: Roles, seed: int, plan: FaultPlan, trace: Any, rng: RngStates, mode: Mode | None = None
    ) -> None:
        self.roles = roles
        self.mode = mode if mode is not None else Mode()
        self.clock_s = 0.0
        self.random = random.Random(seed)
        self.plan = plan
        self.trace = trace
        self.step = 0
        self.ranks = [Rank(index, rng) for index in roles.running]
        self.installed = rng
        self.running: Rank | None = None
        self.ready: list[Match] = []
        self.stopping = False
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.baton_since = time.monotonic()
        self.idle_polls = 0
        self.on_death: list[Callable[[int], None]] = []
        self.groups: dict[Any, Any] = {}
        self.store_data: dict[str, bytes] = {}
        self.store_waits: list[Any] = []
        self.programs: Programs | None = None

    # -- called by the running rank ---------------------------------------------------------------------------------

    def check(self, me: Rank) -> None:
        """Raise if ``me`` must not communicate any more, or is not the rank that holds the baton."""
        if self.stopping:
            raise Stop
        if me.dead:
            raise Died
        if threading.current_thread() is not me.thread:
            raise ValueError(
                f"rank {me.index} communicates from thread {threading.current_thread().name!r}; simulated ranks may "
                "only communicate from the thread that runs the rank's function: call it from there"
            )

    def count_call(self, me: Rank) -> int:
        """Number the next call of ``me`` and let it die there if a ``Crash`` says so. Returns its extra delay."""
        number = me.num_calls
        me.num_calls += 1
        self.idle_polls = 0
        crash = self.plan.crashes.get(me.index)
        if crash is not None and crash.at == number:
            me.dead = True
            for lose in list(self.on_death):
                lose(me.index)
            raise Died
        return self.plan.delays.get((me.index, number), 0)

    def record(self, event: Event) -> None:
        if self.trace is not None:
            self.trace.append(event)

    def make_ready(self, match: Match, delay: int) -> None:
        match.not_before = self.step + delay
        self.ready.append(match)

    def block(self, me: Rank, on: Waitable, timeout_s: float | None = None) -> bool:
        """Pass the baton on until ``on`` is done, which is True, or until ``timeout_s`` of simulated time are over."""
        self.check(me)
        deadline = None if timeout_s is None else self.clock_s + timeout_s
        while not on.done:
            me.waiting, me.deadline = on, deadline
            self._reschedule(me)
            me.waiting = me.deadline = None
            if me.timed_out:
                me.timed_out = False
                break
        me.deliver()
        return on.done

    def yield_(self, me: Rank, polling: Waitable | None = None) -> None:
        """A scheduling point: ``me`` stays runnable. ``polling`` is what it asks about, if it does nothing else."""
        self.check(me)
        if polling is not None:
            self.idle_polls += 1
            me.polling = polling
        self._reschedule(me)
        me.polling = None
        me.deliver()

    def abort(self, error: BaseException) -> None:
        """End the run with ``error`` (the first one counts); every rank unwinds at its next scheduling point."""
        if not self.stopping:
            self.error = error
            self.stopping = True

    def finish(self, me: Rank) -> None:
        """The rank's function is over: pass the baton for good."""
        me.finished = True
        if self.programs is not None:
            self.programs.pause(me.index)
        self.idle_polls = 0
        if all(rank.finished for rank in self.ranks):
            self.running = None
            self.done.set()
            return
        me.rng = RngStates.capture(self.installed)
        self.installed = me.rng
        self._give(self._pick())

    def start(self) -> None:
        """Give the baton to a first rank; called once, by the thread that runs the simulation."""
        self._give(self._pick())

    # -- the choice -------------------------------------------------------------------------------------------------

    def _reschedule(self, me: Rank) -> None:
        if self.programs is not None:
            self.programs.pause(me.index)
        chosen = self._pick()
        if self.programs is not None and chosen is me:
            self.programs.resume()
        if self.stopping:
            raise Stop
        self.baton_since = time.monotonic()
        if chosen is me:
            return
        me.rng = RngStates.capture(self.installed)
        self.installed = me.rng
        self._give(chosen)
        me.lock.acquire()
        if self.stopping:
            raise Stop

    def _give(self, rank: Rank) -> None:
        rank.rng.install(self.installed)
        self.installed = rank.rng
        self.running = rank
        if self.programs is not None:
            self.programs.resume()
        self.baton_since = time.monotonic()
        rank.lock.release()

    def _pick(self) -> Rank:
        while True:
            if self.stopping:
                return next(rank for rank in self.ranks if not rank.finished)
            ranks = [r for r in self.ranks if not r.finished and (r.waiting is None or r.waiting.done)]
            matches = [match for match in self.ready if match.not_before <= self.step]
            count = len(ranks) + len(matches)
            if self.idle_polls > _MAX_IDLE_POLLS and not self.ready:
                count = 0
            if count == 0:
                if self.ready:  # only delayed ones: nothing else can happen before the first of them
                    self.step = min(match.not_before for match in self.ready)
                    continue
                late = [rank for rank in self.ranks if not rank.finished and rank.deadline is not None]
                if late:  # time passes only when nothing else can happen: to the first deadline
                    self.idle_polls = 0
                    return self._expire(min(late, key=lambda rank: (rank.deadline, rank.index)))
                self.abort(self.first_complaint("divergence") or self._deadlock())
                continue
            self.step += 1
            choice = int(self.random.random() * count)
            if choice < len(ranks):
                return ranks[choice]
            match = matches[choice - len(ranks)]
            self.ready.remove(match)
            self.idle_polls = 0
            match.complete()

    def _expire(self, rank: Rank) -> Rank:
        self.step += 1
        self.clock_s = max(self.clock_s, rank.deadline or 0.0)
        rank.timed_out = True
        return rank

    def first_complaint(self, kind: str) -> BaseException | None:
        """The first error that a group finds when asked for its ``divergence()`` or ``unmatched()``."""
        found = (getattr(group, kind)() for group in self.groups.values())
        return next((error for error in found if error is not None), None)

    def _deadlock(self) -> DeadlockError:
        blocked = [rank for rank in self.ranks if not rank.finished]
        lines = ["deadlock: no rank can go on."]
        for rank in blocked:
            waits = rank.waiting or rank.polling
            if waits is None:
                lines.append(f"  rank {rank.index} polls is_completed()")
            else:
                verb = "waits in" if rank.waiting is not None else "polls"
                lines.append(f"  rank {rank.index} {verb} {waits.waiting_for()}")
        gone = [rank.index for rank in self.ranks if rank.finished and not rank.dead]
        dead = [rank.index for rank in self.ranks if rank.finished and rank.dead]
        if gone:
            lines.append(f"  {ranks_text(gone)} had returned already")
        if dead:
            lines.append(f"  {ranks_text(dead)} had crashed")
        return DeadlockError("\n".join(lines), tuple(rank.index for rank in blocked))


def ranks_text(ranks: Any) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return "ranks " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
