"""How a command ends when something is wrong: one sentence, the rank, an exit code, and no peer left waiting."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator

USER_ERROR = 2
"""Exit code for what the user can fix."""
_PATHS = (  # what a disk or a path cannot take
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
FAILURE = 1
"""Exit code for everything else."""


def rank_of_launch() -> int | None:
    """This process's rank if a launcher such as torchrun started it, else None."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and "WORLD_SIZE" in os.environ else None


@contextlib.contextmanager
def one_sentence(*, shared: bool) -> Iterator[None]:
    """Turn an exception into a message on stderr and an exit code; ``ZOO_TRACEBACK=1`` shows the traceback as well.

    Args:
        shared: what runs here is the same on all ranks (reading a configuration), so rank 0 speaks for all. Otherwise
            every rank that fails says so itself, except for errors that are known to be everywhere.

    A rank that a launcher started leaves at once, without waiting for its peers: its connections close, which they
    notice in their next collective, and the launcher ends the run.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        rank = rank_of_launch()
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            os._exit(128 + signal.SIGPIPE)  # as other programs end before ``| head``: without a word
        speaks = rank in (None, 0) or not (shared or getattr(error, "everywhere", False))
        if speaks:
            sys.stderr.write(_message(error, rank, shared) + "\n")
        code = USER_ERROR if is_user_error(error) else FAILURE
        if rank is None:
            raise SystemExit(code) from None
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _nobody_reads() -> bool:
    """Whether the other end of the standard output is closed."""
    asked = select.poll()
    asked.register(1, 0)  # errors alone
    return any(found & select.POLLERR for _, found in asked.poll(0))


def is_user_error(error: Exception) -> bool:
    """Whether the sentence alone tells what to do: no traceback needed."""
    if isinstance(error, OSError) and error.errno in _PATHS:
        return True
    return isinstance(error, (ValueError, NotImplementedError, FileNotFoundError, IsADirectoryError, PermissionError))


def _message(error: Exception, rank: int | None, shared: bool) -> str:
    where = "" if rank is None or shared or getattr(error, "everywhere", False) else f"rank {rank}: "
    text = str(error) or type(error).__name__
    # The interpreter's own sentence has the path in the wrong place; a class with a sentence of its own knows better.
    if isinstance(error, OSError) and error.filename is not None and type(error).__str__ is OSError.__str__:
        text = f"{error.filename}: {error.strerror}"
    lost = _lost_peer(error)
    if lost:
        text = f"stopped, because a peer is gone or does not answer ({text.splitlines()[0]})"
    plain = is_user_error(error) or lost
    if plain and os.environ.get("ZOO_TRACEBACK", "") in ("", "0"):
        return f"zoo: {where}{text}"
    return "".join(traceback.format_exception(error)) + f"zoo: {where}{type(error).__name__}: {text}"


def _lost_peer(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    signs = (
        "connection closed by peer", "connection reset", "timed out waiting", "broken pipe", "no error", "socket",
        "does not answer",
    )  # fmt: skip
    return type(error).__name__.startswith("Dist") or any(sign in text for sign in signs)
