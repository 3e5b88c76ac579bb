"""Failures of some ranks: reported by those that leave, found by those that wait for them."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zoo.comm.check import CollectiveMismatchError, verify

if TYPE_CHECKING:
    from zoo.comm.communicator import Communicator

T = TypeVar("T")
_COUNT = "zoo/failures/count"
_OTHER_CALLS = (
    "If that rank has not ended, the ranks have come to different calls (another number of micro-batches, a save or a "
    'forward on some ranks only): with {"comm": {"check": true}} in the configuration, check=True of an optimizer or '
    "Communicator, the error says which calls these are."
)


_OF_PEERS = ("gloo/transport", "timed out waiting", "pair closure", "closed by peer", "reset by peer")
"""In what torch says of a peer that is gone, or has not come."""


class RankFailedError(RuntimeError):
    """What needs all ranks of a group failed because of some of them; ``ranks`` are those, as the text names them."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def sentence_of(error: BaseException) -> str:
    """``ValueError: what it says``."""
    return f"{type(error).__name__}: {error}"


def report(error: BaseException) -> None:
    """Leave word of a failure of this rank where all ranks of the job can find it. Waits for nobody."""
    store = _store()
    if store is not None:
        number = store.add(_COUNT, 1)
        store.set(f"zoo/failures/{number}", json.dumps([dist.get_rank(), sentence_of(error)]))


def withdraw() -> None:
    """All ranks go on after what this one has reported. Waits for nobody."""
    store = _store()
    if store is not None:
        store.set(f"zoo/failures/{store.add(_COUNT, 1)}", json.dumps([dist.get_rank(), None]))


def report_uncaught() -> None:
    """From now on an exception that ends this process is reported to the others before it is shown. Once is enough."""
    shown = sys.excepthook
    if getattr(shown, "_zoo_reports", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Another rank's failure, passed on, is no news; and nothing may hide the error at hand.
        if not isinstance(error, RankFailedError):
            with contextlib.suppress(Exception):
                report(error)
        shown(kind, error, trace)

    hook._zoo_reports = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def reported() -> tuple[dict[int, str], str]:
    """What ranks of the job have reported, of each the last: the sentences of others by global rank, but for what this
    one has reported too, as where all ranks' data end in one step; and its own, empty for none."""
    found: dict[int, str | None] = {}  # None: withdrawn
    store = _store()
    if store is None:
        return {}, ""
    try:
        for number in range(1, store.add(_COUNT, 0) + 1):
            key = f"zoo/failures/{number}"
            if store.check([key]):  # else it is being written
                rank, text = json.loads(store.get(key))
                found[rank] = text
    except RuntimeError:
        pass  # the store went away with the rank that kept it: nobody can say more than the error at hand
    own = found.pop(dist.get_rank(), None)
    return {rank: text for rank, text in found.items() if text not in (None, own)}, own or ""


def raise_explained(error: Exception) -> NoReturn:
    """Raise :func:`explained`."""
    found = explained(error)
    if found is error:
        raise error
    raise found from error


def explained(error: Exception, peer: int | None = None) -> Exception:
    """The error of a wait, with the names of the ranks that it is due to, as far as they are known.

    Args:
        error: what the wait raised.
        peer: the global rank whose message it waited for, if it was one.

    Returns:
        A :class:`RankFailedError` that names the ranks that reported a failure, else ``peer``; or none, where a
        collective of torch was given up; ``error`` itself where it is something else.
    """
    if isinstance(error, (RankFailedError, CollectiveMismatchError)):
        return error
    reports, own = reported()
    if reports:
        told = "; ".join(f"rank {rank} failed with {text}" for rank, text in sorted(reports.items()))
        found = RankFailedError(f"{told} (here a wait ended with {sentence_of(error)})", tuple(sorted(reports)))
    elif peer is not None:
        why = f"This rank, {dist.get_rank()}, has failed before with {own}" if own else _OTHER_CALLS
        found = RankFailedError(f"rank {peer} does not answer: {sentence_of(error)}. {why}", (peer,))
    elif _is_of_peers(error):
        found = RankFailedError(f"a rank of this collective does not answer: {sentence_of(error)}. {_OTHER_CALLS}")
    else:
        return error
    found.__cause__ = error
    return found


def _is_of_peers(error: Exception) -> bool:
    """Whether torch says that other ranks are gone, or have not come in time."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(sign in text for sign in _OF_PEERS)


def _store() -> Any:
    if not dist.is_initialized():
        return None
    default: Any = dist.group.WORLD
    return c10d._world.pg_map[default][1]


def together(
    comm: Communicator,
    what: str,
    work: Callable[[], T],
    *,
    error: Callable[[str, tuple[int, ...]], Exception] = RankFailedError,
    plain: type[Exception] | tuple[type[Exception], ...] = (),
) -> list[T]:
    """Run ``work`` on every rank and give every rank the results of all, in rank order. A collective.

    Args:
        comm: the ranks.
        what: the subject of the error's sentence, as "saving step 3".
        work: what to run; its result must be picklable.
        error: makes the error from its sentence and the ranks of the group on which ``work`` raised.
        plain: errors that are told by their text alone, without the name of their class.

    Raises:
        RankFailedError: (or what ``error`` makes) on all ranks alike when ``work`` raised an Exception on any of
            them; it names those ranks and says what they raised.
    """
    cause: Exception | None = None
    mine: tuple[str | None, Any]
    try:
        mine = (None, work())
    except Exception as raised:
        cause = raised
        mine = (str(raised) if isinstance(raised, plain) else sentence_of(raised), None)
    everyone = comm.all_gather_object(mine)
    failed: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(everyone):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        told = "; ".join(f"{_names(ranks, comm.size)}{text}" for text, ranks in failed.items())
        raise error(f"{what} failed: {told}", tuple(sorted(itertools.chain(*failed.values())))) from cause
    return [value for _, value in everyone]


def agree_none_failed(
    comm: Communicator | None, what: str, error: BaseException | None = None, *, alike: str = ""
) -> None:
    """Where every rank comes, with the error that it failed with or without one: go on only if none has failed.

    One all-gather of 8 bytes; of a failure another one. A rank that comes with an error raises that by itself
    afterwards. An interrupt, and an error that :func:`report` has left word of, come from the midst of other
    collectives: of these only word is left, and nobody is waited for.

    Args:
        comm: the ranks; None for this one alone.
        what: the subject of the error's sentence, as "initialize", the same on all ranks.
        alike: what ranks that have not failed must have alike.

    Raises:
        RankFailedError: on the ranks that have not failed: it names those that have, and the first line of what each
            of them raises.
        CollectiveMismatchError: no rank has failed, and they do not have ``alike``; on all of them.
    """
    if comm is None or comm.size == 1 or comm.is_dry:
        return
    if error is not None and _has_reported(error):
        return
    if error is not None and not isinstance(error, Exception):
        report(error)
        return
    text = "" if error is None else _first_line(error)
    try:
        verify(comm.group, f"{what} {alike}" if error is None else "a failure", comm.device)
        return  # of all ranks, or of none
    except CollectiveMismatchError as mismatch:
        differ = mismatch
    except RuntimeError as lost:
        if error is None:
            raise_explained(lost)
        return  # the error at hand is the news
    everyone: list[str] = [""] * comm.size
    dist.all_gather_object(everyone, text, group=comm.group)  # not by the communicator, whose check may be what differs
    failed = {rank: told for rank, told in zip(comm.ranks, everyone, strict=True) if told}
    if not failed:
        raise differ
    if error is None:
        told = "; ".join(f"rank {rank}: {sentence}" for rank, sentence in failed.items())
        raise RankFailedError(f"{what} failed: {told}", tuple(failed))


def _first_line(error: BaseException) -> str:
    return (sentence_of(error).strip().splitlines() or [type(error).__name__])[0]


def _has_reported(error: BaseException) -> bool:
    return reported()[1] == sentence_of(error)


@contextlib.contextmanager
def raise_together(comm: Communicator | None, what: str) -> Iterator[None]:
    """``with raise_together(comm, "initialize"): ...``: what one rank raises inside ends it on all. Collective.

    Every rank comes to its end, or fails without having left others in collectives of the inside: then each raises
    what it failed with, and the others raise a RankFailedError. See :func:`agree_none_failed`.
    """
    try:
        yield
    except BaseException as error:
        agree_none_failed(comm, what, error)
        raise
    agree_none_failed(comm, what)


@contextlib.contextmanager
def raise_in_next(comm: Callable[[], Communicator | None], what: str) -> Iterator[None]:
    """What comes before an agreement that is elsewhere: an exception inside takes part in it, in this rank's place.

    The next thing that the other ranks do together is an :func:`agree_none_failed` over what ``comm()`` returns, which
    is called after an exception only.
    """
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # the error at hand is the news
            agree_none_failed(comm(), what, error)
        raise


def _names(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: "
