"""``run``: start the ranks, watch the clock, gather what they return."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zoo.sim import group
from zoo.sim._guards import outlive_ranks
from zoo.sim.errors import Died, RankError, SimTimeoutError, Stop
from zoo.sim.faults import Crash, Fault, FaultPlan
from zoo.sim.programs import Programs
from zoo.sim.rng import RngStates
from zoo.sim.roles import Roles
from zoo.sim.scheduler import Mode, Rank, Scheduler, ranks_text
from zoo.sim.store import SimStore
from zoo.sim.trace import Trace
from zoo.sim.world import Place, enter, installed, place

__all__ = ["defaults", "run"]

T = TypeVar("T")
_NAP_S = 1.0
_GRACE_S = 5.0  # for a rank to unwind after it was told to stop
_one_run = threading.Lock()  # the world switch and the random number generators belong to the process


_defaults = Mode()


@contextlib.contextmanager
def defaults(*, semantics: str = "gloo", transport: str = "native") -> Iterator[None]:
    """Within the context, what runs use that are not told otherwise: so that a whole test can run under another one."""
    global _defaults
    before, _defaults = _defaults, Mode(semantics, transport).check()
    try:
        yield
    finally:
        _defaults = before


def run(
    world_size: int,
    fn: Callable[[int], T],
    *,
    seed: int = 0,
    faults: Iterable[Fault] = (),
    timeout_s: float = 120.0,
    trace: Trace | list[Any] | None = None,
    semantics: str | None = None,
    transport: str | None = None,
    group_timeout_s: float | None = None,
    programs: Programs | None = None,
    role_of: Callable[[int], Hashable] | None = None,
) -> list[T | Crash]:
    """``[fn(0), ..., fn(world_size - 1)]``, run as the ranks of one simulated job.

    Each rank is a thread with its own ``torch.distributed`` world, whose default group (backend ``"zoo_sim"``) is
    initialised before ``fn`` is called. Exactly one rank runs at a time; ``random.Random(seed)`` chooses the next at
    each communication, and with it when each operation in flight moves its data. The same seed gives the same run.

    world_size: number of ranks, 1 or more.
    fn: called with the rank, in the rank's thread.
    seed: of the scheduler. A correct program computes the same for every seed.
    faults: ``Crash`` and ``Delay`` objects.
    timeout_s: the wall-clock seconds for which a rank may compute without communicating.
    trace: a ``Trace`` or a list, which gets one ``Event`` for each operation a rank issues.
    semantics: "gloo" or "nccl", see the README; where not given, what ``defaults`` says, else "gloo".
    transport: how zoo.comm's all-gather and reduce-scatter travel, "native" (the simulator's collectives), "pairwise"
        (the messages of CPU jobs) or "shared" (as "pairwise", until a communicator is asked to share memory); these two
        not under "nccl". Where not given, what ``defaults`` says, else "native", which alone goes with ``role_of``.
    programs: gets what each rank computes, begins and waits for; ``zoo.cost.simulate_events`` gives it its time.
    role_of: where it is given, only the first rank of each role runs, and gives in collectives what all ranks of its
        role give: a job of 100,000 ranks takes the threads of its roles. The results are those of the ranks that ran.
        What ranks of one role do must be the same; values are as if they had the same data. A rank sends messages to
        ranks that run, and scatters come from one.
    group_timeout_s: the timeout of the default group in simulated seconds; that of other groups is what they are made
        with. Not given, the timeouts of groups are ignored, and who waits for ever makes a ``DeadlockError``.

    Every rank starts from the random number generator states (torch CPU, ``random``, numpy if imported) that the
    caller has, as processes seeded alike would; the caller's states are as before when ``run`` returns.

    Where a ``Crash`` happened and the survivors caught their ``PeerLostError`` and returned, the result holds the
    ``Crash`` object in the place of the dead rank.

    Errors: ``ValueError`` for wrong arguments, or inside a simulated rank. ``RankError`` when ``fn`` raised,
    ``DeadlockError``, ``DivergenceError``, ``SimTimeoutError``. In each case all ranks have been stopped and joined.
    """
    world_size, seed = _check(world_size, fn, seed, timeout_s)
    usual = _defaults.transport if role_of is None else "native"
    mode = Mode(semantics or _defaults.semantics, transport or usual, group_timeout_s).check()
    roles = Roles(world_size, role_of)
    if not roles.all_run and mode.transport != "native":
        raise ValueError(
            f'role_of goes with transport="native", not with "{mode.transport}": direct messages have the ranks that '
            "do not run on their other side"
        )
    plan = FaultPlan(faults, world_size, roles.running)
    with _one_run:
        group.register()
        outlive_ranks()
        caller = RngStates.capture()
        scheduler = Scheduler(roles, seed, plan, trace, caller, mode)
        if programs is not None:
            programs.begin(roles.running)
            scheduler.programs = programs
        try:
            with installed():
                _run_ranks(scheduler, fn, timeout_s)
        finally:
            caller.install()
    return _outcome(scheduler)


def _check(world_size: Any, fn: Any, seed: Any, timeout_s: Any) -> tuple[int, int]:
    where = place()
    if where is not None:
        raise ValueError(
            f"zoo.sim.run was called inside simulated rank {where.rank.index}; runs do not nest: call it from outside"
        )
    try:
        world_size, seed = operator.index(world_size), operator.index(seed)
    except TypeError:
        raise ValueError(f"world_size is {world_size!r} and seed is {seed!r}; both must be ints") from None
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; give 1 or more ranks")
    if not callable(fn):
        raise ValueError(f"fn is {fn!r}; give a function of the rank")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s!r}; give a number of seconds above 0")
    return world_size, seed


def _run_ranks(scheduler: Scheduler, fn: Callable[[int], Any], timeout_s: float) -> None:
    stores = SimStore.for_run(scheduler)
    for rank in scheduler.ranks:
        rank.thread = threading.Thread(
            target=_rank_main, args=(scheduler, rank, fn, stores), name=f"zoo.sim rank {rank.index}", daemon=True
        )
        rank.thread.start()
    scheduler.start()
    try:
        _watch(scheduler, timeout_s)
    except BaseException as interrupt:  # KeyboardInterrupt of the caller: stop the ranks, then let it go on
        scheduler.abort(interrupt)
        _unwind(scheduler)
        raise
    for rank in scheduler.ranks:
        if rank.thread is not None:
            rank.thread.join()


def _watch(scheduler: Scheduler, timeout_s: float) -> None:
    """Wait for the end; stop a rank that holds the baton for too long.

    The watch sleeps for short times. One that took far longer was a time in which the whole process was stopped.
    """
    slept_s = time.monotonic()
    while True:
        left_s = scheduler.baton_since + timeout_s - time.monotonic()
        nap_s = max(0.01, min(left_s, _NAP_S))
        if scheduler.done.wait(nap_s):
            return
        slept_s, before = time.monotonic(), slept_s
        if slept_s - before > nap_s + _NAP_S:
            scheduler.baton_since += slept_s - before
            continue
        rank = scheduler.running
        if rank is None or time.monotonic() - scheduler.baton_since < timeout_s:
            continue
        frame = sys._current_frames().get(rank.thread.ident or 0) if rank.thread is not None else None
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (no stack)\n"
        message = f"rank {rank.index} has computed for {timeout_s} s without communicating; it is at\n{stack}"
        scheduler.abort(SimTimeoutError(message, (rank.index,)))
        if not _unwind(scheduler):
            stuck = scheduler.running
            raise SimTimeoutError(
                f"{message}rank {stuck.index if stuck else rank.index} could not be stopped either (it is not in "
                "python code); its thread is left behind",
                (rank.index,),
            )
        return


def _unwind(scheduler: Scheduler) -> bool:
    """Raise ``Stop`` in whichever rank runs, until all have unwound; False if one does not within the grace."""
    told: set[int] = set()
    deadline = time.monotonic() + _GRACE_S
    while not scheduler.done.wait(0.01):
        rank = scheduler.running
        if rank is not None and rank.thread is not None and rank.index not in told:
            told.add(rank.index)
            deadline = time.monotonic() + _GRACE_S
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(rank.thread.ident or 0), ctypes.py_object(Stop))
        if time.monotonic() > deadline:
            return False
    return True


def _rank_main(scheduler: Scheduler, me: Rank, fn: Callable[[int], Any], stores: Any) -> None:
    me.lock.acquire()
    where = Place(scheduler, me)
    enter(where)
    try:
        if not scheduler.stopping:
            _body(scheduler, me, fn, stores)
    except (Stop, Died):
        pass
    except BaseException as error:  # a Stop that went through C++ may come back as something else
        if not scheduler.stopping and not me.dead:
            scheduler.abort(_rank_error(scheduler, me, error))
    finally:
        me.waiting = None
        _leave()
        scheduler.finish(me)


def _body(scheduler: Scheduler, me: Rank, fn: Callable[[int], Any], stores: Any) -> None:
    # Backward in the calling thread on all devices: hooks that communicate must be on the rank's thread.
    with torch.autograd.set_multithreading_enabled(False):
        store = stores(me)  # kept here: C++ holds only its own half of a store written in python
        limit_s = scheduler.mode.group_timeout_s
        dist.init_process_group(
            group.BACKEND,
            rank=me.index,
            world_size=scheduler.roles.world_size,
            store=store,
            timeout=None if limit_s is None else timedelta(seconds=limit_s),
        )
        me.result = fn(me.index)
        me.deliver()


def _leave() -> None:
    """Drop the rank's groups, from torch's registries as well. Only while the switch of worlds is in place."""
    c10d = dist.distributed_c10d
    if type(c10d._world).__name__ == "_Worlds":
        torch._C._distributed_c10d._unregister_all_process_groups()
    enter(None)


def _rank_error(scheduler: Scheduler, me: Rank, error: BaseException) -> RankError:
    text = f"rank {me.index} raised {type(error).__name__}: {error}"
    ranks: tuple[int, ...] = (me.index,)
    dead = tuple(rank.index for rank in scheduler.ranks if rank.dead)
    if dead:
        text = f"{ranks_text(dead)} crashed ({', '.join(str(scheduler.plan.crashes[rank]) for rank in dead)}); {text}"
        ranks = dead + ranks
    found = RankError(text, ranks)
    found.__cause__ = error
    return found


def _outcome(scheduler: Scheduler) -> list[Any]:
    error = scheduler.error
    if error is None and not any(rank.dead for rank in scheduler.ranks):  # a crash leaves calls without partners
        error = scheduler.first_complaint("unmatched")
    if error is not None:
        raise error
    return [scheduler.plan.crashes[rank.index] if rank.dead else rank.result for rank in scheduler.ranks]
